"""Stable counting sort of (token, expert) pairs by expert, with tables of tiles that cover them.

The reference is sort_rows of route_reference.py. Up to SCANNED pairs take one launch. A program
then reads all pairs and places those of a few experts, whose counts share one word, 16 bits each.
More pairs take three launches. The first counts the pairs of each block by expert. The second sums
these counts over blocks. The third ranks each pair among those of its block. The result does not
depend on the order of programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import launches_early
from nanovllm_kernels.experts.route_reference import ExpertRows, most_tiles
from nanovllm_kernels.triton_parts import launch_dependents, wait

SCANNED = 8192  # pairs that each program reads; fewer than 32,768, for counts of 16 bits
TOGETHER = 4  # experts whose pairs a program places in one launch, 2 or 4
OF_A_WARP = 256  # pairs per warp in one launch, with LEAST_WARPS to MOST_WARPS warps
LEAST_WARPS, MOST_WARPS = 4, 16
PLACED = 128  # pairs of a block; a program places one block
BLOCK_WARPS = 4  # with 16, one program fills a multiprocessor, and most others wait for it
CHUNK = 8  # pairs that all pairs of the block are compared with at once
ADDED = 8  # experts whose counts a program sums
FEW_BLOCKS = 128, 2048  # numbers of blocks read at once; few, since each is compiled
FILLED = tl.constexpr(256)  # unused entries written at once


def sort_rows(experts_TK: Tensor, first_expert: int, num_experts: int, tile: int) -> ExpertRows:
    """Sort experts_TK as `route` returns it: int32, with distinct experts in each row."""
    num_pairs, waits = experts_TK.numel(), launches_early(len(experts_TK), experts_TK.device)
    assert experts_TK.is_contiguous()
    rows = empty_rows(*experts_TK.shape, num_experts, tile, experts_TK.device)
    ours, options = dict(FIRST=first_expert, OWN=num_experts), dict(WAITS=waits, launch_pdl=waits)
    if num_pairs <= SCANNED:
        placed = max(triton.next_power_of_2(num_pairs), 32 * LEAST_WARPS)
        counts_XE, num_programs = None, triton.cdiv(num_experts, TOGETHER)
        warps = min(max(placed // OF_A_WARP, LEAST_WARPS), MOST_WARPS)
    else:
        placed, num_programs, warps = PLACED, triton.cdiv(num_pairs, PLACED), BLOCK_WARPS
        counts_XE = counts_of_blocks(experts_TK, num_programs, ours, options)
    sort_kernel[(num_programs + 1,)](
        experts_TK, counts_XE, *tensors_of(rows), num_pairs, len(rows.tile_start_X), PLACED=placed,
        TOGETHER=TOGETHER, CHUNK=CHUNK, TILE=tile, num_warps=warps, **ours, **options,
    )  # fmt: skip
    return rows


def counts_of_blocks(
    experts_TK: Tensor, num_blocks: int, ours: dict[str, int], options: dict[str, bool]
) -> Tensor:
    """Return, for each block, each expert's pairs in earlier blocks; a last row has the totals."""
    block = triton.next_power_of_2(ours["OWN"])
    counts_XE = experts_TK.new_empty(num_blocks + 1, block)
    args = experts_TK, counts_XE, experts_TK.numel()
    count_kernel[(num_blocks,)](*args, **ours, PLACED=PLACED, **options)
    add_kernel[(triton.cdiv(block, ADDED),)](
        counts_XE, num_blocks, EXPERTS=block, ADDED=min(ADDED, block), num_warps=8, **options,
        BLOCKS=next((n for n in FEW_BLOCKS if n >= num_blocks), triton.next_power_of_2(num_blocks)),
    )  # fmt: skip
    return counts_XE


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
    """Return the pairs' experts relative to this rank's first, or OWN for other ranks' experts."""
    local = tl.load(experts_TK + pair, pair < num_pairs, -1) - FIRST
    return tl.where((local >= 0) & (local < OWN), local, OWN)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    experts_TK, counts_XE, num_pairs, FIRST: tl.constexpr, OWN: tl.constexpr,
    PLACED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Count the pairs of a block by expert."""
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
    """Replace counts by those of all earlier blocks, and write the totals in one more row."""
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
    num_tiles_1, num_pairs, most_tiles, PLACED: tl.constexpr, TOGETHER: tl.constexpr,
    CHUNK: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr, TILE: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Write the tables in the first program, and place pairs in the others."""
    wait(WAITS)
    launch_dependents(WAITS)
    if tl.program_id(0) == 0:
        store_tables(
            experts_TK, counts_XE, pair_of_X, row_of_TK, starts_E1, tile_expert_X, tile_start_X,
            num_tiles_1, num_pairs, most_tiles, PLACED, FIRST, OWN, TILE,
        )  # fmt: skip
    elif counts_XE is None:
        place_some_experts(
            experts_TK, pair_of_X, row_of_TK, num_pairs, PLACED, TOGETHER, FIRST, OWN
        )
    else:
        place_block(
            experts_TK, counts_XE, pair_of_X, row_of_TK, num_pairs, PLACED, CHUNK, FIRST, OWN
        )


