"""Split-KV flash decoding over pages, in Triton: grouped queries, a few new tokens per row.

The reference is reference.py. A program has all query heads of a key/value head, for every new
token of the row. These (token, head) pairs are padded to the 16 rows of a tensor core. It streams
keys and values past them once.

Decision: the contexts of all rows, in blocks of tokens, form one sequence that is cut into equal
shares, for any lengths. Each lane of programs (one program per key/value head) gets one share. A
row that a cut divides leaves partial results, which a second kernel merges. Long and short rows,
one row or hundreds, load the device evenly, without a number of splits to choose. The grid does not
depend on the lengths, so a CUDA graph can hold it. The cuts are the same for all layers;
`plan_decode` computes them once per step.

Decision: a lane is one loop over its blocks, across the ends of rows. The inputs of a block's
address (row, length, page) are loaded one block ahead. Only then does Triton keep STAGES - 1 blocks
of keys and values in flight all the time. A page id loaded in the same iteration would leave one in
flight. A loop per row would drain the pipeline at each row's end. Queries are loaded ahead, too,
but converted only when they are used. For a load that is used at once, Triton adds a stage. It then
found no schedule for rows of several tokens.

Decision: for a few rows, rope_store, decode and merge are launched early (programmatic dependent
launch). Each starts while the kernel before runs, and waits where it needs its results. One row of
384 tokens takes 5.8 us instead of 7.1. With 64 rows this would take 91 us instead of 79.

Decision: rows of one token each use a separate kernel, compiled without `starts_R1`. With
`starts_R1`, a row has up to `width` tokens, and a query may see no token of the lane's share. The
running maximum and the partial results must then not become NaN.

Decision: with `whole`, no row is cut, and the sum of weights is a product with ones, whose order
does not depend on the tile. A row then has the same bits beside any other rows, and the same as in
paged_prefill with `ordered` (kernels.invariant).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention import reference
from nanovllm_kernels.attention.decode_cases import all_rows, by_position, case_of
from nanovllm_kernels.case import Kernel
from nanovllm_kernels.device import launches_early, processors
from nanovllm_kernels.triton_parts import dot, launch_dependents, wait

BLOCK_BYTES = 16384  # of keys in a block: 64 tokens of width 128 in 16 bits
STAGES = 3  # 4 are 2 to 7 % slower, measured
PROGRAMS_PER_PROCESSOR = 2
INTERPRETED_PROCESSORS = 12  # small, so that rows are cut in all ways
# Weights in float16, at most 1, are multiplied by 2**14, since those below 2**-24 would be 0. All
# sums and partial sums of a row have this factor, so it cancels.
FLOAT16_LIFT = tl.constexpr(14.0)
MERGED = 16  # partial results combined at once
MAX_WIDTH = 8  # new tokens of a row
OVERLAPPED_ROWS = 8


def supports_all(**_: object) -> None:
    """Return None: the kernel supports every cache."""


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """An implementation of attention for decode rows, over pages of keys and values or of latents.

    `plan` runs once per step and `attend` in every layer. The Triton kernels of both kinds define
    the arguments: here plan_decode and paged_decode, for latents those of latent_decode.
    """

    plan: Callable[..., Any]
    attend: Callable[..., Tensor]
    max_width: int  # new tokens of a row
    obstacle: Callable[..., str | None] = supports_all  # the reason why a cache is not supported


def block_tokens(pages_PSGA: Tensor) -> int:
    # fp8 blocks have the tokens of 16-bit ones, to which they are converted: more would not fit the
    # registers.
    width_bytes = triton.next_power_of_2(pages_PSGA.shape[3]) * max(2, pages_PSGA.itemsize)
    return max(16, BLOCK_BYTES // width_bytes)


def plan_decode(lengths_R: Tensor, k_PSGA: Tensor) -> Tensor:
    """Return plan_N5 of plan_lanes. It is valid for all layers of the step."""
    return plan_lanes(lengths_R, k_PSGA.shape[2], block_tokens(k_PSGA), PROGRAMS_PER_PROCESSOR)


def plan_whole(lengths_R: Tensor, k_PSGA: Tensor) -> Tensor:
    """Return plan_N5 of plan_rows. It is valid for all layers of the step."""
    return plan_rows(lengths_R, block_tokens(k_PSGA))


def plan_rows(lengths_R: Tensor, block: int) -> Tensor:
    """Return a plan that cuts no row: a lane for each row, which reads its blocks in their order.

    So no bit of a row depends on other rows. A few long rows leave most of the GPU idle.
    """
    plan_N5 = lengths_R.new_zeros(len(lengths_R), 5)
    plan_N5[:, 0] = torch.arange(len(lengths_R), device=lengths_R.device)
    plan_N5[:, 2] = (lengths_R + block - 1) // block
    return plan_N5


def plan_lanes(
    lengths_R: Tensor, num_kv_heads: int, block: int, per_processor: int, *, whole: bool = False
) -> Tensor:
    """Return plan_N5, int32, for blocks of `block` tokens.

    Lengths are at least 1, but 0 at the end. Each lane's first entries are its first row, its first
    block in that row, and its number of blocks. The last two are the row that it begins but does
    not finish, and the number of lanes over which that row goes. This number is 0 if there is no
    such row. With `whole`, no row is cut if lanes of equal numbers of rows take at most an eighth
    longer.
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
    width: int = 1, scales_2G: Tensor | None = None, whole: bool = False,
) -> Tensor:  # fmt: skip
    """Return o_THA, which is `out_THA` if given. `plan_N5` must be from the same lengths.

    `whole`: the plan is plan_whole's.

    Row r's queries are its last tokens, starts_R1[r]:starts_R1[r + 1], at most `width`. Without
    `starts_R1` each row has one. Rows at the end may have no tokens and length 0; they take no
    work. The contents of o_THA after the last row's tokens are undefined. No value is read on the
    host. `scales_2G` has the float32 factors of fp8 keys and values, per head.
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
    waits = launches_early(num_tokens, q_THA.device)
    both = dict(W=width, RAGGED=starts_R1 is not None, WAITS=waits, launch_pdl=waits)
    both |= dict(A=head_size, A_BLOCK=triton.next_power_of_2(head_size))
    rows = page_table_RM, starts_R1, lengths_R, plan_N5, scales_2G
    decode_kernel[(num_kv_heads, num_lanes)](
        q_THA, k_PSGA, v_PSGA, *rows, o_THA, partial_o, partial_lse, *q_THA.stride()[:2],
        *k_PSGA.stride()[:3], page_table_RM.stride(0), page_table_RM.shape[1],
        math.log2(math.e) / math.sqrt(head_size), GROUP=group, TILE=tile, S=page_tokens,
        BLOCK=block_tokens(k_PSGA), STAGES=STAGES,
        LEADS=waits and num_tokens <= OVERLAPPED_ROWS * width, num_warps=4 if tile <= 64 else 8,
        ORDERED=whole, **both,
    )  # fmt: skip
    if whole:
        return o_THA
    # For a single row, only the first lane has anything to merge. Programs of the other lanes would
    # delay the next GEMM: by 2 of 47 us of a layer.
    merging = 1 if len(lengths_R) == 1 else num_lanes
    merge_kernel[(width * num_heads, merging)](
        partial_o, partial_lse, starts_R1, plan_N5, o_THA, MERGED=MERGED, num_warps=1, **both
    )
    return o_THA


DECODE = DecodeKernel(plan_decode, paged_decode, MAX_WIDTH)
WHOLE_ROWS = DecodeKernel(plan_whole, partial(paged_decode, whole=True), MAX_WIDTH)


def results_of(
    q_THA: Tensor, num_lanes: int, out_THA: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate o_THA, if it is None, and the partial results of lanes.

    partial_o is [N, 2, W * H, A] and partial_lse [N, 2, W * H], with W = `width` tokens per row.
    Index 0 is for the row that a lane resumed, index 1 for the row that it began but did not
    finish.
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
        each = tl.cdiv(tl.sum((blocks > 0).to(tl.int32), 0), num_lanes)  # rows per lane
        fits = 8 * each * tl.max(blocks, 0) <= 9 * share
        start = tl.where(fits, tl.sum(tl.where(row < lane * each, blocks, 0), 0), start)
        stop = tl.where(fits, tl.sum(tl.where(row < (lane + 1) * each, blocks, 0), 0), stop)
    plan_N5 += lane * 5
    is_before = ends <= start
    tl.store(plan_N5, tl.sum(is_before.to(tl.int32), 0))
    tl.store(plan_N5 + 1, start - tl.max(tl.where(is_before, ends, 0), 0))
    tl.store(plan_N5 + 2, stop - start)
    # The row of the last block: where it begins and ends.
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
    ORDERED: tl.constexpr,
):  # fmt: skip
    launch_dependents(LEADS)
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
    if RAGGED:  # a row has the first tokens of the pairs
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
    began = block  # block at which this lane began the row
    length = tl.load(lengths_R + row)
    first, num_new = queries_of(starts_R1, row, RAGGED)
    page = page_of(page_table_RM + row.to(tl.int64) * table_stride, table_width, block, S, BLOCK)
    wait(LEADS)
    inside_q = (pair < num_new * GROUP)[:, None] & (a < A)[None, :]
    q = tl.load(q_THA + first.to(tl.int64) * q_stride, inside_q, 0.0)
    k_scale, v_scale = scales_of(scales_2G, kv_head, tl.num_programs(0))
    scale *= k_scale
    highest = tl.full([TILE], -float("inf"), tl.float32)
    total = no_weights(TILE, ORDERED)
    o = tl.zeros([TILE, A_BLOCK], tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        token = block * BLOCK + n
        cell = page.to(tl.int64) * page_stride + token % S * token_stride
        at_token = cell[:, None] + a[None, :]
        inside = (token < length)[:, None] & (a < A)[None, :]
        query = in_cache_dtype(q, scales_2G)
        k = tl.load(k_PSGA + at_token, inside, 0.0).to(query.dtype)
        v = tl.load(v_PSGA + at_token, inside, 0.0).to(query.dtype)
        s = dot(query, tl.trans(k), tl.zeros([TILE, BLOCK], tl.float32)) * scale
        seen = (token < length)[None, :]
        if RAGGED:
            seen = token[None, :] <= (length - num_new + nth)[:, None]
        s = tl.where(seen, s, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(s, 1))
        base = new_highest
        if RAGGED:  # a query that has seen no token has weights of 0
            base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        p = tl.exp2(s - (base - LIFT)[:, None])
        rescale = tl.exp2(highest - base)
        total = more_weights(total, rescale, p, v, ORDERED)
        o = dot(p.to(v.dtype), v, o * rescale[:, None])
        highest = new_highest
        is_end = (block + 1) * BLOCK >= length
        if is_end | (i + 1 == count):
            sums = sum_of_weights(total, ORDERED)
            if RAGGED:  # the mean of no tokens is 0 and has no weight
                sums = tl.where(sums == 0.0, 1.0, sums)
            mean = o / sums[:, None] * v_scale
            if is_end & (began == 0):
                at = (first.to(tl.int64) * num_heads + at_o[:, None]) * A + a[None, :]
                tl.store(o_THA + at, mean.to(o_THA.dtype.element_ty), inside_q)
            else:
                part = (lane * 2 + (began == 0).to(tl.int32)) * (W * num_heads) + at_o
                tl.store(partial_o + part[:, None] * A + a[None, :], mean, inside_q)
                tl.store(partial_lse + part, highest + tl.log2(sums), pair < num_new * GROUP)
            # Reset instead of multiplying by 0, so that NaN of one row does not reach the next.
            highest = tl.full([TILE], -float("inf"), tl.float32)
            total = no_weights(TILE, ORDERED)
            o = tl.zeros([TILE, A_BLOCK], tl.float32)
        row += (is_end & (i + 1 < count)).to(tl.int32)  # no row follows the last one
        block = tl.where(is_end, 0, block + 1)
        began = tl.where(is_end, 0, began)
        length = tl.load(lengths_R + row)
        first, num_new = queries_of(starts_R1, row, RAGGED)
        pages = page_table_RM + row.to(tl.int64) * table_stride
        page = page_of(pages, table_width, block, S, BLOCK)
        inside_q = (pair < num_new * GROUP)[:, None] & (a < A)[None, :]
        q = tl.load(q_THA + first.to(tl.int64) * q_stride, inside_q, 0.0)


@triton.jit
def no_weights(TILE: tl.constexpr, ORDERED: tl.constexpr):
    """Return zero sums of weights: float32 [TILE], or if ORDERED [TILE, 16] with equal columns."""
    return tl.zeros([TILE, 16], tl.float32) if ORDERED else tl.zeros([TILE], tl.float32)


@triton.jit
def more_weights(total, rescale, p, v, ORDERED: tl.constexpr):
    """Return total * rescale plus the sums of a block's weights p [TILE, BLOCK].

    If ORDERED, the sums are a product with ones. The order of its additions does not depend on the
    layout of the tile, as that of tl.sum does.
    """
    if ORDERED:
        ones = tl.full([p.shape[1], 16], 1.0, v.dtype)
        total = dot(p.to(v.dtype), ones, total * rescale[:, None])
    else:
        total = total * rescale + tl.sum(p, 1)
    return total


@triton.jit
def sum_of_weights(total, ORDERED: tl.constexpr):
    """Return the sums as [TILE]. If ORDERED, all 16 columns of total are equal."""
    if ORDERED:
        total = tl.max(total, 1)
    return total


@triton.jit
def in_cache_dtype(q, scales_2G):
    """Convert queries to the type that fp8 keys and values are widened to; otherwise return them.

    This is float32 for float32 queries, else float16, to which a GPU converts e4m3 exactly in one
    instruction.
    """
    if scales_2G is not None and q.dtype != tl.float32:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def scales_of(scales_2G, kv_head, num_kv_heads):
    """Return the scales of this head's keys and values; 1 if there are none."""
    k_scale, v_scale = 1.0, 1.0
    if scales_2G is not None:
        k_scale = tl.load(scales_2G + kv_head)
        v_scale = tl.load(scales_2G + num_kv_heads + kv_head)
    return k_scale, v_scale


