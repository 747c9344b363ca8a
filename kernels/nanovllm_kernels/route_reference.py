"""Which experts a token goes to, and in which order pairs of token and expert are multiplied.

Plain torch: the definition, and what a CPU runs. A pair is a token t and one of its K experts; its
number is t * K + k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.sampling_reference import mix, shift_right, stream_keys, uniforms

Uniform = tuple[Tensor, Tensor, int]  # slots_T, positions_T, the number of the layer


class Placed(NamedTuple):
    """Where chosen experts are: on some rank, or on several. What is chosen are copies of experts
    then, which are numbered through all ranks, those of rank 0 first.
    """

    slot_mapping_T: Tensor  # int64: where each token's key and value go; 0: it is nobody's
    tokens_X: Tensor  # int64: how many tokens chose each copy so far
    copies_EX: Tensor | None  # int32: the copies of each expert in turns; None: it is the one copy


@dataclass(frozen=True, slots=True)
class Routing:
    """How logits of experts become weights of the chosen ones."""

    score: Literal["softmax", "sigmoid"]  # softmax: over all experts, before any is chosen
    renormalise: bool  # the weights of the chosen ones are divided by their sum
    scale: float = 1.0  # multiplies the weights, last
    num_groups: int = 1  # of consecutive experts, equally many each
    chosen_groups: int = 1  # experts are chosen in this many groups alone
    # Behind all experts is one that every token goes to, last: with a weight of 1, or of the
    # sigmoid of a logit behind those of the others.
    shared: Literal["none", "whole", "gated"] = "none"

    @property
    def has_shared(self) -> bool:
        return self.shared != "none"


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Pairs of this rank's experts, sorted by expert, then by pair; and tiles that cover them.

    X in pair_of_X is T * K: what the experts of other ranks leave is a tail of -1. X of the tiles
    is `most_tiles`, which the host knows: those from num_tiles_1 on are dead, and hold -1. Experts
    are counted from this rank's first. All tensors are int32.
    """

    pair_of_X: Tensor  # of a sorted row
    row_of_TK: Tensor  # the sorted row of a pair, or -1 if its expert is another rank's
    starts_E1: (
        Tensor  # the sorted row at which each expert starts, and behind the last: where it ends
    )
    tile_expert_X: Tensor
    tile_start_X: Tensor  # its first sorted row; it ends after `tile` rows, or with its expert
    num_tiles_1: Tensor
    tile: int


class Chosen(NamedTuple):
    """Pairs as they are, a tile each: of so few tokens that they hardly share an expert.

    All experts are this rank's.
    """

    experts_TK: Tensor
    row_of_TK: None = None  # the pair's own number
    tile: int = 16  # rows that a product takes at least


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    num_chosen: int,
    rule: Routing,
    uniform: Uniform | None = None,
    placed: Placed | None = None,
) -> tuple[Tensor, Tensor]:
    """weights_TK float32 and experts_TK int32, the best first; everything in float32.

    The largest scores + bias are chosen, of equal ones the lower expert; weights are of scores
    without bias. A group's score is the sum of its two best biased scores. `uniform`: chosen by a
    hash of slot, position, layer and expert instead, for measurements. Logits with a NaN choose any
    distinct experts, and at least one weight of theirs is NaN. `placed`: experts_TK has copies,
    which are counted; and -1 for all that a token of nobody chose. A shared expert is one more,
    which nobody counts.
    """
    logits_TE = logits_TE.float()
    shared_T1 = torch.ones_like(logits_TE[:, :1])
    if rule.shared == "gated":
        logits_TE, shared_T1 = logits_TE[:, :-1], logits_TE[:, -1:].sigmoid()
    num_experts = logits_TE.shape[1]
    scores_TE = logits_TE.sigmoid() if rule.score == "sigmoid" else logits_TE.softmax(-1)
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
    """Which copy a token goes to follows from where its key goes, so all ranks say the same."""
    slot_mapping_T, tokens_X, copies_EX = placed
    copies_TK = experts_TK.int()
    if copies_EX is not None:
        turns_T = shift_right(mix(slot_mapping_T), 40) % copies_EX.shape[1]
        copies_TK = copies_EX[experts_TK, turns_T[:, None]]
    is_ours_T1 = (slot_mapping_T > 0)[:, None]
    tokens_X.index_add_(0, copies_TK.flatten(), is_ours_T1.expand_as(copies_TK).flatten().long())
    return copies_TK.where(is_ours_T1, -1)


def in_best_groups(ranked_TE: Tensor, rule: Routing) -> Tensor:
    """Experts outside of the best groups get -inf."""
    if rule.num_groups == 1:
        return ranked_TE
    ranked_TXE = ranked_TE.unflatten(1, (rule.num_groups, -1))
    groups_TX = ranked_TXE.topk(min(2, ranked_TXE.shape[2]), -1).values.sum(-1)
    best_TX = groups_TX.sort(dim=-1, descending=True, stable=True).indices[:, : rule.chosen_groups]
    is_out_TX = torch.ones_like(groups_TX, dtype=torch.bool).scatter(1, best_TX, value=False)
    return ranked_TXE.masked_fill(is_out_TX[:, :, None], -torch.inf).flatten(1)


def sort_rows(experts_TK: Tensor, first_expert: int, num_experts: int, tile: int) -> ExpertRows:
    """Pairs of the experts [first_expert, first_expert + num_experts): this rank's."""
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
    """Tiles that may be needed, however pairs fall on experts; at least 1."""
    num_used = min(num_pairs, num_experts)
    return max(1, num_used + (num_pairs - num_used) // tile)
