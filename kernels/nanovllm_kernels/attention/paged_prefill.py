"""Causal grouped-query flash attention over pages, in Triton, for any number of new tokens.

The reference is reference.py. This is the portable path without flash-attn-4: plain flash
attention, with a program per row, head and tile of new tokens. Pages are read as in paged_decode.

Decision: a short chunk over a long context has too few tiles for the GPU. Its keys are then divided
into equal parts, with a program for each tile and part, and a second kernel merges the results. A
tile has all query heads of a key/value head, so that a key is read once for all of them. The number
of parts depends on host values only. kernels.invariant never divides keys.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention import reference
from nanovllm_kernels.attention.paged_decode import (
    FLOAT16_LIFT,
    INTERPRETED_PROCESSORS,
    block_tokens,
    in_cache_dtype,
    more_weights,
    no_weights,
    page_of,
    scales_of,
    sum_of_weights,
)
from nanovllm_kernels.case import Args, Case, Kernel, bits
from nanovllm_kernels.device import processors
from nanovllm_kernels.triton_parts import dot

TILE_BYTES = 256  # one column of a tile of queries: 128 rows in 16 bits
STAGES = 3
MOST_PARTS = 32  # of a row's keys
MOST_WAVES = 2  # programs per multiprocessor if keys are divided, which bounds their memory
# Costs that limit the number of parts, in blocks of keys that a program could read meanwhile.
START, MERGE = 4, 4


class Division(NamedTuple):
    """A number of parts, and times in blocks of keys that a program reads."""

    parts: int
    time: int
    undivided: int  # the time with one part


def division_of(
    num_heads: int, k_PSGA: Tensor, num_rows: int, max_new: int, max_length: int
) -> Division:
    """Return the division of keys for rows of up to `max_new` queries and `max_length` keys."""
    num_kv_heads, device = k_PSGA.shape[2], k_PSGA.device
    pairs = max_new * num_heads // num_kv_heads
    tile = TILE_BYTES // max(2, k_PSGA.itemsize)
    num_tiles = num_rows * num_kv_heads * triton.cdiv(pairs, tile)
    num_processors = processors(device) if device.type == "cuda" else INTERPRETED_PROCESSORS
    return fastest(num_tiles, triton.cdiv(max_length, block_tokens(k_PSGA)), num_processors)


@lru_cache(maxsize=64)  # called in each layer of a step; contexts have many sizes
def fastest(num_tiles: int, num_blocks: int, num_processors: int) -> Division:
    """Return the division with the least time."""

    def time(parts: int) -> int:
        waves = triton.cdiv(num_tiles * parts, num_processors)
        return waves * (triton.cdiv(num_blocks, parts) + START) + MERGE * (parts > 1)

    most = min(MOST_PARTS, MOST_WAVES * num_processors // num_tiles)
    parts = min(range(1, max(1, most) + 1), key=time)
    return Division(parts, time(parts), time(1))


def paged_prefill(
    q_THA: Tensor, k_PSGA: Tensor, v_PSGA: Tensor, page_table_RM: Tensor, starts_R1: Tensor,
    lengths_R: Tensor, max_new: int, out_THA: Tensor | None = None, *,
    scales_2G: Tensor | None = None, ordered: bool = False, parts: int = 1,
) -> Tensor:  # fmt: skip
    """Return o_THA, which is `out_THA` if given. `scales_2G` is that of paged_decode.

    Row r's queries are its last tokens, starts_R1[r]:starts_R1[r + 1], at most `max_new`. With
    `ordered`, a token has the same bits as in paged_decode with whole rows. `parts` is that of
    division_of; the result is rounded differently for another number.
    """
    num_heads, head_size = q_THA.shape[1:]
    page_tokens, num_kv_heads = k_PSGA.shape[1:3]
    assert q_THA.stride(2) == k_PSGA.stride(3) == page_table_RM.stride(1) == 1
    assert k_PSGA.stride() == v_PSGA.stride()
    assert 1 <= parts <= (1 if ordered else MOST_PARTS), (parts, ordered)
    o_THA = out_THA
    if o_THA is None:
        o_THA = torch.empty(q_THA.shape, dtype=q_THA.dtype, device=q_THA.device)
    assert o_THA.is_contiguous()
    tile = TILE_BYTES // q_THA.itemsize
    num_rows, group = lengths_R.shape[0], num_heads // num_kv_heads
    packed = group if parts > 1 else 1
    partial_o, partial_lse = results_of_parts(o_THA, num_rows * max_new, parts, tile)
    sizes = dict(A=head_size, A_BLOCK=triton.next_power_of_2(head_size))
    grid = (triton.cdiv(max_new * packed, tile), num_heads // packed, num_rows * parts)
    prefill_kernel[grid](
        q_THA, k_PSGA, v_PSGA, page_table_RM, starts_R1, lengths_R, scales_2G, o_THA,
        partial_o, partial_lse, parts, max_new,
        q_THA.stride(0), q_THA.stride(1), *k_PSGA.stride()[:3], page_table_RM.stride(0),
        page_table_RM.shape[1], math.log2(math.e) / math.sqrt(head_size),
        GROUP=group, PACKED=packed, S=page_tokens, BLOCK=block_tokens(k_PSGA), TILE=tile,
        STAGES=STAGES, ORDERED=ordered, num_warps=tile // 16, **sizes,
    )  # fmt: skip
    if parts > 1:
        merge_parts_kernel[(max_new * num_heads, num_rows)](
            partial_o, partial_lse, starts_R1, o_THA, parts, H=num_heads, PARTS=MOST_PARTS,
            num_warps=1, **sizes,
        )  # fmt: skip
    return o_THA


def results_of_parts(
    o_THA: Tensor, num_tokens: int, parts: int, tile: int
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the parts' results for up to `num_tokens` queries, or return None for one part.

    They are float32: partial_o [part, row, new token, head, A] and partial_lse without A. Their
    size is the maximum for any step, so that a padding step shows the memory of real steps.
    """
    if parts == 1:
        return None, None
    (_, num_heads, head_size), device = o_THA.shape, o_THA.device
    num_processors = processors(device) if device.type == "cuda" else INTERPRETED_PROCESSORS
    most = max(MOST_WAVES * num_processors * tile, parts * num_tokens * num_heads)
    return (
        torch.empty(most, head_size, dtype=torch.float32, device=device),
        torch.empty(most, dtype=torch.float32, device=device),
    )


