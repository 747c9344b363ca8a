"""From logits to chosen experts and their weights in one launch, which may sort rows by them, too.

Meaning: nanovllm_kernels.route_reference. A program takes a row, or all rows of a short step, whose
pairs it then sorts: a matrix of rows and experts holds for each the rank at which it was chosen,
which is all that sorting by expert needs.

Decision: experts are chosen one after another by the largest key, an integer in the order of the
scores, because integers have a maximum over a warp in one instruction. No key is ever looked up: an
expert keeps its score, and writes it to the place of its rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows
from nanovllm_kernels.expert_rows import empty_rows, sort_rows, store_tables, tensors_of
from nanovllm_kernels.route_reference import ExpertRows, Routing, Uniform
from nanovllm_kernels.sampling import mix, uniforms

SORTED_ROWS = 64  # of a step whose rows one program chooses for and sorts
SORTED_ELEMENTS = 8192  # logits of such a step
LOWEST = tl.constexpr(-(1 << 31))  # below every key
HIGHEST = tl.constexpr((1 << 31) - 1)


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    num_chosen: int,
    rule: Routing,
    uniform: Uniform | None = None,
) -> tuple[Tensor, Tensor]:
    return _launch(logits_TE, bias_E, num_chosen, rule, uniform, block_rows=1)


def route_and_sort(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    num_chosen: int,
    rule: Routing,
    first_expert: int,
    num_experts: int,
    tile: int,
    uniform: Uniform | None = None,
) -> tuple[Tensor, Tensor, ExpertRows]:
    """`route`'s weights and experts, and `sort_rows` of them: one launch for a short step."""
    num_rows, all_experts = logits_TE.shape
    block = triton.next_power_of_2(num_rows)
    if block > SORTED_ROWS or block * triton.next_power_of_2(all_experts) > SORTED_ELEMENTS:
        weights_TK, experts_TK = route(logits_TE, bias_E, num_chosen, rule, uniform)
        return weights_TK, experts_TK, sort_rows(experts_TK, first_expert, num_experts, tile)
    rows = empty_rows(num_rows, num_chosen, num_experts, tile, logits_TE.device)
    routed = _launch(logits_TE, bias_E, num_chosen, rule, uniform, block, rows, first_expert)
    return *routed, rows


