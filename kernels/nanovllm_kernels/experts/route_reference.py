"""Plain torch reference of routing, and of the sort of (token, expert) pairs by expert.

Also runs on CPUs. A pair is a token t and one of its K experts; its number is t * K + k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.activations import sigmoid
from nanovllm_kernels.sampling.reference import mix, shift_right, stream_keys, uniforms

Uniform = tuple[Tensor, Tensor, int]  # slots_T, positions_T, the number of the layer


class Placed(NamedTuple):
    """Placement of experts that have one or several replicas on different ranks.

    With it, routing returns replicas. They are numbered over all ranks, those of rank 0 first.
    """

    slot_mapping_T: Tensor  # int64: cache cell of each token's key and value; 0 for padding
    tokens_X: Tensor  # int64: tokens routed to each replica so far
    copies_EX: Tensor | None  # int32: each expert's replicas by turn; None: one with its number


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule that turns router logits into chosen experts and their weights."""

    score: Literal["softmax", "sigmoid"]  # softmax is over all experts, before the choice
    renormalise: bool  # divide the weights of the chosen experts by their sum
    scale: float = 1.0  # final factor of the weights
    num_groups: int = 1  # groups of consecutive experts, of equal size
    chosen_groups: int = 1  # number of groups in which experts are chosen
    # A shared expert is the last expert, and every token's last choice. Its weight is 1 ("whole"),
    # or the sigmoid of a logit after those of the other experts ("gated").
    shared: Literal["none", "whole", "gated"] = "none"

    @property
    def has_shared(self) -> bool:
        return self.shared != "none"


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Pairs of this rank's experts, sorted by expert, then by pair, and tiles that cover them.

    X in pair_of_X is T * K, and pairs of other ranks' experts leave -1 at its end. X of the tiles
    is `most_tiles`, computed on the host. Tiles from num_tiles_1 on are unused and hold -1. Experts
    are numbered from this rank's first. All tensors are int32.
    """

    pair_of_X: Tensor  # pair of a sorted row
    row_of_TK: Tensor  # sorted row of a pair, or -1 if its expert is another rank's
    starts_E1: Tensor  # first sorted row of each expert, and the end of the last one's rows
    tile_expert_X: Tensor
    tile_start_X: Tensor  # first sorted row; a tile ends after `tile` rows or with its expert
    num_tiles_1: Tensor
    tile: int


class Chosen(NamedTuple):
    """Unsorted pairs, a tile each, for so few tokens that they hardly share experts.

    All experts must be this rank's.
    """

    experts_TK: Tensor
    row_of_TK: None = None  # a pair's row is its number
    tile: int = 16  # least rows of a product


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    num_chosen: int,
    rule: Routing,
    uniform: Uniform | None = None,
    placed: Placed | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weights_TK, float32, and experts_TK, int32, the best first, computed in float32.

    The experts with the largest score + bias are chosen, and of equal ones the lower expert. The
    weights are scores without bias. A group's score is the sum of its two best biased scores. With
    `uniform`, experts are chosen by a hash of slot, position, layer and expert, for measurements.
    Logits with a NaN choose any distinct experts, with a NaN in at least one of their weights.

    With `placed`, experts_TK has replicas, which are counted in tokens_X, and -1 for padding
    tokens. A shared expert is one more, which is not counted.
    """
    logits_TE = logits_TE.float()
    shared_T1 = torch.ones_like(logits_TE[:, :1])
    if rule.shared == "gated":
        logits_TE, shared_T1 = logits_TE[:, :-1], sigmoid(logits_TE[:, -1:])
    num_experts = logits_TE.shape[1]
    scores_TE = sigmoid(logits_TE) if rule.score == "sigmoid" else logits_TE.softmax(-1)
    if uniform is not None:
        slots_T, positions_T, layer = uniform
        experts_E = layer * num_experts + torch.arange(num_experts, device=logits_TE.device)
        ranked_TE = uniforms(stream_keys(slots_T.long(), positions_T.long())[:, None], experts_E)
    else:
        ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E.float()
        ranked_TE = in_best_groups(ranked_TE, rule)
    order_TE = ranked_TE.sort(dim=-1, descending=True, stable=True).indices  # NaN is the largest
    experts_TK = order_TE[:, :num_chosen]
    weights_TK = scores_TE.take_along_dim(experts_TK, 1)
    if rule.renormalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    experts_TK = experts_TK.int() if placed is None else copies_of(experts_TK, placed)
    if not rule.has_shared:
        return weights_TK * rule.scale, experts_TK
    last_T1 = torch.full_like(experts_TK[:, :1], num_experts).where(experts_TK[:, :1] >= 0, -1)
    weights_TK = torch.cat([weights_TK * rule.scale, shared_T1], 1)
    return weights_TK, torch.cat([experts_TK, last_T1], 1)


