"""Pairs of token and expert sorted by expert, with tables of the tiles that cover them.

Meaning: nanovllm_kernels.route_reference.sort_rows. Counting, not comparing: a pair's place is
where its expert starts, plus how many pairs of that expert come before it. Up to 128 rows take one
launch of one program, more take two: each program counts its rows, then each adds up what all have
counted, and places its own. Nothing depends on which program is first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows
from nanovllm_kernels.route_reference import ExpertRows, most_tiles

ROWS = 128  # that a program counts and places,
ELEMENTS = 8192  # so many of a matrix of rows and experts at once
FILLED = tl.constexpr(1024)  # unused entries that are written at once


def sort_rows(experts_TK: Tensor, first_expert: int, num_experts: int, tile: int) -> ExpertRows:
    """Takes experts_TK as `route` returns it: int32, a row's experts all different."""
    num_rows, num_chosen = experts_TK.shape
    assert experts_TK.is_contiguous()
    rows = empty_rows(experts_TK.numel(), num_experts, tile, experts_TK.device)
    block_rows = min(triton.next_power_of_2(num_rows), ROWS)
    num_blocks = triton.cdiv(num_rows, block_rows)
    block = triton.next_power_of_2(num_experts)
    waits = follows(num_rows, experts_TK.device)
    sizes = dict(K=num_chosen, FIRST=first_expert, OWN=num_experts, OWN_BLOCK=block)
    sizes |= dict(ROWS=block_rows, PAIRS=triton.next_power_of_2(block_rows * num_chosen))
    options = dict(WAITS=waits, launch_pdl=waits)
    counts_XE = None
    if num_blocks > 1:
        counts_XE = torch.empty(num_blocks, block, dtype=torch.int32, device=experts_TK.device)
        count_kernel[(num_blocks,)](experts_TK, counts_XE, num_rows, **sizes, **options)
    step = min(block_rows, max(ELEMENTS // block, 1))
    place_kernel[(num_blocks,)](
        experts_TK,
        counts_XE,
        *tensors_of(rows),
        num_rows,
        len(rows.tile_start_X),
        STEP=step,
        TILE=tile,
        num_warps=min(max(step * block // 512, 1), 8),
        **sizes,
        **options,
    )
    return rows


def empty_rows(num_pairs: int, num_experts: int, tile: int, device: torch.device) -> ExpertRows:
    tiles = most_tiles(num_pairs, num_experts, tile)
    sizes = num_pairs, num_experts + 1, tiles, tiles, 1
    return ExpertRows(*(torch.empty(x, dtype=torch.int32, device=device) for x in sizes), tile)


def tensors_of(rows: ExpertRows) -> tuple[Tensor, ...]:
    return (
        rows.pair_of_X, rows.starts_E1, rows.tile_expert_X, rows.tile_start_X, rows.num_tiles_1
    )  # fmt: skip


@triton.jit
def local_counts(
    experts_TK, block, num_rows, K: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr,
    OWN_BLOCK: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """How many pairs of this block of rows each of our experts has."""
    pair = tl.arange(0, PAIRS)
    inside = (pair < ROWS * K) & (block * (ROWS * K) + pair < num_rows * K)
    local = tl.load(experts_TK + block * (ROWS * K) + pair, inside, -1) - FIRST
    return tl.histogram(local, OWN_BLOCK, (local >= 0) & (local < OWN))


@triton.jit(do_not_specialize=["num_rows"])
def count_kernel(
    experts_TK,
    counts_XE,
    num_rows,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    OWN: tl.constexpr,
    OWN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
):
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    counts = local_counts(
        experts_TK, block, num_rows, K, FIRST, OWN, OWN_BLOCK, ROWS, PAIRS
    )
    tl.store(counts_XE + block * OWN_BLOCK + tl.arange(0, OWN_BLOCK), counts)


@triton.jit(do_not_specialize=["num_rows", "most_tiles"])
def place_kernel(
    experts_TK,
    counts_XE,
    pair_of_X,
    starts_E1,
    tile_expert_X,
    tile_start_X,
    num_tiles_1,
    num_rows,
    most_tiles,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    OWN: tl.constexpr,
    OWN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    WAITS: tl.constexpr,
):
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    local_E = tl.arange(0, OWN_BLOCK)
    before_E = tl.zeros([OWN_BLOCK], tl.int32)
    if counts_XE is None:
        counts_E = local_counts(experts_TK, 0, num_rows, K, FIRST, OWN, OWN_BLOCK, ROWS, PAIRS)
    else:
        counts_E = tl.zeros([OWN_BLOCK], tl.int32)
        for other in range(0, tl.num_programs(0), 8):
            others = other + tl.arange(0, 8)[:, None]
            at = counts_XE + others * OWN_BLOCK + local_E[None, :]
            counts = tl.load(at, others < tl.num_programs(0), 0)
            counts_E += tl.sum(counts, 0)
            before_E += tl.sum(tl.where(others < block, counts, 0), 0)
    next_E = tl.cumsum(counts_E, 0) - counts_E + before_E
    for step in range(0, ROWS, STEP):
        row = block * ROWS + step + tl.arange(0, STEP)[:, None]
        rank = tl.full([STEP, OWN_BLOCK], -1, tl.int32)
        for k in tl.static_range(K):
            local = tl.load(experts_TK + row * K + k, row < num_rows, -1) - FIRST
            rank = tl.where(local == local_E[None, :], k, rank)
        is_ours = (rank >= 0) & (local_E < OWN)[None, :]
        store_pairs(pair_of_X, next_E, row * K + rank, is_ours)
        next_E += tl.sum(is_ours.to(tl.int32), 0)
    if block == 0:
        local_E = tl.where(local_E < OWN, local_E, -1)
        store_tables(
            pair_of_X, starts_E1, tile_expert_X, tile_start_X, num_tiles_1,
            local_E, counts_E, num_rows * K, most_tiles, OWN, TILE,
        )  # fmt: skip


@triton.jit
def store_pairs(pair_of_X, next_E, pair, is_ours):
    """The pairs of some rows and all experts. `next_E`: where an expert's first one goes."""
    ours = is_ours.to(tl.int32)
    at = next_E[None, :] + tl.cumsum(ours, 0) - ours
    tl.store(pair_of_X + at, pair, is_ours)


@triton.jit
def store_tables(
    pair_of_X,
    starts_E1,
    tile_expert_X,
    tile_start_X,
    num_tiles_1,
    local_E,
    counts_E,
    num_pairs,
    most_tiles,
    OWN: tl.constexpr,
    TILE: tl.constexpr,
):
    """All but the pairs themselves. `local_E`: the experts in order, -1 where there is none."""
    starts_of_E = tl.cumsum(counts_E, 0) - counts_E
    num_ours = tl.sum(counts_E, 0)
    tl.store(starts_E1 + local_E, starts_of_E, local_E >= 0)
    tl.store(starts_E1 + OWN, num_ours)
    tiles_E = (counts_E + TILE - 1) // TILE
    first_E = tl.cumsum(tiles_E, 0) - tiles_E
    num_tiles = tl.sum(tiles_E, 0)
    tl.store(num_tiles_1, num_tiles)
    for i in range(0, tl.max(tiles_E, 0)):
        tl.store(tile_expert_X + first_E + i, local_E, i < tiles_E)
        tl.store(tile_start_X + first_E + i, starts_of_E + i * TILE, i < tiles_E)
    nothing = tl.full([FILLED], -1, tl.int32)
    for start in range(num_tiles, most_tiles, FILLED):
        tile = start + tl.arange(0, FILLED)
        tl.store(tile_expert_X + tile, nothing, tile < most_tiles)
        tl.store(tile_start_X + tile, nothing, tile < most_tiles)
    for start in range(num_ours, num_pairs, FILLED):
        at = start + tl.arange(0, FILLED)
        tl.store(pair_of_X + at, nothing, at < num_pairs)