@triton.jit(
    do_not_specialize=["table_stride", "table_width", "num_parts", "max_new"],
    do_not_specialize_on_alignment=["page_table_RM", "starts_R1", "lengths_R"],
)
def prefill_kernel(
    q_THA, k_PSGA, v_PSGA, page_table_RM, starts_R1, lengths_R, scales_2G, o_THA, partial_o,
    partial_lse, num_parts, max_new, q_stride, q_head_stride, page_stride, token_stride,
    head_stride, table_stride, table_width, scale, GROUP: tl.constexpr, PACKED: tl.constexpr,
    A: tl.constexpr, A_BLOCK: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of PACKED query heads, over one part of the keys if there are partial results.

    Heads of a token are adjacent rows of the tile.
    """
    # The last tiles see most tokens, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1) * PACKED, tl.program_id(2)
    num_heads = tl.num_programs(1) * PACKED
    if partial_o is not None:
        part, num_rows = row % num_parts, tl.num_programs(2) // num_parts
        row = row // num_parts
    start = tl.load(starts_R1 + row)
    num_new = tl.load(starts_R1 + row + 1) - start
    if tile * TILE < num_new * PACKED:
        length = tl.load(lengths_R + row)
        new = tile * TILE + tl.arange(0, TILE)
        head_q = head
        if PACKED > 1:
            head_q = (head + new % PACKED)[:, None]
            new = new // PACKED
        a, n = tl.arange(0, A_BLOCK), tl.arange(0, BLOCK)
        in_width = (a < A)[None, :]
        inside_q = (new < num_new)[:, None] & in_width
        token_q = (start + new).to(tl.int64)[:, None]
        at = q_THA + token_q * q_stride + head_q * q_head_stride + a[None, :]
        q = in_cache_dtype(tl.load(at, inside_q, 0.0), scales_2G)
        k_scale, v_scale = scales_of(scales_2G, head // GROUP, num_heads // GROUP)
        scale *= k_scale
        k_PSGA += head // GROUP * head_stride
        v_PSGA += head // GROUP * head_stride
        pages = page_table_RM + row.to(tl.int64) * table_stride
        position = length - num_new + new
        last = ((tile + 1) * TILE - 1) // PACKED  # the tile's last query
        begin, end = 0, tl.cdiv(tl.minimum(length, length - num_new + last + 1), BLOCK)
        if partial_o is not None:
            share = tl.cdiv(end, num_parts)
            begin = tl.minimum(part * share, end)
            end = tl.minimum(begin + share, end)
        LIFT: tl.constexpr = 0.0 if scales_2G is None else FLOAT16_LIFT
        highest = tl.full([TILE], -float("inf"), tl.float32)
        total = no_weights(TILE, ORDERED)
        o = tl.zeros([TILE, A_BLOCK], tl.float32)
        next_page = page_of(pages, table_width, begin, S, BLOCK)
        for i in tl.range(begin, end, num_stages=STAGES):
            page = next_page.to(tl.int64)
            next_page = page_of(pages, table_width, i + 1, S, BLOCK)
            token = i * BLOCK + n
            at_token = (page * page_stride + token % S * token_stride)[:, None] + a[None, :]
            inside = (token < length)[:, None] & in_width
            k = tl.load(k_PSGA + at_token, inside, 0.0).to(q.dtype)
            s = dot(q, tl.trans(k), tl.zeros([TILE, BLOCK], tl.float32)) * scale
            s = tl.where(token[None, :] <= position[:, None], s, -float("inf"))
            new_highest = tl.maximum(highest, tl.max(s, 1))
            base = new_highest
            if partial_o is not None:  # a query that has seen no token has weights of 0
                base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
            p = tl.exp2(s - (base - LIFT)[:, None])
            rescale = tl.exp2(highest - base)
            v = tl.load(v_PSGA + at_token, inside, 0.0).to(q.dtype)
            total = more_weights(total, rescale, p, v, ORDERED)
            o = dot(p.to(v.dtype), v, o * rescale[:, None])
            highest = new_highest
        sums = sum_of_weights(total, ORDERED)
        if partial_o is None:
            at = o_THA + (token_q * num_heads + head_q) * A + a[None, :]
            tl.store(at, (o / sums[:, None] * v_scale).to(o_THA.dtype.element_ty), inside_q)
        else:
            sums = tl.where(sums == 0.0, 1.0, sums)  # the mean of no tokens is 0
            at = ((part * num_rows + row) * max_new + new)[:, None] * num_heads + head_q
            tl.store(partial_o + at * A + a[None, :], o / sums[:, None] * v_scale, inside_q)
            lse = (highest + tl.log2(sums))[:, None]
            tl.store(partial_lse + at, lse, (new < num_new)[:, None])


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["starts_R1"])
def merge_parts_kernel(
    partial_o, partial_lse, starts_R1, o_THA, num_parts, H: tl.constexpr, A: tl.constexpr,
    A_BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one token and head. Each query has seen a token in at least one part."""
    pair, row = tl.program_id(0), tl.program_id(1)  # the pair of a new token and a head
    start = tl.load(starts_R1 + row)
    if pair < (tl.load(starts_R1 + row + 1) - start) * H:
        part, a = tl.arange(0, PARTS), tl.arange(0, A_BLOCK)
        at = (part * tl.num_programs(1) + row) * tl.num_programs(0) + pair
        lse = tl.load(partial_lse + at, part < num_parts, -float("inf"))
        inside = (part < num_parts)[:, None] & (a < A)[None, :]
        each = tl.load(partial_o + at[:, None] * A + a[None, :], inside, 0.0)
        weights = tl.exp2(lse - tl.max(lse, 0))
        o = tl.sum(each * weights[:, None], 0) / tl.sum(weights, 0)
        to = o_THA + (start.to(tl.int64) * H + pair) * A + a
        tl.store(to, o.to(o_THA.dtype.element_ty), a < A)


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


def short_inputs(
    lengths: tuple[int, ...], new: tuple[int, ...], heads: tuple[int, int, int], page_tokens: int,
    dtype: torch.dtype, device: torch.device, *, is_fp8: bool = False, parts: int = 0,
) -> Args:  # fmt: skip
    """Return inputs of divided chunks. `parts` 0: as many as division_of returns."""
    rows = inputs(lengths, new, heads, page_tokens, dtype, device, is_fp8=is_fp8)
    sizes = len(new), max(new), max(lengths)
    return *rows, parts or division_of(heads[0], rows[1], *sizes).parts


def short_cases() -> tuple[Case, ...]:
    lengths, new = (1, 70, 7, 300, 33), (1, 70, 1, 40, 5)
    checked = [
        ((4, 2, 128), 128, torch.bfloat16, 2),
        ((4, 1, 64), 64, torch.bfloat16, 9),  # more parts than blocks of keys
        ((6, 2, 64), 16, torch.float32, 3),
        ((3, 1, 80), 64, torch.bfloat16, 3),
        ((2, 2, 256), 48, torch.bfloat16, 4),
    ]
    timed = [
        (new, length, heads)
        for heads in ((8, 2, 128), (32, 8, 128))
        for new, length in ((32, 50000), (200, 25000), (200, 50000), (200, 85000), (500, 50000))
    ]
    return (
        *(
            Case(
                f"{'fp8 ' * is_fp8}HGA={heads} page={page} {bits(dtype)} parts={parts}",
                partial(short_inputs, lengths, new, heads, page, dtype, is_fp8=is_fp8, parts=parts),
                small=dtype == torch.float32 or parts == 9 - 7 * is_fp8,
            )
            for is_fp8 in (False, True)
            for heads, page, dtype, parts in checked
        ),
        *(
            Case(
                f"{new} of {length} HGA={heads} page=128{' fp8' * is_fp8}",
                partial(short_inputs, (length,), (new,), heads, 128, torch.bfloat16, is_fp8=is_fp8),
                num_flops=causal_flops((length,), (new,), heads),
            )
            for new, length, heads in timed
            for is_fp8 in (False, True)
        ),
    )


def divided(*args: Any) -> Tensor:  # noqa: ANN401
    *rows, scales_2G, parts = args
    return paged_prefill(*rows, scales_2G=scales_2G, parts=parts)


def undivided_reference(*args: Any) -> Tensor:  # noqa: ANN401
    return reference.paged_prefill(*args[:-1])


SHORT_PREFILL = Kernel(
    "short_prefill",
    divided,
    undivided_reference,
    short_cases(),
    ulps_16=1,
    ulps_32=256,
    scale=reference.weighted_sizes(undivided_reference),
)
