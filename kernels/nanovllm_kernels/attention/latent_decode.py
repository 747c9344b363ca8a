"""Split-KV flash decoding of latent attention (MLA) over pages of latents, in Triton.

The reference is latent_reference.py. Work is divided as in paged_decode. The contexts of all rows
form one sequence of blocks, and each lane of programs has an equal share of it. Then
latent_merge_kernel merges the partial results of rows that were split.

Decision: cached tokens are the rows of a tensor core's tile, and (query, head) pairs its columns.
The two products are scores[token, pair] and o[element of a latent, pair]. Columns come in units of
eight, so the 16 heads of one of eight ranks cost 16. Used as rows they would cost 64. A block of
latents is read once for up to 64 pairs. From shared memory, it is used as loaded for the scores,
and transposed for the mean.

Decision: a lane has one loop per row, instead of one loop across rows as in paged_decode. Queries
have 18 KiB or more and stay in shared memory for the whole row.

Decision: partial results of few rows are merged by programs per row, those of many rows by programs
per lane. For one row of 128 heads, 8,448 programs took 10 us. Nearly all of them belonged to lanes
without a row to merge.

Decision: fp8 latents have one scale per token, so it multiplies a score and a weight, not elements.
A weight times its scale may exceed float16. Therefore the running maximum is that of score +
log2(scale). The weights that multiply latents are then at most 1, for any scales.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention import latent_reference as reference
from nanovllm_kernels.attention.latent_cases import all_rows, by_position, case_of, weighted_sizes
from nanovllm_kernels.attention.paged_decode import (
    FLOAT16_LIFT,
    MAX_WIDTH,
    DecodeKernel,
    in_cache_dtype,
    merged_parts,
    page_of,
    plan_lanes,
    plan_rows,
    queries_of,
    results_of,
)
from nanovllm_kernels.case import Kernel
from nanovllm_kernels.device import launches_early
from nanovllm_kernels.triton_parts import dot, launch_dependents, wait

WIDEST = 64  # pairs of the largest tile
MERGED, SUMMED = 64, 4096  # limits of one load by a merge program: partial results, elements


class Shape(NamedTuple):
    """Tile and launch settings of a program: its (token, head) pairs and cached tokens per step."""

    pairs: int
    block: int
    stages: int
    warps: int
    per_processor: int


def shape_of(num_pairs: int, pages_PSX: Tensor) -> Shape:
    """Return the shape for `num_pairs` pairs per row.

    Two small programs share a multiprocessor: one loads while the other multiplies. Blocks of 64
    tokens did not leave room for that.
    """
    if pages_PSX.dtype == torch.float32:
        return Shape(16, 16, 2, 4, 1)
    pairs = min(WIDEST, max(16, triton.next_power_of_2(num_pairs)))
    return Shape(pairs, 32, 3, 8, 1) if pairs > 32 else Shape(pairs, 32, 3, 4, 2)


def plan_decode(lengths_R: Tensor, pages_PSX: Tensor, num_heads: int, width: int = 1) -> Tensor:
    """Return plan_N5 of plan_lanes. It is valid for all layers of the step."""
    shape = shape_of(num_heads * width, pages_PSX)
    num_tiles = triton.cdiv(num_heads * width, shape.pairs)
    return plan_lanes(lengths_R, num_tiles, shape.block, shape.per_processor, whole=True)


def plan_whole(lengths_R: Tensor, pages_PSX: Tensor, num_heads: int, width: int = 1) -> Tensor:
    """Return plan_N5 of plan_rows. It is valid for all layers of the step."""
    return plan_rows(lengths_R, shape_of(WIDEST, pages_PSX).block)


def latent_decode(
    q_THX: Tensor,
    rotated_THA: Tensor,
    pages_PSX: Tensor,
    page_table_RM: Tensor,
    lengths_R: Tensor,
    plan_N5: Tensor,
    scale: float,
    out_THX: Tensor | None = None,
    *,
    starts_R1: Tensor | None = None,
    width: int = 1,
    whole: bool = False,
) -> Tensor:
    """Return o_THX, which is `out_THX` if given. `plan_N5` must be from the same lengths and width.

    Queries are in the latent space, with a separate rotated part. Row r's queries are its last
    tokens, starts_R1[r]:starts_R1[r + 1], at most `width`. Without `starts_R1` each row has one.
    Rows at the end may have no tokens and length 0. The contents of o_THX after the last row's
    tokens are undefined. No value is read on the host. `pages_PSX` has q's dtype, or bytes if it is
    fp8. `whole`: the plan is plan_whole's. Then all rows have tiles of one shape, because the order
    of a sum of weights depends on it.
    """
    assert width == 1 or starts_R1 is not None
    num_tokens, num_heads, rank = q_THX.shape
    rotated, num_lanes = rotated_THA.shape[2], len(plan_N5)
    parts = reference.parts_of(pages_PSX, rank, rotated)
    assert q_THX.stride(2) == rotated_THA.stride(2) == pages_PSX.stride(2) == 1
    assert page_table_RM.stride(1) == 1 and pages_PSX.is_contiguous()
    o_THX, partial_o, partial_lse = results_of(q_THX, num_lanes, out_THX, width)
    shape = shape_of(WIDEST if whole else num_heads * width, pages_PSX)
    waits = launches_early(num_tokens if width <= MAX_WIDTH else 1, q_THX.device)  # compiled once
    more = dict(RAGGED=starts_R1 is not None, WAITS=waits, launch_pdl=waits)
    sizes = dict(TILE=shape.pairs, BLOCK=shape.block, S=pages_PSX.shape[1], X=rank, A=rotated)
    sizes |= dict(X_BLOCK=triton.next_power_of_2(rank), STAGES=shape.stages)
    latent_decode_kernel[(triton.cdiv(num_heads * width, shape.pairs), num_lanes)](
        *(q_THX, rotated_THA, *parts, page_table_RM, starts_R1, lengths_R, plan_N5),
        *(o_THX, partial_o, partial_lse),
        *(stride for tensor in (q_THX, rotated_THA) for stride in tensor.stride()[:2]),
        *(parts[0].stride(1), parts[1].stride(1), page_table_RM.stride(0), page_table_RM.shape[1]),
        *(num_heads, width * num_heads, math.log2(math.e) * scale),
        A_BLOCK=max(16, triton.next_power_of_2(rotated)),
        num_warps=shape.warps,
        **sizes,
        **more,
    )
    if whole:
        return o_THX
    merge(o_THX, partial_o, partial_lse, starts_R1, plan_N5, W=width, **more)
    return o_THX


DECODE = DecodeKernel(plan_decode, latent_decode, max_width=sys.maxsize)
WHOLE_ROWS = DecodeKernel(plan_whole, partial(latent_decode, whole=True), max_width=sys.maxsize)


def merge(
    o_THX: Tensor,
    partial_o: Tensor,
    partial_lse: Tensor,
    starts_R1: Tensor | None,
    plan_N5: Tensor,
    W: int,
    **more: Any,  # noqa: ANN401
) -> None:
    """Merge the partial results of rows that several lanes share."""
    rank, (num_lanes, _, num_pairs) = o_THX.shape[2], partial_lse.shape
    num_rows = len(o_THX) if starts_R1 is None else len(starts_R1) - 1
    num_merged = min(MERGED, triton.next_power_of_2(triton.cdiv(num_lanes, num_rows) + 1))
    if W > MAX_WIDTH:  # prompts have any number of rows: compiled once
        num_merged = 4
    columns = min(SUMMED // num_merged, triton.next_power_of_2(rank))
    is_few = num_rows < num_lanes and W <= MAX_WIDTH
    sizes = dict(
        X=rank, X_BLOCK=columns, MERGED=num_merged, num_warps=max(1, num_merged * columns // 1024)
    )
    sizes["LANES"] = triton.next_power_of_2(num_lanes) if is_few else 0
    latent_merge_kernel[(num_pairs, -(-rank // columns), num_rows if is_few else num_lanes)](
        *(partial_o, partial_lse, starts_R1, plan_N5, o_THX, num_lanes), W=W, **sizes, **more
    )


@triton.jit(
    do_not_specialize=["table_stride", "table_width"],
    do_not_specialize_on_alignment=["page_table_RM", "starts_R1", "lengths_R"],
)
def latent_decode_kernel(
    q_THX, rotated_THA, latents_PSX, keys_PSA, scales_PS, page_table_RM, starts_R1, lengths_R,
    plan_N5, o_THX, partial_o, partial_lse, q_stride, q_head_stride, rotated_stride,
    rotated_head_stride, latent_stride, key_stride, table_stride, table_width, num_heads, num_pairs,
    scale, RAGGED: tl.constexpr, WAITS: tl.constexpr, TILE: tl.constexpr, X: tl.constexpr,
    X_BLOCK: tl.constexpr, A: tl.constexpr, A_BLOCK: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    wait(WAITS)
    lane = tl.program_id(1)
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    nth, head = pair // num_heads, pair % num_heads
    row = tl.load(plan_N5 + lane * 5)
    start = tl.load(plan_N5 + lane * 5 + 1)
    count = tl.load(plan_N5 + lane * 5 + 2)
    x, a, n = tl.arange(0, X_BLOCK), tl.arange(0, A_BLOCK), tl.arange(0, BLOCK)
    LIFT: tl.constexpr = 0.0 if scales_PS is None else FLOAT16_LIFT
    while count > 0:
        length = tl.load(lengths_R + row)
        first, num_new = queries_of(starts_R1, row, RAGGED)
        stop = tl.minimum(tl.cdiv(length, BLOCK), start + count)
        query, is_query = first.to(tl.int64) + nth, (pair < num_new * num_heads)[None, :]
        at_q = (query * q_stride + head * q_head_stride)[None, :] + x[:, None]
        inside_q = is_query & (x < X)[:, None]
        q = in_cache_dtype(tl.load(q_THX + at_q, inside_q, 0.0), scales_PS)
        at_q = (query * rotated_stride + head * rotated_head_stride)[None, :] + a[:, None]
        rotated = tl.load(rotated_THA + at_q, is_query & (a < A)[:, None], 0.0)
        last_seen = length - num_new + nth
        highest = tl.full([TILE], -float("inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        o = tl.zeros([X_BLOCK, TILE], tl.float32)
        pages = page_table_RM + row.to(tl.int64) * table_stride
        next_page = page_of(pages, table_width, start, S, BLOCK)
        for block in tl.range(start, stop, num_stages=STAGES):
            page = next_page.to(tl.int64)
            next_page = page_of(pages, table_width, block + 1, S, BLOCK)
            token = block * BLOCK + n
            inside = token < length
            cell = page * S + token % S
            at = cell * latent_stride
            inside_x = inside[:, None] & (x < X)[None, :]
            latents = tl.load(latents_PSX + at[:, None] + x[None, :], inside_x, 0.0).to(q.dtype)
            at = cell * key_stride
            inside_a = inside[:, None] & (a < A)[None, :]
            keys = tl.load(keys_PSA + at[:, None] + a[None, :], inside_a, 0.0).to(rotated.dtype)
            s = dot(latents, q, tl.zeros([BLOCK, TILE], tl.float32))
            if scales_PS is not None:
                of_token = tl.load(scales_PS + cell * (latent_stride // 4), inside, 1.0)
                s *= of_token[:, None]
            s = dot(keys, rotated, s) * scale
            if scales_PS is not None:
                s += tl.log2(of_token)[:, None]
            seen = token[:, None] < length
            if RAGGED:
                seen = token[:, None] <= last_seen[None, :]
            s = tl.where(seen, s, -float("inf"))
            new_highest = tl.maximum(highest, tl.max(s, 0))
            base = new_highest
            if RAGGED:  # a query that has seen no token has weights of 0
                base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
            p = tl.exp2(s - (base - LIFT)[None, :])
            rescale = tl.exp2(highest - base)
            weights = p
            if scales_PS is not None:
                weights = p / of_token[:, None]
            total = total * rescale + tl.sum(weights, 0)
            o = dot(tl.trans(latents), p.to(latents.dtype), o * rescale[None, :])
            highest = new_highest
        if RAGGED:  # the mean of no tokens is 0 and has no weight
            total = tl.where(total == 0.0, 1.0, total)
        mean = o / total[None, :]
        is_end = stop * BLOCK >= length
        if is_end & (start == 0):
            at = ((first.to(tl.int64) * num_heads + pair) * X)[None, :] + x[:, None]
            tl.store(o_THX + at, mean.to(o_THX.dtype.element_ty), inside_q)
        else:
            part = (lane * 2 + (start == 0).to(tl.int32)) * num_pairs + pair
            tl.store(partial_o + (part * X)[None, :] + x[:, None], mean, inside_q)
            tl.store(partial_lse + part, highest + tl.log2(total), pair < num_new * num_heads)
        count -= stop - start
        row += 1
        start = 0


@triton.jit(do_not_specialize_on_alignment=["starts_R1"])
def latent_merge_kernel(
    partial_o, partial_lse, starts_R1, plan_N5, o_THX, num_lanes, W: tl.constexpr,
    RAGGED: tl.constexpr, X: tl.constexpr, X_BLOCK: tl.constexpr, LANES: tl.constexpr,
    MERGED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Merge columns of one token and head, for a row that one lane begins and others finish.

    With LANES the program's row is fixed, and it searches for the lane that begins it. Otherwise
    the lane is fixed. The program returns if there is no such row.
    """
    pair, num_pairs, lane = tl.program_id(0), tl.num_programs(0), tl.program_id(2)
    if LANES:
        row, every = lane, tl.arange(0, LANES)
        over = tl.load(plan_N5 + every * 5 + 4, every < num_lanes, 0)
        over = tl.where(tl.load(plan_N5 + every * 5 + 3, over > 0, 0) == row, over, 0)
        lane, num_parts = tl.max(tl.where(over > 0, every, 0), 0), tl.max(over, 0)
    else:
        row, num_parts = tl.load(plan_N5 + lane * 5 + 3), tl.load(plan_N5 + lane * 5 + 4)
    launch_dependents(WAITS)  # before any return: the next kernel waits for this one only
    wait(WAITS)
    first, num_new = queries_of(starts_R1, row, RAGGED)
    num_heads = num_pairs // W
    if (num_parts == 0) | (pair >= num_new * num_heads):
        return
    x = tl.program_id(1) * X_BLOCK + tl.arange(0, X_BLOCK)
    o = merged_parts(partial_o, partial_lse, lane, num_parts, pair, num_pairs, x, X, MERGED)
    at = o_THX + (first.to(tl.int64) * num_heads + pair) * X + x
    tl.store(at, o.to(o_THX.dtype.element_ty), x < X)


# 16 bit: weights and the result are each rounded by half an ulp; queries of 8-bit latents are
# rounded to float16.
LATENT_DECODE = Kernel(
    "latent_decode",
    by_position(latent_decode),
    by_position(reference.latent_decode),
    tuple(case_of(plan_decode, rows) for rows in all_rows()),
    ulps_16=1,
    ulps_32=256,
    scale=weighted_sizes,
)
