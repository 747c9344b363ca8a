"""Pairs of token and expert sorted by expert, with tables of the tiles that cover them.

Meaning: nanovllm_kernels.route_reference.sort_rows. One launch while there are few thousand pairs:
a pair's place is the number of pairs that belong before it, and programs compare some pairs with
all. More take three: blocks of pairs are counted by expert, the counts of blocks added up, and
pairs compared with those of their block. Nothing depends on which program is first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows
from nanovllm_kernels.following import let_next_come, wait
from nanovllm_kernels.route_reference import ExpertRows, most_tiles

COMPARED = 8192  # pairs that are compared with all others
PLACED, BLOCK_PLACED = 64, 128  # that a program places, of few and of many
CHUNK = 128  # pairs that others are compared with at once
COUNTED = 1024  # pairs that are counted at once
ADDED = 8  # experts whose counts a program adds up
FILLED = tl.constexpr(256)  # unused entries that are written at once


def sort_rows(experts_TK: Tensor, first_expert: int, num_experts: int, tile: int) -> ExpertRows:
    """Takes experts_TK as `route` returns it: int32, a row's experts all different."""
    num_pairs, waits = experts_TK.numel(), follows(len(experts_TK), experts_TK.device)
    assert experts_TK.is_contiguous()
    rows = empty_rows(*experts_TK.shape, num_experts, tile, experts_TK.device)
    placed = PLACED if num_pairs <= COMPARED else BLOCK_PLACED
    num_blocks, block = triton.cdiv(num_pairs, placed), triton.next_power_of_2(num_experts)
    ours, options = dict(FIRST=first_expert, OWN=num_experts), dict(WAITS=waits, launch_pdl=waits)
    counts_XE = None
    if num_pairs > COMPARED:
        counts_XE = experts_TK.new_empty(num_blocks + 1, block)
        args = experts_TK, counts_XE, num_pairs
        count_kernel[(num_blocks,)](*args, **ours, PLACED=placed, **options)
        add_kernel[(triton.cdiv(block, ADDED),)](
            counts_XE, num_blocks, BLOCKS=triton.next_power_of_2(num_blocks), EXPERTS=block,
            ADDED=min(ADDED, block), num_warps=8, **options,
        )  # fmt: skip
    sort_kernel[(num_blocks + 1,)](
        experts_TK, counts_XE, *tensors_of(rows), num_pairs, len(rows.tile_start_X), PLACED=placed,
        CHUNK=CHUNK, COUNTED=min(triton.next_power_of_2(num_pairs), COUNTED), TILE=tile,
        num_warps=placed // 8, **ours, **options,
    )  # fmt: skip
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
def local_experts(experts_TK, pair, num_pairs, FIRST: tl.constexpr, OWN: tl.constexpr):
    """The pairs' experts, counted from our first one; OWN in place of those that are not ours."""
    local = tl.load(experts_TK + pair, pair < num_pairs, -1) - FIRST
    return tl.where((local >= 0) & (local < OWN), local, OWN)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    experts_TK, counts_XE, num_pairs, FIRST: tl.constexpr, OWN: tl.constexpr,
    PLACED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Counts the pairs of a block by expert."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(OWN)
    wait(WAITS)
    pair = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    local = local_experts(experts_TK, pair, num_pairs, FIRST, OWN)
    counts = tl.histogram(local, EXPERTS, local < OWN)
    tl.store(counts_XE + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["num_blocks"])
def add_kernel(
    counts_XE,
    num_blocks,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ADDED: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Counts become those of all blocks before; the row behind the last block is of all."""
    wait(WAITS)
    block = tl.arange(0, BLOCKS)[:, None]
    at = counts_XE + block * EXPERTS + tl.program_id(0) * ADDED + tl.arange(0, ADDED)[None, :]
    counts = tl.load(at, block < num_blocks, 0)
    total = tl.sum(counts, 0)
    tl.store(at, tl.cumsum(counts, 0) - counts, block < num_blocks)
    row = counts_XE + num_blocks * EXPERTS
    tl.store(row + tl.program_id(0) * ADDED + tl.arange(0, ADDED), total)


@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def sort_kernel(
    experts_TK, counts_XE, pair_of_X, row_of_TK, starts_E1, tile_expert_X, tile_start_X,
    num_tiles_1, num_pairs, most_tiles, PLACED: tl.constexpr, CHUNK: tl.constexpr,
    COUNTED: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr, TILE: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """The first program writes the tables, the others place pairs."""
    wait(WAITS)
    let_next_come(WAITS)
    if tl.program_id(0) == 0:
        store_tables(
            experts_TK, counts_XE, pair_of_X, starts_E1, tile_expert_X, tile_start_X, num_tiles_1,
            num_pairs, most_tiles, COUNTED, FIRST, OWN, TILE,
        )  # fmt: skip
    else:
        place_pairs(
            experts_TK, counts_XE, pair_of_X, row_of_TK, num_pairs, PLACED, CHUNK, FIRST, OWN
        )


@triton.jit
def place_pairs(
    experts_TK, counts_XE, pair_of_X, row_of_TK, num_pairs,
    PLACED: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) - 1
    i = block * PLACED + tl.arange(0, PLACED)
    local = local_experts(experts_TK, i, num_pairs, FIRST, OWN)
    begun, end = (0, num_pairs) if counts_XE is None else (block * PLACED, (block + 1) * PLACED)
    before = tl.zeros([PLACED, CHUNK], tl.int32)
    for start in range(begun, end, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = local_experts(experts_TK, j, num_pairs, FIRST, OWN)
        if counts_XE is None:
            is_before = (other * num_pairs + j)[None, :] < (local * num_pairs + i)[:, None]
        else:
            is_before = (other[None, :] == local[:, None]) & (j[None, :] < i[:, None])
        before += is_before.to(tl.int32)
    at = tl.sum(before, 1)
    if counts_XE is not None:
        EXPERTS: tl.constexpr = triton.next_power_of_2(OWN)
        last = counts_XE + (tl.num_programs(0) - 1) * EXPERTS
        counts_E = tl.load(last + tl.arange(0, EXPERTS))
        starts_of_E = tl.cumsum(counts_E, 0) - counts_E
        expert = tl.minimum(local, OWN - 1)
        at += tl.load(counts_XE + block * EXPERTS + expert) + tl.gather(starts_of_E, expert, 0)
    is_ours = local < OWN
    tl.store(pair_of_X + at, i, is_ours)
    tl.store(row_of_TK + i, tl.where(is_ours, at, -1), i < num_pairs)


@triton.jit
def store_tables(
    experts_TK, counts_XE, pair_of_X, starts_E1, tile_expert_X, tile_start_X, num_tiles_1,
    num_pairs, most_tiles,
    COUNTED: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """All but the pairs' places, from the counts of all blocks, or from the pairs."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(OWN)
    local_E = tl.arange(0, EXPERTS)
    if counts_XE is None:
        counts_E = tl.zeros([EXPERTS], tl.int32)
        for start in range(0, num_pairs, COUNTED):
            pair = start + tl.arange(0, COUNTED)
            local = local_experts(experts_TK, pair, num_pairs, FIRST, OWN)
            counts_E += tl.histogram(local, EXPERTS, local < OWN)
    else:
        counts_E = tl.load(counts_XE + (tl.num_programs(0) - 1) * EXPERTS + local_E)
    exists = local_E < OWN
    starts_of_E = tl.cumsum(counts_E, 0) - counts_E
    num_ours = tl.sum(counts_E, 0)
    tl.store(starts_E1 + local_E, starts_of_E, exists)
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
