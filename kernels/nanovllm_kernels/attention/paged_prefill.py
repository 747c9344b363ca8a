"""Causal grouped-query flash attention over pages, in Triton, for any number of new tokens.

The reference is reference.py. This is the portable path without flash-attn-4: plain flash
attention, with a program per row, head and tile of new tokens. Pages are read as in paged_decode.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention import reference
from nanovllm_kernels.attention.paged_decode import (
    FLOAT16_LIFT,
    block_tokens,
    in_cache_dtype,
    more_weights,
    no_weights,
    page_of,
    scales_of,
    sum_of_weights,
)
from nanovllm_kernels.case import Args, Case, Kernel, bits
from nanovllm_kernels.triton_parts import dot

TILE_BYTES = 256  # one column of a tile of queries: 128 rows in 16 bits
STAGES = 3


def paged_prefill(
    q_THA: Tensor, k_PSGA: Tensor, v_PSGA: Tensor, page_table_RM: Tensor, starts_R1: Tensor,
    lengths_R: Tensor, max_new: int, out_THA: Tensor | None = None, *,
    scales_2G: Tensor | None = None, ordered: bool = False,
) -> Tensor:  # fmt: skip
    """Return o_THA, which is `out_THA` if given. `scales_2G` is that of paged_decode.

    Row r's queries are its last tokens, starts_R1[r]:starts_R1[r + 1], at most `max_new`. With
    `ordered`, a token has the same bits as in paged_decode with whole rows.
    """
    num_heads, head_size = q_THA.shape[1:]
    page_tokens, num_kv_heads = k_PSGA.shape[1:3]
    assert q_THA.stride(2) == k_PSGA.stride(3) == page_table_RM.stride(1) == 1
    assert k_PSGA.stride() == v_PSGA.stride()
    o_THA = out_THA
    if o_THA is None:
        o_THA = torch.empty(q_THA.shape, dtype=q_THA.dtype, device=q_THA.device)
    assert o_THA.is_contiguous()
    tile = TILE_BYTES // q_THA.itemsize
    grid = (triton.cdiv(max_new, tile), num_heads, lengths_R.shape[0])
    prefill_kernel[grid](
        q_THA, k_PSGA, v_PSGA, page_table_RM, starts_R1, lengths_R, scales_2G, o_THA,
        q_THA.stride(0), q_THA.stride(1), *k_PSGA.stride()[:3], page_table_RM.stride(0),
        page_table_RM.shape[1], math.log2(math.e) / math.sqrt(head_size),
        GROUP=num_heads // num_kv_heads, A=head_size, A_BLOCK=triton.next_power_of_2(head_size),
        S=page_tokens, BLOCK=block_tokens(k_PSGA), TILE=tile, STAGES=STAGES, ORDERED=ordered,
        num_warps=tile // 16,
    )  # fmt: skip
    return o_THA


@triton.jit(
    do_not_specialize=["table_stride", "table_width"],
    do_not_specialize_on_alignment=["page_table_RM", "starts_R1", "lengths_R"],
)
def prefill_kernel(
    q_THA, k_PSGA, v_PSGA, page_table_RM, starts_R1, lengths_R, scales_2G, o_THA, q_stride,
    q_head_stride, page_stride, token_stride, head_stride, table_stride, table_width, scale,
    GROUP: tl.constexpr, A: tl.constexpr, A_BLOCK: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    # The last tiles see most tokens, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_R1 + row)
    num_new = tl.load(starts_R1 + row + 1) - start
    if tile * TILE < num_new:
        length = tl.load(lengths_R + row)
        new = tile * TILE + tl.arange(0, TILE)
        a, n = tl.arange(0, A_BLOCK), tl.arange(0, BLOCK)
        in_width = (a < A)[None, :]
        inside_q = (new < num_new)[:, None] & in_width
        token_q = (start + new).to(tl.int64)[:, None]
        at = q_THA + token_q * q_stride + head * q_head_stride + a[None, :]
        q = in_cache_dtype(tl.load(at, inside_q, 0.0), scales_2G)
        k_scale, v_scale = scales_of(scales_2G, head // GROUP, tl.num_programs(1) // GROUP)
        scale *= k_scale
        k_PSGA += head // GROUP * head_stride
        v_PSGA += head // GROUP * head_stride
        pages = page_table_RM + row.to(tl.int64) * table_stride
        position = length - num_new + new
        num_seen = tl.minimum(length, length - num_new + (tile + 1) * TILE)
        LIFT: tl.constexpr = 0.0 if scales_2G is None else FLOAT16_LIFT
        highest = tl.full([TILE], -float("inf"), tl.float32)
        total = no_weights(TILE, ORDERED)
        o = tl.zeros([TILE, A_BLOCK], tl.float32)
        next_page = page_of(pages, table_width, 0, S, BLOCK)
        for i in tl.range(0, tl.cdiv(num_seen, BLOCK), num_stages=STAGES):
            page = next_page.to(tl.int64)
            next_page = page_of(pages, table_width, i + 1, S, BLOCK)
            token = i * BLOCK + n
            at_token = (page * page_stride + token % S * token_stride)[:, None] + a[None, :]
            inside = (token < length)[:, None] & in_width
            k = tl.load(k_PSGA + at_token, inside, 0.0).to(q.dtype)
            s = dot(q, tl.trans(k), tl.zeros([TILE, BLOCK], tl.float32)) * scale
            s = tl.where(token[None, :] <= position[:, None], s, -float("inf"))
            new_highest = tl.maximum(highest, tl.max(s, 1))
            p = tl.exp2(s - (new_highest - LIFT)[:, None])
            rescale = tl.exp2(highest - new_highest)
            v = tl.load(v_PSGA + at_token, inside, 0.0).to(q.dtype)
            total = more_weights(total, rescale, p, v, ORDERED)
            o = dot(p.to(v.dtype), v, o * rescale[:, None])
            highest = new_highest
        o = o / sum_of_weights(total, ORDERED)[:, None] * v_scale
        at = o_THA + (token_q * tl.num_programs(1) + head) * A + a[None, :]
        tl.store(at, o.to(o_THA.dtype.element_ty), inside_q)


def inputs(
    lengths: tuple[int, ...], new: tuple[int, ...], heads: tuple[int, int, int], page_tokens: int,
    dtype: torch.dtype, device: torch.device, *, is_fp8: bool = False,
) -> Args:  # fmt: skip
    q, k, v, *rows = reference.paged_inputs(lengths, new, heads, page_tokens, dtype, device)
    cache = reference.in_8_bits(k, v) if is_fp8 else (k, v, None)
    return q, *cache[:2], *rows, max(new), cache[2]


def cases() -> tuple[Case, ...]:
    lengths = (1, 130, 7, 64, 200, 33)  # decode rows, whole prompts and later chunks together
    new = (1, 130, 1, 63, 5, 32)
    long = ((4096, 1, 1500, 700), (4096, 1, 513, 1))
    checked = [
        (lengths, new, (4, 2, 128), 16, torch.bfloat16),
        (lengths, new, (2, 2, 64), 128, torch.bfloat16),
        (lengths, new, (3, 1, 80), 64, torch.bfloat16),
        (lengths, new, (2, 1, 256), 48, torch.bfloat16),
        (lengths, new, (2, 1, 64), 16, torch.float32),
        *(
            (*long, heads, page_tokens, torch.bfloat16)
            for heads in ((16, 8, 128), (14, 2, 64), (16, 2, 256), (12, 4, 80))
            for page_tokens in (16, 64, 128)
        ),
    ]
    timed = [
        ((4096,) * 16, (4096,) * 16, (32, 8, 128), 128),
        ((4096,) * 16, (4096,) * 16, (16, 8, 128), 128),
        ((4096,) * 16, (4096,) * 16, (32, 8, 128), 16),
        ((8192,) * 4, (2048,) * 4, (16, 2, 256), 128),
    ]
    return (
        *(
            Case(
                f"{'fp8 ' * is_fp8}rows={len(new)} new={max(new)} longest={max(lengths)} "
                f"HGA={heads} page={page} {bits(dtype)}",
                partial(inputs, lengths, new, heads, page, dtype, is_fp8=is_fp8),
                small=sum(lengths) < 1000,
            )
            for is_fp8 in (False, True)
            for lengths, new, heads, page, dtype in checked
        ),
        *(
            Case(
                f"{len(new)} x {new[0]} of {lengths[0]} HGA={heads} page={page}{' fp8' * is_fp8}",
                partial(inputs, lengths, new, heads, page, torch.bfloat16, is_fp8=is_fp8),
                num_flops=causal_flops(lengths, new, heads),
            )
            for lengths, new, heads, page in timed
            for is_fp8 in (False, True)
        ),
    )


def causal_flops(
    lengths: tuple[int, ...], new: tuple[int, ...], heads: tuple[int, int, int]
) -> int:
    """Return the FLOPs of two products of head size per pair of a query and a visible token."""
    pairs = sum(n * length - n * (n - 1) // 2 for n, length in zip(new, lengths, strict=True))
    return 4 * heads[0] * heads[2] * pairs


def by_position(*args: Any) -> Tensor:  # noqa: ANN401
    *rows, scales_2G = args
    return paged_prefill(*rows, scales_2G=scales_2G)


# The tolerances are those of paged_decode.
PAGED_PREFILL = Kernel(
    "paged_prefill",
    by_position,
    reference.paged_prefill,
    cases(),
    ulps_16=1,
    ulps_32=256,
    scale=reference.weighted_sizes(reference.paged_prefill),
)
