"""Grouped-query attention of one new token per row over its pages.

Meaning: nanovllm_kernels.attention_reference. A program holds all query heads of a key/value head,
padded to the 16 rows a tensor core wants, and streams keys and values past them once.

Decision: the rows' contexts, in blocks of tokens, form one line that is cut into equal shares, a
share to each lane of programs, whatever the lengths are. A row that a cut goes through leaves
partial results that a second kernel merges. Long and short rows, one row or hundreds, load the
device evenly without a number of splits to choose, and the grid does not depend on the lengths, so
a CUDA graph can hold it. The cuts are the same for all layers: `plan_decode` finds them once per
step.

Decision: a lane is one loop over its blocks, across the ends of rows, and what a block's address
depends on (row, length, page) is read one block ahead. Only so does Triton keep STAGES - 1 blocks
of keys and values in flight all the time: an id loaded in the same iteration would leave it one,
and a loop per row would drain at each row's end.

Decision: for a few rows each kernel of rope_store, decode, merge is launched while the one before
still runs, and waits for it where it needs its results (programmatic dependent launch): 5.8 instead
of 7.1 us for one row of 384 tokens. For 64 rows that makes 91 of 79 us.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels import attention_reference as reference
from nanovllm_kernels.case import Args, Case, Kernel, bits
from nanovllm_kernels.device import follows, processors

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BLOCK_BYTES = 16384  # of keys in a block: 64 tokens of width 128 in 16 bits
STAGES = 3  # more would be slower: 2 to 7 % for 4, measured
PROGRAMS_PER_PROCESSOR = 2
INTERPRETED_PROCESSORS = 12  # few enough for rows to be cut in every way
MERGED = 16  # partial results combined at once
OVERLAPPED_ROWS = 8


def block_tokens(pages_PSGA: Tensor) -> int:
    width_bytes = triton.next_power_of_2(pages_PSGA.shape[3]) * pages_PSGA.itemsize
    return max(16, BLOCK_BYTES // width_bytes)


def plan_decode(lengths_R: Tensor, k_PSGA: Tensor) -> Tensor:
    """plan_N5 of plan_lanes. Good for every layer of the step."""
    return plan_lanes(lengths_R, k_PSGA.shape[2], block_tokens(k_PSGA), PROGRAMS_PER_PROCESSOR)


def plan_lanes(lengths_R: Tensor, num_kv_heads: int, block: int, per_processor: int) -> Tensor:
    """plan_N5, int32, for blocks of so many tokens. Lengths are at least 1.

    Of each lane: its first row, the block it starts at there, its number of blocks; and if it
    begins a row that it does not finish: that row, over how many lanes the row goes, or 0.
    """
    device, num_rows = lengths_R.device, len(lengths_R)
    num_processors = processors(device) if device.type == "cuda" else INTERPRETED_PROCESSORS
    num_lanes = max(1, per_processor * num_processors // num_kv_heads)
    plan_N5 = torch.empty(num_lanes, 5, dtype=torch.int32, device=device)
    most_rows = max(1024, triton.next_power_of_2(num_rows))  # mostly one size, so compiled once
    plan_kernel[(num_lanes,)](lengths_R, plan_N5, num_rows, BLOCK=block, ROWS=most_rows)
    return plan_N5


def paged_decode(
    q_RHA: Tensor,
    k_PSGA: Tensor,
    v_PSGA: Tensor,
    page_table_RM: Tensor,
    lengths_R: Tensor,
    plan_N5: Tensor,
    out_RHA: Tensor | None = None,
) -> Tensor:
    """o_RHA, which is `out_RHA` if given. `plan_N5`: plan_decode's, of the same lengths.

    Reads no values on the host.
    """
    num_rows, num_heads, head_size = q_RHA.shape
    page_tokens, num_kv_heads = k_PSGA.shape[1:3]
    num_lanes = plan_N5.shape[0]
    assert q_RHA.stride(2) == k_PSGA.stride(3) == page_table_RM.stride(1) == 1
    assert k_PSGA.stride() == v_PSGA.stride()
    o_RHA, partial_o, partial_lse = results_of(q_RHA, num_lanes, out_RHA)
    group = num_heads // num_kv_heads
    waits = follows(num_rows, q_RHA.device)
    both = {
        "A": head_size,
        "A_BLOCK": triton.next_power_of_2(head_size),
        "WAITS": waits,
        "launch_pdl": waits,
    }
    decode_kernel[(num_kv_heads, num_lanes)](
        q_RHA,
        k_PSGA,
        v_PSGA,
        page_table_RM,
        lengths_R,
        plan_N5,
        o_RHA,
        partial_o,
        partial_lse,
        q_RHA.stride(0),
        q_RHA.stride(1),
        *k_PSGA.stride()[:3],
        page_table_RM.stride(0),
        page_table_RM.shape[1],
        math.log2(math.e) / math.sqrt(head_size),
        GROUP=group,
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
        S=page_tokens,
        BLOCK=block_tokens(k_PSGA),
        STAGES=STAGES,
        LEADS=waits and num_rows <= OVERLAPPED_ROWS,
        num_warps=4,
        **both,
    )
    merge_kernel[(num_heads, num_lanes)](
        partial_o, partial_lse, plan_N5, o_RHA, MERGED=MERGED, num_warps=1, **both
    )
    return o_RHA


def results_of(
    q_RHA: Tensor, num_lanes: int, out_RHA: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for o_RHA, if there is none, and for partial_o [N, 2, H, A] and partial_lse [N, 2, H]:
    what each lane leaves of the row it resumed, and of the row it began but did not finish.
    """
    (num_rows, num_heads, width), device = q_RHA.shape, q_RHA.device
    shape = (num_lanes, 2, num_heads)
    if out_RHA is None:
        out_RHA = torch.empty(num_rows, num_heads, width, dtype=q_RHA.dtype, device=device)
    assert out_RHA.is_contiguous()
    return (
        out_RHA,
        torch.empty(*shape, width, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lengths_R"])
def plan_kernel(lengths_R, plan_N5, num_rows, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    lane, num_lanes = tl.program_id(0), tl.num_programs(0)
    row = tl.arange(0, ROWS)
    blocks = tl.cdiv(tl.load(lengths_R + row, row < num_rows, 0), BLOCK)
    ends, total = tl.cumsum(blocks, 0), tl.sum(blocks, 0)
    share = tl.cdiv(total, num_lanes)
    start = tl.minimum(lane * share, total)
    stop = tl.minimum(start + share, total)
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
    do_not_specialize_on_alignment=["page_table_RM", "lengths_R"],
)
def decode_kernel(
    q_RHA,
    k_PSGA,
    v_PSGA,
    page_table_RM,
    lengths_R,
    plan_N5,
    o_RHA,
    partial_o,
    partial_lse,
    q_stride,
    q_head_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    table_width,
    scale,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    A: tl.constexpr,
    A_BLOCK: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LEADS: tl.constexpr,
    WAITS: tl.constexpr,
):
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    elif WAITS:
        tl.extra.cuda.gdc_wait()
    # Programs of one lane read neighbouring heads of the same tokens at about the same time.
    kv_head, lane = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    row = tl.load(plan_N5 + lane * 5)
    block = tl.load(plan_N5 + lane * 5 + 1)
    count = tl.load(plan_N5 + lane * 5 + 2)
    if count == 0:
        return
    member, a, n = tl.arange(0, GROUP_BLOCK), tl.arange(0, A_BLOCK), tl.arange(0, BLOCK)
    head = kv_head * GROUP + member
    inside_q = (member < GROUP)[:, None] & (a < A)[None, :]
    k_PSGA += kv_head * head_stride
    v_PSGA += kv_head * head_stride
    q_RHA += head[:, None] * q_head_stride + a[None, :]
    began = block  # where this lane began the row
    length = tl.load(lengths_R + row)
    page = page_of(page_table_RM + row.to(tl.int64) * table_stride, table_width, block, S, BLOCK)
    if LEADS:
        tl.extra.cuda.gdc_wait()
    q = tl.load(q_RHA + row.to(tl.int64) * q_stride, inside_q, 0.0)
    highest = tl.full([GROUP_BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    o = tl.zeros([GROUP_BLOCK, A_BLOCK], tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        token = block * BLOCK + n
        at_token = (page.to(tl.int64) * page_stride + token % S * token_stride)[:, None] + a[
            None, :
        ]
        inside = (token < length)[:, None] & (a < A)[None, :]
        k = tl.load(k_PSGA + at_token, inside, 0.0)
        v = tl.load(v_PSGA + at_token, inside, 0.0)
        s = dot(q, tl.trans(k), tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)) * scale
        s = tl.where((token < length)[None, :], s, -float("inf"))
        highest = tl.where(block == began, -float("inf"), highest)  # forgets the row before
        new_highest = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s - new_highest[:, None])
        fade = tl.exp2(highest - new_highest)
        total = total * fade + tl.sum(p, 1)
        o = dot(p.to(v.dtype), v, o * fade[:, None])
        highest = new_highest
        is_end = (block + 1) * BLOCK >= length
        if is_end | (i + 1 == count):
            mean = o / total[:, None]
            if is_end & (began == 0):
                at = o_RHA + (row.to(tl.int64) * num_heads + head[:, None]) * A + a[None, :]
                tl.store(at, mean.to(o_RHA.dtype.element_ty), inside_q)
            else:
                part = (lane * 2 + (began == 0).to(tl.int32)) * num_heads + head
                tl.store(partial_o + part[:, None] * A + a[None, :], mean, inside_q)
                tl.store(partial_lse + part, highest + tl.log2(total), member < GROUP)
        row += (is_end & (i + 1 < count)).to(tl.int32)  # after the last row there is none to read
        block = tl.where(is_end, 0, block + 1)
        began = tl.where(is_end, 0, began)
        length = tl.load(lengths_R + row)
        pages = page_table_RM + row.to(tl.int64) * table_stride
        page = page_of(pages, table_width, block, S, BLOCK)
        q = tl.load(q_RHA + row.to(tl.int64) * q_stride, inside_q, 0.0)


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


@triton.jit
def merge_kernel(
    partial_o,
    partial_lse,
    plan_N5,
    o_RHA,
    A: tl.constexpr,
    A_BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
    WAITS: tl.constexpr,
):
    """One head of the row that this lane begins and others finish, if there is such a row."""
    head, lane = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    row = tl.load(plan_N5 + lane * 5 + 3)
    num_lanes = tl.load(plan_N5 + lane * 5 + 4)
    if WAITS:  # before any return: what follows waits for this kernel only
        tl.extra.cuda.gdc_wait()
    if num_lanes == 0:
        return
    a = tl.arange(0, A_BLOCK)
    highest = -float("inf")
    total = 0.0
    o = tl.zeros([A_BLOCK], tl.float32)
    for first in range(0, num_lanes, MERGED):
        nth = first + tl.arange(0, MERGED)
        part = ((lane + nth) * 2 + (nth == 0).to(tl.int32)) * num_heads + head
        lse = tl.load(partial_lse + part, nth < num_lanes, -float("inf"))
        inside = (nth < num_lanes)[:, None] & (a < A)[None, :]
        each = tl.load(partial_o + part[:, None] * A + a[None, :], inside, 0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - new_highest)
        fade = tl.exp2(highest - new_highest)
        total = total * fade + tl.sum(weights, 0)
        o = o * fade + tl.sum(each * weights[:, None], 0)
        highest = new_highest
    at = o_RHA + (row.to(tl.int64) * num_heads + head) * A + a
    tl.store(at, (o / total).to(o_RHA.dtype.element_ty), a < A)


def inputs(
    lengths: tuple[int, ...],
    heads: tuple[int, int, int],
    page_tokens: int,
    dtype: torch.dtype,
    kind: str,
    device: torch.device,
) -> Args:
    new = [1] * len(lengths)
    q, k, v, table, _, at = reference.paged_inputs(
        lengths, new, heads, page_tokens, dtype, device, kind
    )
    return q, k, v, table, at, plan_decode(at, k)


def cases() -> tuple[Case, ...]:
    ragged = (1, 130, 7, 64, 65, 1, 300, 17, 128)
    small = [
        ((1,), (2, 1, 128), 16),
        ((1000,), (2, 1, 64), 16),
        (ragged, (4, 2, 128), 16),
        (ragged, (8, 2, 128), 128),
        (ragged, (3, 1, 80), 32),
        (ragged, (4, 2, 64), 64),
        (ragged, (2, 2, 256), 48),
        (ragged, (20, 1, 16), 16),  # more query heads than a tensor core's 16 rows
        (ragged, (8, 8, 64), 128),
        ((1,) * 5, (4, 2, 128), 128),
    ]
    large = [
        ((2000, *ragged, 5000), heads, page_tokens)
        for heads in ((16, 8, 128), (32, 8, 128), (14, 2, 64), (16, 2, 256), (12, 4, 80))
        for page_tokens in (16, 64, 128)
    ]
    checked = [*((*shape, torch.bfloat16, "normal") for shape in (*small, *large))]
    checked += [
        (ragged, (4, 2, 64), 16, torch.float32, "normal"),
        (ragged, (4, 2, 128), 32, torch.bfloat16, "spike"),
        # More partial results than are merged at once, with the largest among the last.
        ((1340,), (2, 1, 128), 16, torch.bfloat16, "spike"),
    ]
    return (
        *(
            Case(
                f"{kind} rows={len(lengths)} longest={max(lengths)} HGA={heads} page={page} "
                f"{bits(dtype)}",
                partial(inputs, lengths, heads, page, dtype, kind),
                small=sum(lengths) < 1400,
            )
            for lengths, heads, page, dtype, kind in checked
        ),
        *timed_cases(),
    )


def timed_cases() -> list[Case]:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    spread = tuple(torch.linspace(100, 2048, 256).int()[order].tolist())  # as in the middle of W1
    shapes = [
        (f"R={R} ctx={length}", (length,) * R, (H, G, A), page_tokens)
        for R, length, H, G, A, page_tokens in (
            (1, 1024, 16, 8, 128, 128),
            (1, 32768, 32, 8, 128, 128),
            (8, 4096, 32, 8, 128, 128),
            (64, 1024, 16, 8, 128, 128),
            (64, 1024, 32, 8, 128, 128),
            (256, 1024, 16, 8, 128, 128),
            (256, 1024, 16, 8, 128, 64),
            (256, 1024, 16, 8, 128, 16),
            (256, 1024, 32, 8, 128, 128),
            (64, 4096, 16, 2, 256, 64),
        )
    ]
    shapes.append(("R=256 ctx=100..2048", spread, (16, 8, 128), 128))
    return [
        Case(
            f"{name} HGA={heads} page={page}",
            partial(inputs, lengths, heads, page, torch.bfloat16, "normal"),
            num_bytes=4 * heads[2] * (sum(lengths) * heads[1] + len(lengths) * heads[0]),
        )
        for name, lengths, heads, page in shapes
    ]


# 16 bit: weights and the result are each rounded by half an ulp. 32 bit: a score is a sum of up to
# 256 products, and an error in it is one of the weight.
PAGED_DECODE = Kernel(
    "paged_decode",
    paged_decode,
    reference.paged_decode,
    cases(),
    ulps_16=1,
    ulps_32=256,
    scale=reference.weighted_sizes(reference.paged_decode),
)