def copies_of(experts_TK: Tensor, placed: Placed) -> Tensor:
    """Return the replicas of chosen experts. The key's cache cell selects one, equally on all
    ranks.
    """
    slot_mapping_T, tokens_X, copies_EX = placed
    copies_TK = experts_TK.int()
    if copies_EX is not None:
        turns_T = shift_right(mix(slot_mapping_T), 40) % copies_EX.shape[1]
        copies_TK = copies_EX[experts_TK, turns_T[:, None]]
    is_ours_T1 = (slot_mapping_T > 0)[:, None]
    tokens_X.index_add_(0, copies_TK.flatten(), is_ours_T1.expand_as(copies_TK).flatten().long())
    return copies_TK.where(is_ours_T1, -1)


def in_best_groups(ranked_TE: Tensor, rule: Routing) -> Tensor:
    """Return the scores, with -inf for experts outside the best groups."""
    if rule.num_groups == 1:
        return ranked_TE
    ranked_TXE = ranked_TE.unflatten(1, (rule.num_groups, -1))
    groups_TX = ranked_TXE.topk(min(2, ranked_TXE.shape[2]), -1).values.sum(-1)
    best_TX = groups_TX.sort(dim=-1, descending=True, stable=True).indices[:, : rule.chosen_groups]
    is_out_TX = torch.ones_like(groups_TX, dtype=torch.bool).scatter(1, best_TX, value=False)
    return ranked_TXE.masked_fill(is_out_TX[:, :, None], -torch.inf).flatten(1)


def sort_rows(experts_TK: Tensor, first_expert: int, num_experts: int, tile: int) -> ExpertRows:
    """Sort pairs of this rank's experts, [first_expert, first_expert + num_experts)."""
    local_X = experts_TK.flatten().long() - first_expert
    is_ours_X = (local_X >= 0) & (local_X < num_experts)
    order_X = local_X.where(is_ours_X, num_experts).sort(stable=True).indices
    counts_E = experts_TK.new_zeros(num_experts + 1, dtype=torch.int64)
    counts_E = counts_E.index_add(0, local_X.where(is_ours_X, num_experts), is_ours_X.long())[:-1]
    ends_E = counts_E.cumsum(0)
    starts_E1 = torch.cat([ends_E.new_zeros(1), ends_E])
    rows_X = torch.arange(len(local_X), device=local_X.device)
    tiles_E = (counts_E + tile - 1) // tile
    tile_ends_E = tiles_E.cumsum(0)
    tiles_X = torch.arange(most_tiles(len(local_X), num_experts, tile), device=local_X.device)
    owner_X = torch.searchsorted(tile_ends_E, tiles_X, right=True).clamp(max=num_experts - 1)
    inner_X = tiles_X - (tile_ends_E - tiles_E)[owner_X]
    is_live_X = tiles_X < tile_ends_E[-1]
    row_of_X = torch.empty_like(order_X).index_copy(0, order_X, rows_X)
    return ExpertRows(
        order_X.where(rows_X < ends_E[-1], -1).int(),
        row_of_X.where(is_ours_X, -1).int().view_as(experts_TK),
        starts_E1.int(),
        owner_X.where(is_live_X, -1).int(),
        (starts_E1[owner_X] + inner_X * tile).where(is_live_X, -1).int(),
        tile_ends_E[-1:].int(),
        tile,
    )


def most_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """Return the most tiles that any distribution of pairs over experts needs, at least 1."""
    num_used = min(num_pairs, num_experts)
    return max(1, num_used + (num_pairs - num_used) // tile)