def _launch(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    num_chosen: int,
    rule: Routing,
    uniform: Uniform | None,
    block_rows: int,
    rows: ExpertRows | None = None,
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = logits_TE.shape
    assert logits_TE.stride(1) == 1 and num_experts % rule.num_groups == 0
    num_logits = block_rows * triton.next_power_of_2(num_experts)
    weights_TK = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty_like(weights_TK, dtype=torch.int32)
    slots_T, positions_T, layer = (None, None, 0) if uniform is None else uniform
    waits = follows(num_rows, logits_TE.device)
    route_kernel[(triton.cdiv(num_rows, block_rows),)](
        logits_TE,
        bias_E,
        slots_T,
        positions_T,
        weights_TK,
        experts_TK,
        *((None,) * 6 if rows is None else tensors_of(rows)),
        num_rows,
        logits_TE.stride(0),
        layer * num_experts,
        rule.scale,
        0 if rows is None else len(rows.tile_start_X),
        E=num_experts,
        K=num_chosen,
        SIGMOID=rule.score == "sigmoid",
        RENORMALISE=rule.renormalise,
        GROUPS=rule.num_groups,
        CHOSEN_GROUPS=rule.chosen_groups,
        ROWS=block_rows,
        FIRST=first_expert,
        OWN=num_experts if rows is None else len(rows.starts_E1) - 1,
        TILE=1 if rows is None else rows.tile,
        WAITS=waits,
        num_warps=min(max(num_logits // 256, 1), block_rows, 16),
        launch_pdl=waits,
    )
    return weights_TK, experts_TK


@triton.jit(do_not_specialize=["num_rows", "first_index", "most_tiles"])
def route_kernel(
    logits_TE,
    bias_E,
    slots_T,
    positions_T,
    weights_TK,
    experts_TK,
    pair_of_X,
    row_of_TK,
    starts_E1,
    tile_expert_X,
    tile_start_X,
    num_tiles_1,
    num_rows,
    logits_stride,
    first_index,
    scale,
    most_tiles,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    OWN: tl.constexpr,
    TILE: tl.constexpr,
    WAITS: tl.constexpr,
):
    GROUPS_BLOCK: tl.constexpr = triton.next_power_of_2(GROUPS)
    GROUP_BLOCK: tl.constexpr = triton.next_power_of_2(E // GROUPS)
    BLOCK: tl.constexpr = GROUPS_BLOCK * GROUP_BLOCK
    expert_E = tl.arange(0, BLOCK)
    exists_E = expert_E < E
    place = expert_E[None, :]
    if GROUPS > 1:
        inner_E, SIZE = expert_E % GROUP_BLOCK, E // GROUPS
        expert_E = expert_E // GROUP_BLOCK * SIZE + inner_E
        exists_E = (inner_E < SIZE) & (expert_E < E)
    expert, exists = expert_E[None, :], exists_E[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    if bias_E is not None:
        bias = tl.load(bias_E + expert, exists, 0.0).to(tl.float32)
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inside = exists & (row < num_rows)
    at = logits_TE + row.to(tl.int64) * logits_stride + expert
    x = tl.load(at, inside, -float("inf")).to(tl.float32)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-x))
    else:
        score = tl.exp(x - tl.max(x, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    ranked = score
    if slots_T is not None:
        slot = tl.load(slots_T + row, row < num_rows, 0).to(tl.uint64)
        stream = mix(mix(slot) + tl.load(positions_T + row, row < num_rows, 0).to(tl.uint64))
        ranked = uniforms(stream, (first_index + expert).to(tl.uint64))
    else:
        if bias_E is not None:
            ranked += bias
        ranked = tl.where(ranked == ranked, ranked, float("inf"))
        if GROUPS > 1:
            ranked = in_best_groups(
                tl.where(inside, ranked, -float("inf")),
                ROWS, GROUPS_BLOCK, GROUP_BLOCK, CHOSEN_GROUPS, E // GROUPS > 1,
            )  # fmt: skip

    bits = ranked.to(tl.int32, bitcast=True)
    key = tl.where(exists, bits ^ ((bits >> 31) & HIGHEST), LOWEST)
    rank = tl.full([ROWS, BLOCK], -1, tl.int32)
    for k in tl.static_range(K):
        top = tl.max(key, 1)[:, None]
        best = tl.min(tl.where(key == top, place, BLOCK), 1)[:, None]
        rank = tl.where(place == best, k, rank)
        key = tl.where(place == best, LOWEST, key)

    rank = tl.where(inside, rank, -1)
    if RENORMALISE:
        score = score / (tl.sum(tl.where(rank >= 0, score, 0.0), 1)[:, None] + 1e-20)
    pair = row * K + rank
    tl.store(weights_TK + pair, score * scale, rank >= 0)
    tl.store(experts_TK + pair, expert.broadcast_to(ROWS, BLOCK), rank >= 0)
    if pair_of_X is not None:
        own_E = exists_E & (expert_E >= FIRST) & (expert_E < FIRST + OWN)
        is_ours = (rank >= 0) & own_E[None, :]
        counts_E = tl.sum(is_ours.to(tl.int32), 0)
        next_E = tl.cumsum(counts_E, 0) - counts_E
        local_E = tl.where(own_E, expert_E - FIRST, -1)
        before = tl.cumsum(is_ours.to(tl.int32), 0) - is_ours.to(tl.int32)
        sorted_row = next_E[None, :] + before
        tl.store(pair_of_X + sorted_row, pair, is_ours)
        tl.store(row_of_TK + pair, tl.where(is_ours, sorted_row, -1), rank >= 0)
        store_tables(
            pair_of_X, starts_E1, tile_expert_X, tile_start_X, num_tiles_1,
            local_E, counts_E, num_rows * K, most_tiles, OWN, TILE,
        )  # fmt: skip


@triton.jit
def in_best_groups(
    ranked, ROWS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr, HAS_TWO: tl.constexpr,
):  # fmt: skip
    """Experts outside of the best groups get -inf; groups compare by their two best."""
    NOTHING: tl.constexpr = -float("inf")
    grouped = ranked.reshape(ROWS, GROUPS_BLOCK, GROUP_BLOCK)
    inner = tl.arange(0, GROUP_BLOCK)[None, None, :]
    sums = tl.max(grouped, 2)
    if HAS_TWO:
        best = tl.min(tl.where(grouped == sums[:, :, None], inner, GROUP_BLOCK), 2)
        sums += tl.max(tl.where(inner == best[:, :, None], NOTHING, grouped), 2)
    group = tl.arange(0, GROUPS_BLOCK)
    one, other = sums[:, :, None], sums[:, None, :]
    is_before = group[None, None, :] < group[None, :, None]
    is_better = (other > one) | ((other == one) & is_before)
    is_in = tl.sum(is_better.to(tl.int32), 2) < CHOSEN
    kept = tl.where(is_in[:, :, None], grouped, NOTHING)
    return kept.reshape(ROWS, GROUPS_BLOCK * GROUP_BLOCK)