@triton.jit
def queries_of(starts_R1, row, RAGGED: tl.constexpr):
    """Return the first query of a row, and the number of its queries."""
    first, num_new = row, 1
    if RAGGED:
        first = tl.load(starts_R1 + row)
        num_new = tl.load(starts_R1 + row + 1) - first
    return first, num_new


@triton.jit
def page_of(pages, table_width, block, S: tl.constexpr, BLOCK: tl.constexpr):
    """Return the page of a block's tokens: one if pages hold whole blocks, else one per token.

    After the row's end it is any valid page.
    """
    token = block * BLOCK if S % BLOCK == 0 else block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(pages + tl.minimum(token // S, table_width - 1))


@triton.jit(do_not_specialize_on_alignment=["starts_R1"])
def merge_kernel(
    partial_o, partial_lse, starts_R1, plan_N5, o_THA, W: tl.constexpr, RAGGED: tl.constexpr,
    A: tl.constexpr, A_BLOCK: tl.constexpr, MERGED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Merge one token and head of the row that this lane begins and others finish, if any."""
    pair, lane = tl.program_id(0), tl.program_id(1)
    num_pairs = tl.num_programs(0)
    row = tl.load(plan_N5 + lane * 5 + 3)
    num_lanes = tl.load(plan_N5 + lane * 5 + 4)
    launch_dependents(WAITS)  # before any return: the next kernel waits for this one only
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
    """Return elements `a` of the merged results of `num_lanes` lanes, from `lane` on."""
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
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weights, 0)
        o = o * rescale + tl.sum(each * weights[:, None], 0)
        highest = new_highest
    return o / total


# 16 bit: weights and the result are each rounded by half an ulp. The 32-bit bound is for scores,
# sums of up to 256 products. An absolute error of a score is a relative error of its weight.
PAGED_DECODE = Kernel(
    "paged_decode",
    by_position(paged_decode),
    by_position(reference.paged_decode),
    tuple(case_of(plan_decode, rows) for rows in all_rows()),
    ulps_16=1,
    ulps_32=256,
    scale=reference.weighted_sizes(by_position(reference.paged_decode)),
)
