"""Top-k routing from logits to chosen experts and their weights, in one launch, a program per row.

The reference is route_reference.py.

Decision: experts are chosen one after another by the largest key, an integer in the order of the
scores. A warp finds the maximum of integers in one instruction. Sorted scores are not stored:
a round yields only a place, and the logits of the chosen experts are read once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import launches_early
from nanovllm_kernels.experts.route_reference import Placed, Routing, Uniform
from nanovllm_kernels.sampling.draw import mix, uniforms
from nanovllm_kernels.triton_parts import launch_dependents, wait

LOWEST = tl.constexpr(-(1 << 31))  # below every key
HIGHEST = tl.constexpr((1 << 31) - 1)


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    num_chosen: int,
    rule: Routing,
    uniform: Uniform | None = None,
    placed: Placed | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weights_TK, float32, and experts_TK, int32, as route_reference.route describes."""
    num_rows, num_experts = logits_TE.shape
    num_experts -= rule.shared == "gated"
    assert logits_TE.stride(1) == 1 and num_experts % rule.num_groups == 0
    size = num_rows, num_chosen + rule.has_shared
    weights_TK = torch.empty(size, dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty_like(weights_TK, dtype=torch.int32)
    slots_T, positions_T, layer = (None, None, 0) if uniform is None else uniform
    slot_mapping_T, tokens_X, copies_EX = (None, None, None) if placed is None else placed
    waits = launches_early(num_rows, logits_TE.device)
    route_kernel[(num_rows,)](
        logits_TE, bias_E, slots_T, positions_T, slot_mapping_T, tokens_X, copies_EX, weights_TK,
        experts_TK, logits_TE.stride(0), layer * num_experts, rule.scale, E=num_experts,
        K=num_chosen, SHARED=rule.has_shared, GATED=rule.shared == "gated",
        SIGMOID=rule.score == "sigmoid", RENORMALISE=rule.renormalise, GROUPS=rule.num_groups,
        CHOSEN_GROUPS=rule.chosen_groups, TURNS=0 if copies_EX is None else copies_EX.shape[1],
        WAITS=waits, num_warps=1, launch_pdl=waits,
    )  # fmt: skip
    return weights_TK, experts_TK


@triton.jit(do_not_specialize=["first_index"])
def route_kernel(
    logits_TE, bias_E, slots_T, positions_T, slot_mapping_T, tokens_X, copies_EX, weights_TK,
    experts_TK, logits_stride, first_index, scale, E: tl.constexpr, K: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, TURNS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    GROUPS_BLOCK: tl.constexpr = triton.next_power_of_2(GROUPS)
    SIZE: tl.constexpr = E // GROUPS
    GROUP_BLOCK: tl.constexpr = triton.next_power_of_2(SIZE)
    BLOCK: tl.constexpr = GROUPS_BLOCK * GROUP_BLOCK
    place = tl.arange(0, BLOCK)
    expert = place // GROUP_BLOCK * SIZE + place % GROUP_BLOCK
    exists = (place % GROUP_BLOCK < SIZE) & (expert < E)
    row = tl.program_id(0)
    if bias_E is not None:
        bias = tl.load(bias_E + expert, exists, 0.0).to(tl.float32)
    launch_dependents(WAITS)
    wait(WAITS)
    shared = E
    if slot_mapping_T is not None:
        cell = tl.load(slot_mapping_T + row)
        shared = tl.where(cell > 0, E, -1)
    at = logits_TE + row.to(tl.int64) * logits_stride
    x = tl.load(at + expert, exists, -float("inf")).to(tl.float32)
    last = row * (K + SHARED) + K
    if SHARED:  # its logit follows those of the routed experts
        store_shared(at + E, weights_TK + last, experts_TK + last, shared, GATED)
    largest = 0.0 if SIGMOID else tl.max(x, 0)
    score = score_of(x, largest, SIGMOID)
    if slots_T is not None:
        slot = tl.load(slots_T + row).to(tl.uint64)
        stream = mix(mix(slot) + tl.load(positions_T + row).to(tl.uint64))
        ranked = uniforms(stream, (first_index + expert).to(tl.uint64))
        key = ranked.to(tl.int32, bitcast=True)
    elif bias_E is None and GROUPS == 1:
        key = score.to(tl.int32, bitcast=True) & HIGHEST  # never negative; NaN is the largest
    else:
        ranked = score
        if bias_E is not None:
            ranked += bias
        ranked = tl.where(ranked == ranked, ranked, float("inf"))
        if GROUPS > 1:
            ranked = tl.where(exists, ranked, -float("inf"))
            ranked = in_best_groups(ranked, GROUPS_BLOCK, GROUP_BLOCK, CHOSEN_GROUPS, SIZE > 1)
        bits = ranked.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & HIGHEST)
    rank = tl.arange(0, triton.next_power_of_2(K))
    chosen = best_places(tl.where(exists, key, LOWEST), place, rank, BLOCK, K)
    expert = chosen // GROUP_BLOCK * SIZE + chosen % GROUP_BLOCK
    x = tl.load(at + expert, rank < K, -float("inf")).to(tl.float32)
    weight = score_of(x, largest, SIGMOID)
    if RENORMALISE:
        weight = weight / (tl.sum(tl.where(rank < K, weight, 0.0), 0) + 1e-20)
    elif not SIGMOID:
        weight = weight / tl.sum(score, 0)
    pair = last - K + rank
    tl.store(weights_TK + pair, weight * scale, rank < K)
    if slot_mapping_T is not None:
        expert = copies_of(expert, rank < K, cell, tokens_X, copies_EX, TURNS)
    tl.store(experts_TK + pair, expert, rank < K)


@triton.jit
def score_of(x, largest, SIGMOID: tl.constexpr):
    """Return the sigmoid, or an unnormalised softmax score, which the caller divides if needed."""
    return 1 / (1 + tl.exp(-x)) if SIGMOID else tl.exp(x - largest)


@triton.jit
def best_places(key, place, rank, BLOCK: tl.constexpr, K: tl.constexpr):
    """Return the places of the K largest keys; of equal keys the lowest place comes first."""
    chosen = tl.zeros_like(rank)
    for k in range(K):
        top = tl.max(key, 0)
        best = tl.min(tl.where(key == top, place, BLOCK), 0)
        key = tl.where(place == best, LOWEST, key)
        chosen = tl.where(rank == k, best, chosen)
    return chosen


@triton.jit
def store_shared(logit_at, weight_at, expert_at, expert, GATED: tl.constexpr):
    weight = 1.0
    if GATED:
        weight = 1 / (1 + tl.exp(-tl.load(logit_at).to(tl.float32)))
    tl.store(weight_at, weight)
    tl.store(expert_at, expert)


@triton.jit
def copies_of(expert, is_chosen, cell, tokens_X, copies_EX, TURNS: tl.constexpr):
    """Return the replicas of the chosen experts and count them; -1 for padding, whose cell is 0."""
    if copies_EX is not None:
        turn = (mix(cell.to(tl.uint64)) >> 40).to(tl.int32) % TURNS
        expert = tl.load(copies_EX + expert * TURNS + turn, is_chosen, 0)
    one = tl.full(expert.shape, 1, tl.int64)
    tl.atomic_add(tokens_X + expert, one, tl.where(is_chosen, cell, 0) > 0, sem="relaxed")
    return tl.where(cell > 0, expert, -1)


@triton.jit
def in_best_groups(
    ranked, GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr, HAS_TWO: tl.constexpr
):
    """Set the scores outside the best groups to -inf. A group's score sums its two best experts."""
    NOTHING: tl.constexpr = -float("inf")
    grouped = ranked.reshape(GROUPS, SIZE)
    inner, group = tl.arange(0, SIZE)[None, :], tl.arange(0, GROUPS)
    sums = tl.max(grouped, 1)
    if HAS_TWO:
        best = tl.min(tl.where(grouped == sums[:, None], inner, SIZE), 1)
        sums += tl.max(tl.where(inner == best[:, None], NOTHING, grouped), 1)
    one, other = sums[:, None], sums[None, :]
    is_better = (other > one) | ((other == one) & (group[None, :] < group[:, None]))
    is_in = tl.sum(is_better.to(tl.int32), 1) < CHOSEN
    return tl.where(is_in[:, None], grouped, NOTHING).reshape(GROUPS * SIZE)
