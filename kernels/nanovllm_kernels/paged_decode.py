"""Grouped-query attention of the one or few new tokens of each row over its pages.

Meaning: nanovllm_kernels.attention_reference. A program holds all query heads of a key/value head,
of every new token of the row: pairs of token and head, padded to the 16 rows a tensor core wants.
It streams keys and values past them once.

Decision: the rows' contexts, in blocks of tokens, form one line that is cut into equal shares, a
share to each lane of programs, whatever the lengths are. A row that a cut goes through leaves
partial results that a second kernel merges. Long and short rows, one row or hundreds, load the
device evenly without a number of splits to choose, and the grid does not depend on the lengths, so
a CUDA graph can hold it. The cuts are the same for all layers: `plan_decode` finds them once per
step.

Decision: a lane is one loop over its blocks, across the ends of rows, and what a block's address
depends on (row, length, page) is read one block ahead. Only so does Triton keep STAGES - 1 blocks
of keys and values in flight all the time: an id loaded in the same iteration would leave it one,
and a loop per row would drain at each row's end. Queries are read ahead, too, but widened only when
they are used: of a load that is used at once Triton makes another stage, and then found no order
for rows of several tokens.

Decision: for a few rows each kernel of rope_store, decode, merge is launched while the one before
still runs, and waits for it where it needs its results (programmatic dependent launch): 5.8 instead
of 7.1 us for one row of 384 tokens. For 64 rows that makes 91 of 79 us.

Decision: rows of one token each are a kernel of their own, compiled without `starts_R1`. With it a
row has up to `width` tokens, and a query may see none of the tokens that a lane has of its row, so
what is empty must not become NaN: in the running maximum, and in partial results.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels import attention_reference as reference
from nanovllm_kernels.case import Kernel
from nanovllm_kernels.decode_cases import all_rows, by_position, case_of
from nanovllm_kernels.device import follows, processors
from nanovllm_kernels.following import let_next_come, wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BLOCK_BYTES = 16384  # of keys in a block: 64 tokens of width 128 in 16 bits
STAGES = 3  # more would be slower: 2 to 7 % for 4, measured
PROGRAMS_PER_PROCESSOR = 2
INTERPRETED_PROCESSORS = 12  # few enough for rows to be cut in every way
# Weights of float16, at most 1, are times 2**14: else those below 2**-24 were none. All sums of a
# row and all its parts are so large, so it cancels.
FLOAT16_LIFT = tl.constexpr(14.0)
MERGED = 16  # partial results combined at once
MAX_WIDTH = 8  # new tokens of a row
OVERLAPPED_ROWS = 8


def block_tokens(pages_PSGA: Tensor) -> int:
    # In 8 bits as many as in 16, which they become: twice as many would not fit the registers.
    width_bytes = triton.next_power_of_2(pages_PSGA.shape[3]) * max(2, pages_PSGA.itemsize)
    return max(16, BLOCK_BYTES // width_bytes)


def plan_decode(lengths_R: Tensor, k_PSGA: Tensor) -> Tensor:
    """plan_N5 of plan_lanes. Good for every layer of the step."""
    return plan_lanes(lengths_R, k_PSGA.shape[2], block_tokens(k_PSGA), PROGRAMS_PER_PROCESSOR)


def plan_lanes(
    lengths_R: Tensor, num_kv_heads: int, block: int, per_processor: int, *, whole: bool = False
) -> Tensor:
    """plan_N5, int32, for blocks of so many tokens. Lengths are at least 1, but 0 at the tail.
    `whole`: no row is cut where lanes of equally many rows take at most an eighth longer.

    Of each lane: its first row, the block it starts at there, its number of blocks; and if it
    begins a row that it does not finish: that row, over how many lanes the row goes, or 0.
    """
    device, num_rows = lengths_R.device, len(lengths_R)
    num_processors = processors(device) if device.type == "cuda" else INTERPRETED_PROCESSORS
    num_lanes = max(1, per_processor * num_processors // num_kv_heads)
    plan_N5 = torch.empty(num_lanes, 5, dtype=torch.int32, device=device)
    most_rows = max(1024, triton.next_power_of_2(num_rows))  # mostly one size, so compiled once
    sizes = dict(BLOCK=block, ROWS=most_rows, WHOLE=whole)
    plan_kernel[(num_lanes,)](lengths_R, plan_N5, num_rows, **sizes)
    return plan_N5


def paged_decode(
    q_THA: Tensor, k_PSGA: Tensor, v_PSGA: Tensor, page_table_RM: Tensor, lengths_R: Tensor,
    plan_N5: Tensor, out_THA: Tensor | None = None, *, starts_R1: Tensor | None = None,
    width: int = 1, scales_2G: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """o_THA, which is `out_THA` if given. `plan_N5`: plan_decode's, of the same lengths.

    Row r's queries are starts_R1[r]:starts_R1[r + 1], at most `width`, its last tokens; without
    `starts_R1` each row has one. Rows at the tail may have no tokens and length 0: they get no
    work. What o_THA has past the last row's tokens is undefined. Reads no values on the host.
    `scales_2G`: float32, what keys and values of 8 bits are multiplied by, head by head.
    """
    assert 1 <= width <= (MAX_WIDTH if starts_R1 is not None else 1), width
    num_tokens, num_heads, head_size = q_THA.shape
    page_tokens, num_kv_heads = k_PSGA.shape[1:3]
    num_lanes = plan_N5.shape[0]
    assert q_THA.stride(2) == k_PSGA.stride(3) == page_table_RM.stride(1) == 1
    assert k_PSGA.stride() == v_PSGA.stride()
    o_THA, partial_o, partial_lse = results_of(q_THA, num_lanes, out_THA, width)
    group = num_heads // num_kv_heads
    tile = max(16, triton.next_power_of_2(group * width))
    waits = follows(num_tokens, q_THA.device)
    both = dict(W=width, RAGGED=starts_R1 is not None, WAITS=waits, launch_pdl=waits)
    both |= dict(A=head_size, A_BLOCK=triton.next_power_of_2(head_size))
    rows = page_table_RM, starts_R1, lengths_R, plan_N5, scales_2G
    decode_kernel[(num_kv_heads, num_lanes)](
        q_THA, k_PSGA, v_PSGA, *rows, o_THA, partial_o, partial_lse, *q_THA.stride()[:2],
        *k_PSGA.stride()[:3], page_table_RM.stride(0), page_table_RM.shape[1],
        math.log2(math.e) / math.sqrt(head_size), GROUP=group, TILE=tile, S=page_tokens,
        BLOCK=block_tokens(k_PSGA), STAGES=STAGES,
        LEADS=waits and num_tokens <= OVERLAPPED_ROWS * width, num_warps=4 if tile <= 64 else 8,
        **both,
    )  # fmt: skip
    # Of one row only the first lane has something to merge; programs of the others would keep the
    # product behind off their processors: 2 of 47 us of a layer.
    merging = 1 if len(lengths_R) == 1 else num_lanes
    merge_kernel[(width * num_heads, merging)](
        partial_o, partial_lse, starts_R1, plan_N5, o_THA, MERGED=MERGED, num_warps=1, **both
    )
    return o_THA


def results_of(
    q_THA: Tensor, num_lanes: int, out_THA: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for o_THA, if there is none, and for partial_o [N, 2, W * H, A] and partial_lse
    [N, 2, W * H]: what each lane leaves of the row it resumed, and of the row it began but did not
    finish, for W = `width` tokens of a row.
    """
    (num_tokens, num_heads, head_size), device = q_THA.shape, q_THA.device
    shape = (num_lanes, 2, width * num_heads)
    if out_THA is None:
        out_THA = torch.empty(num_tokens, num_heads, head_size, dtype=q_THA.dtype, device=device)
    assert out_THA.is_contiguous()
    return (
        out_THA,
        torch.empty(*shape, head_size, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lengths_R"])
def plan_kernel(
    lengths_R, plan_N5, num_rows, BLOCK: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr
):
    lane, num_lanes = tl.program_id(0), tl.num_programs(0)
    row = tl.arange(0, ROWS)
    blocks = tl.cdiv(tl.load(lengths_R + row, row < num_rows, 0), BLOCK)
    ends, total = tl.cumsum(blocks, 0), tl.sum(blocks, 0)
    share = tl.maximum(tl.cdiv(total, num_lanes), 1)
    start = tl.minimum(lane * share, total)
    stop = tl.minimum(start + share, total)
    if WHOLE:
        each = tl.cdiv(tl.sum((blocks > 0).to(tl.int32), 0), num_lanes)  # rows of a lane
        fits = 8 * each * tl.max(blocks, 0) <= 9 * share
        start = tl.where(fits, tl.sum(tl.where(row < lane * each, blocks, 0), 0), start)
        stop = tl.where(fits, tl.sum(tl.where(row < (lane + 1) * each, blocks, 0), 0), stop)
    plan_N5 += lane * 5
    is_before = ends <= start
    tl.store(plan_N5, tl.sum(is_before.to(tl.int32), 0))
    tl.store(plan_N5 + 1, start - tl.max(tl.where(is_before, ends, 0), 0))
    tl.store(plan_N5 + 2, stop - start)
    # The row of the last block: where it began, and where it ends.
    is_before = ends < stop
    row_start = tl.max(tl.where(is_before, ends, 0), 0)
    row_end = tl.min(tl.where(is_before, total, ends), 0)
    is_cut = (start < stop) & (row_start >= start) & (row_end > stop)
    tl.store(plan_N5 + 3, tl.sum(is_before.to(tl.int32), 0))
    tl.store(plan_N5 + 4, tl.where(is_cut, tl.cdiv(row_end, share) - lane, 0))


@triton.jit(
    do_not_specialize=["table_stride", "table_width"],
    do_not_specialize_on_alignment=["page_table_RM", "starts_R1", "lengths_R"],
)
def decode_kernel(
    q_THA, k_PSGA, v_PSGA, page_table_RM, starts_R1, lengths_R, plan_N5, scales_2G, o_THA,
    partial_o, partial_lse, q_stride, q_head_stride, page_stride, token_stride, head_stride,
    table_stride, table_width, scale, W: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, A: tl.constexpr, A_BLOCK: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, LEADS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    let_next_come(LEADS)
    wait(WAITS and not LEADS)
    # Programs of one lane read neighbouring heads of the same tokens at about the same time.
    kv_head, lane = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    row = tl.load(plan_N5 + lane * 5)
    block = tl.load(plan_N5 + lane * 5 + 1)
    count = tl.load(plan_N5 + lane * 5 + 2)
    if count == 0:
        return
    pair, a, n = tl.arange(0, TILE), tl.arange(0, A_BLOCK), tl.arange(0, BLOCK)
    if RAGGED:  # of the pairs' tokens the row has the first ones
        nth, head = pair // GROUP, kv_head * GROUP + pair % GROUP
        q_THA += nth[:, None] * q_stride
        at_o = nth * num_heads + head
    else:
        head = kv_head * GROUP + pair
        at_o = head
    k_PSGA += kv_head * head_stride
    v_PSGA += kv_head * head_stride
    q_THA += head[:, None] * q_head_stride + a[None, :]
    LIFT: tl.constexpr = 0.0 if scales_2G is None else FLOAT16_LIFT
    began = block  # where this lane began the row
    length = tl.load(lengths_R + row)
    first, num_new = queries_of(starts_R1, row, RAGGED)
    page = page_of(page_table_RM + row.to(tl.int64) * table_stride, table_width, block, S, BLOCK)
    wait(LEADS)
    inside_q = (pair < num_new * GROUP)[:, None] & (a < A)[None, :]
    q = tl.load(q_THA + first.to(tl.int64) * q_stride, inside_q, 0.0)
    k_scale, v_scale = scales_of(scales_2G, kv_head, tl.num_programs(0))
    scale *= k_scale
    highest = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    o = tl.zeros([TILE, A_BLOCK], tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        token = block * BLOCK + n
        cell = page.to(tl.int64) * page_stride + token % S * token_stride
        at_token = cell[:, None] + a[None, :]
        inside = (token < length)[:, None] & (a < A)[None, :]
        query = beside_cache(q, scales_2G)
        k = tl.load(k_PSGA + at_token, inside, 0.0).to(query.dtype)
        v = tl.load(v_PSGA + at_token, inside, 0.0).to(query.dtype)
        s = dot(query, tl.trans(k), tl.zeros([TILE, BLOCK], tl.float32)) * scale
        seen = (token < length)[None, :]
        if RAGGED:
            seen = token[None, :] <= (length - num_new + nth)[:, None]
        s = tl.where(seen, s, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(s, 1))
        base = new_highest
        if RAGGED:  # a query that has seen nothing has weights of 0
            base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        p = tl.exp2(s - (base - LIFT)[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(p, 1)
        o = dot(p.to(v.dtype), v, o * fade[:, None])
        highest = new_highest
        is_end = (block + 1) * BLOCK >= length
        if is_end | (i + 1 == count):
            if RAGGED:  # of nothing the mean is 0, and weighs nothing
                total = tl.where(total == 0.0, 1.0, total)
            mean = o / total[:, None] * v_scale
            if is_end & (began == 0):
                at = (first.to(tl.int64) * num_heads + at_o[:, None]) * A + a[None, :]
                tl.store(o_THA + at, mean.to(o_THA.dtype.element_ty), inside_q)
            else:
                part = (lane * 2 + (began == 0).to(tl.int32)) * (W * num_heads) + at_o
                tl.store(partial_o + part[:, None] * A + a[None, :], mean, inside_q)
                tl.store(partial_lse + part, highest + tl.log2(total), pair < num_new * GROUP)
            # Not by a factor of 0: what one row has of NaN stays its own.
            highest = tl.full([TILE], -float("inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
            o = tl.zeros([TILE, A_BLOCK], tl.float32)
        row += (is_end & (i + 1 < count)).to(tl.int32)  # after the last row there is none to read
        block = tl.where(is_end, 0, block + 1)
        began = tl.where(is_end, 0, began)
        length = tl.load(lengths_R + row)
        first, num_new = queries_of(starts_R1, row, RAGGED)
        pages = page_table_RM + row.to(tl.int64) * table_stride
        page = page_of(pages, table_width, block, S, BLOCK)
        inside_q = (pair < num_new * GROUP)[:, None] & (a < A)[None, :]
        q = tl.load(q_THA + first.to(tl.int64) * q_stride, inside_q, 0.0)


@triton.jit
def beside_cache(q, scales_2G):
    """Queries in the type that keys and values of 8 bits, if so they are, are widened to: float32
    if queries are, else float16, which a GPU gets of 8 bits in one instruction, and exactly.
    """
    if scales_2G is not None and q.dtype != tl.float32:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def scales_of(scales_2G, kv_head, num_kv_heads):
    """The scales of this head's keys and values; 1 where they have none."""
    k_scale, v_scale = 1.0, 1.0
    if scales_2G is not None:
        k_scale = tl.load(scales_2G + kv_head)
        v_scale = tl.load(scales_2G + num_kv_heads + kv_head)
    return k_scale, v_scale


@triton.jit
def queries_of(starts_R1, row, RAGGED: tl.constexpr):
    """Which query is the first of a row, and how many it has."""
    first, num_new = row, 1
    if RAGGED:
        first = tl.load(starts_R1 + row)
        num_new = tl.load(starts_R1 + row + 1) - first
    return first, num_new


@triton.jit
def page_of(pages, table_width, block, S: tl.constexpr, BLOCK: tl.constexpr):
    """The page of a block's tokens: one where pages hold whole blocks, else one per token.

    Past the row's end it is any page.
    """
    token = block * BLOCK if S % BLOCK == 0 else block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(pages + tl.minimum(token // S, table_width - 1))


@triton.jit
def dot(a, b, sum):
    """In full precision: float32 operands are split in three, 16-bit ones are exact anyway."""
    if INTERPRETED:  # numpy knows no bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sum, input_precision="tf32x3")


@triton.jit(do_not_specialize_on_alignment=["starts_R1"])
def merge_kernel(
    partial_o, partial_lse, starts_R1, plan_N5, o_THA, W: tl.constexpr, RAGGED: tl.constexpr,
    A: tl.constexpr, A_BLOCK: tl.constexpr, MERGED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One token and head of the row that this lane begins and others finish, if there is such a
    row.
    """
    pair, lane = tl.program_id(0), tl.program_id(1)
    num_pairs = tl.num_programs(0)
    row = tl.load(plan_N5 + lane * 5 + 3)
    num_lanes = tl.load(plan_N5 + lane * 5 + 4)
    let_next_come(WAITS)  # before any return: what follows waits for this kernel only
    wait(WAITS)
    if num_lanes == 0:
        return
    first, num_new = queries_of(starts_R1, row, RAGGED)
    num_heads = num_pairs // W
    if RAGGED:  # noqa: SIM102
        if pair >= num_new * num_heads:
            return
    a = tl.arange(0, A_BLOCK)
    o = merged_parts(partial_o, partial_lse, lane, num_lanes, pair, num_pairs, a, A, MERGED)
    at = o_THA + (first.to(tl.int64) * num_heads + pair) * A + a
    tl.store(at, o.to(o_THA.dtype.element_ty), a < A)


@triton.jit
def merged_parts(
    partial_o, partial_lse, lane, num_lanes, pair, num_pairs, a, A: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """The elements `a` of what so many lanes, this one and those behind it, found together."""
    highest = -float("inf")
    total = 0.0
    o = tl.zeros(a.shape, tl.float32)
    for nth_part in range(0, num_lanes, MERGED):
        nth = nth_part + tl.arange(0, MERGED)
        part = ((lane + nth) * 2 + (nth == 0).to(tl.int32)) * num_pairs + pair
        lse = tl.load(partial_lse + part, nth < num_lanes, -float("inf"))
        inside = (nth < num_lanes)[:, None] & (a < A)[None, :]
        each = tl.load(partial_o + part[:, None] * A + a[None, :], inside, 0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - new_highest)
        fade = tl.exp2(highest - new_highest)
        total = total * fade + tl.sum(weights, 0)
        o = o * fade + tl.sum(each * weights[:, None], 0)
        highest = new_highest
    return o / total


# 16 bit: weights and the result are each rounded by half an ulp. 32 bit: a score is a sum of up to
# 256 products, and an error in it is one of the weight.
PAGED_DECODE = Kernel(
    "paged_decode",
    by_position(paged_decode),
    by_position(reference.paged_decode),
    tuple(case_of(plan_decode, rows) for rows in all_rows()),
    ulps_16=1,
    ulps_32=256,
    scale=reference.weighted_sizes(by_position(reference.paged_decode)),
)
