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
PAIRS = 128  # so many pairs at once, each compared with all others
FILLED = tl.constexpr(256)  # unused entries that are written at once


def sort_rows(experts_TK: Tensor, first_expert: int, num_experts: int, tile: int) -> ExpertRows:
    """Takes experts_TK as `route` returns it: int32, a row's experts all different."""
    num_rows, num_chosen = experts_TK.shape
    assert experts_TK.is_contiguous()
    rows = empty_rows(num_rows, num_chosen, num_experts, tile, experts_TK.device)
    block_rows = min(triton.next_power_of_2(num_rows), ROWS)
    num_blocks, pairs = triton.cdiv(num_rows, block_rows), block_rows * num_chosen
    waits = follows(num_rows, experts_TK.device)
    sizes = dict(BLOCK_PAIRS=pairs, PAIRS=min(triton.next_power_of_2(pairs), PAIRS))
    sizes |= dict(FIRST=first_expert, OWN=num_experts, TILE=tile)
    sizes |= dict(WAITS=waits, launch_pdl=waits, num_warps=16 if pairs >= PAIRS else 4)
    counts_XE, tables, most = None, tensors_of(rows), len(rows.tile_start_X)
    if num_blocks > 1:
        counts_XE = experts_TK.new_empty(num_blocks, triton.next_power_of_2(num_experts))
        nowhere = (None,) * len(tables)
        sort_kernel[(num_blocks,)](
            experts_TK, counts_XE, *nowhere, experts_TK.numel(), most, **sizes
        )
    sort_kernel[(num_blocks,)](experts_TK, counts_XE, *tables, experts_TK.numel(), most, **sizes)
    return rows


def empty_rows(
    num_rows: int, num_chosen: int, num_experts: int, tile: int, device: torch.device
) -> ExpertRows:
    num_pairs = num_rows * num_chosen
    tiles = most_tiles(num_pairs, num_experts, tile)
    sizes = num_pairs, (num_rows, num_chosen), num_experts + 1, tiles, tiles, 1
    return ExpertRows(*(torch.empty(x, dtype=torch.int32, device=device) for x in sizes), tile)


def tensors_of(rows: ExpertRows) -> tuple[Tensor, ...]:
    return (
        rows.pair_of_X, rows.row_of_TK, rows.starts_E1,
        rows.tile_expert_X, rows.tile_start_X, rows.num_tiles_1,
    )  # fmt: skip


@triton.jit
def local_experts(
    experts_TK, start, num_pairs, BLOCK_PAIRS: tl.constexpr, PAIRS: tl.constexpr,
    FIRST: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """The experts of a program's pairs from `start` on, counted from our first; -1: not ours."""
    within = start + tl.arange(0, PAIRS)
    pair = tl.program_id(0) * BLOCK_PAIRS + within
    local = tl.load(experts_TK + pair, (within < BLOCK_PAIRS) & (pair < num_pairs), -1) - FIRST
    return tl.where((local >= 0) & (local < OWN), local, -1)


@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def sort_kernel(
    experts_TK,
    counts_XE,
    pair_of_X,
    row_of_TK,
    starts_E1,
    tile_expert_X,
    tile_start_X,
    num_tiles_1,
    num_pairs,
    most_tiles,
    BLOCK_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    FIRST: tl.constexpr,
    OWN: tl.constexpr,
    TILE: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Without tables it counts; without counts it does all, as the only program."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(OWN)
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, i = tl.program_id(0), tl.arange(0, PAIRS)
    local_E = tl.arange(0, EXPERTS)
    counts_E, before_E = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32)
    if counts_XE is None or pair_of_X is None:
        for start in range(0, BLOCK_PAIRS, PAIRS):
            local = local_experts(experts_TK, start, num_pairs, BLOCK_PAIRS, PAIRS, FIRST, OWN)
            counts_E += tl.histogram(local, EXPERTS, local >= 0)
    else:
        for other in range(0, tl.num_programs(0), 8):
            others = other + tl.arange(0, 8)[:, None]
            at = counts_XE + others * EXPERTS + local_E[None, :]
            counts = tl.load(at, others < tl.num_programs(0), 0)
            counts_E += tl.sum(counts, 0)
            before_E += tl.sum(tl.where(others < block, counts, 0), 0)
    if pair_of_X is None:
        tl.store(counts_XE + block * EXPERTS + local_E, counts_E)
    else:
        next_E = tl.cumsum(counts_E, 0) - counts_E + before_E
        for start in range(0, BLOCK_PAIRS, PAIRS):
            local = local_experts(experts_TK, start, num_pairs, BLOCK_PAIRS, PAIRS, FIRST, OWN)
            is_same = (local[None, :] == local[:, None]) & (i[None, :] < i[:, None])
            at = tl.gather(next_E, tl.maximum(local, 0), 0) + tl.sum(is_same.to(tl.int32), 1)
            pair = block * BLOCK_PAIRS + start + i
            tl.store(pair_of_X + at, pair, local >= 0)
            is_pair = (start + i < BLOCK_PAIRS) & (pair < num_pairs)
            tl.store(row_of_TK + pair, tl.where(local >= 0, at, -1), is_pair)
            next_E += tl.histogram(local, EXPERTS, local >= 0)
        if block == 0:
            local_E = tl.where(local_E < OWN, local_E, -1)
            store_tables(
                pair_of_X, starts_E1, tile_expert_X, tile_start_X, num_tiles_1,
                local_E, counts_E, num_pairs, most_tiles, OWN, TILE,
            )  # fmt: skip


@triton.jit
def store_tables(
    pair_of_X, starts_E1, tile_expert_X, tile_start_X, num_tiles_1,
    local_E, counts_E, num_pairs, most_tiles, OWN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """All but the pairs themselves. `local_E`: the experts in order, -1 where there is none."""
    starts_of_E = tl.cumsum(counts_E, 0) - counts_E
    num_ours = tl.sum(counts_E, 0)
    tl.store(starts_E1 + local_E, starts_of_E, local_E >= 0)
    tl.store(starts_E1 + OWN, num_ours)
    tiles_E = (counts_E + TILE - 1) // TILE
    first_E = tl.cumsum(tiles_E, 0) - tiles_E
    num_tiles = tl.sum(tiles_E, 0)
    tl.store(num_tiles_1, num_tiles)
    for i in range(tl.max(tiles_E, 0)):
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