@triton.jit
def place_some_experts(
    experts_TK, pair_of_X, row_of_TK, num_pairs, PLACED: tl.constexpr, TOGETHER: tl.constexpr,
    FIRST: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Place the pairs of TOGETHER experts, each counted in 16 bits of a word, the lowest first."""
    WORD: tl.constexpr = tl.int64 if TOGETHER > 2 else tl.int32
    ONES: tl.constexpr = 0x1000100010001 if TOGETHER > 2 else 0x10001
    first = (tl.program_id(0) - 1) * TOGETHER
    pair = tl.arange(0, PLACED)
    local = local_experts(experts_TK, pair, num_pairs, FIRST, OWN)
    is_one = (local >= first) & (local < tl.minimum(first + TOGETHER, OWN))
    bit = tl.where(is_one, local - first, 0) * 16
    one = is_one.to(WORD) << bit.to(WORD)
    num_lower = tl.sum((local < first).to(tl.int32), 0)
    # For each expert, its start is the number of pairs of all experts before it. A product with
    # ONES adds the counts in lower bits to those in higher bits.
    starts = num_lower.to(WORD) * ONES + tl.sum(one, 0) * (ONES - 1)
    at = (((tl.cumsum(one, 0) - one + starts) >> bit.to(WORD)) & 0xFFFF).to(tl.int32)
    tl.store(pair_of_X + at, pair, is_one)
    tl.store(row_of_TK + pair, at, is_one)


@triton.jit
def place_block(
    experts_TK, counts_XE, pair_of_X, row_of_TK, num_pairs,
    PLACED: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one block of PLACED pairs, after those of earlier blocks."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(OWN)
    block = tl.program_id(0) - 1
    i = block * PLACED + tl.arange(0, PLACED)
    local = local_experts(experts_TK, i, num_pairs, FIRST, OWN)
    counts_E = tl.load(counts_XE + (tl.num_programs(0) - 1) * EXPERTS + tl.arange(0, EXPERTS))
    expert = tl.minimum(local, OWN - 1)
    before_block = tl.load(counts_XE + block * EXPERTS + expert)
    before = tl.zeros([PLACED, CHUNK], tl.int32)
    for start in range(block * PLACED, (block + 1) * PLACED, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = local_experts(experts_TK, j, num_pairs, FIRST, OWN)
        is_before = (other[None, :] == local[:, None]) & (j[None, :] < i[:, None])
        before += is_before.to(tl.int32)
    starts_of_E = tl.cumsum(counts_E, 0) - counts_E
    at = tl.sum(before, 1) + before_block + tl.gather(starts_of_E, expert, 0)
    is_ours = local < OWN
    tl.store(pair_of_X + at, i, is_ours)
    tl.store(row_of_TK + i, tl.where(is_ours, at, -1), i < num_pairs)


@triton.jit
def store_tables(
    experts_TK, counts_XE, pair_of_X, row_of_TK, starts_E1, tile_expert_X, tile_start_X,
    num_tiles_1, num_pairs, most_tiles,
    PLACED: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the tables of experts and tiles, from the counts of all blocks or from the pairs.

    In the latter case, also write -1 as the places of other ranks' pairs.
    """
    EXPERTS: tl.constexpr = triton.next_power_of_2(OWN)
    local_E = tl.arange(0, EXPERTS)
    if counts_XE is None:
        pair = tl.arange(0, PLACED)
        local = local_experts(experts_TK, pair, num_pairs, FIRST, OWN)
        counts_E = tl.histogram(local, EXPERTS, local < OWN)
        tl.store(row_of_TK + pair, -1, (local == OWN) & (pair < num_pairs))
    else:
        counts_E = tl.load(counts_XE + (tl.num_programs(0) - 1) * EXPERTS + local_E)
    exists = local_E < OWN
    tiles_E = (counts_E + TILE - 1) // TILE
    # One sum and one cumulative sum serve rows and tiles: tiles are in the lower half of a word.
    both_E = (counts_E.to(tl.int64) << 32) + tiles_E
    before_E = tl.cumsum(both_E, 0) - both_E
    starts_of_E, first_E = (before_E >> 32).to(tl.int32), before_E.to(tl.int32)
    both = tl.sum(both_E, 0)
    num_ours, num_tiles = (both >> 32).to(tl.int32), both.to(tl.int32)
    tl.store(starts_E1 + local_E, starts_of_E, exists)
    tl.store(starts_E1 + OWN, num_ours)
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
