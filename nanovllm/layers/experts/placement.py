"""Places of a layer's routed experts on ranks, and the count of their tokens."""

from __future__ import annotations

from itertools import chain, cycle, islice

import torch
from nanovllm_kernels.experts.route_reference import Placed
from torch import Tensor

from nanovllm.experts import ExpertsByRank
from nanovllm.parallel.mesh import Span

TURNS = 24  # length of the rotation over an expert's replicas: a multiple of 1, 2, 3, 4, 6 and 8


class ExpertPlaces:
    """Replicas of routed experts, numbered over all ranks, those of rank 0 first.

    `own` is the span of this rank's replicas among all. `places` is the index of each expert among
    this rank's, or -1. Each rank has the same number of replicas.
    """

    def __init__(self, ranks: ExpertsByRank, rank: int, num_experts: int) -> None:
        held = ranks[rank]
        self.ranks = ranks
        self.own = Span(len(held) * len(ranks), len(held) * rank, len(held))
        local = {expert: index for index, expert in enumerate(held)}
        self.places = tuple(local.get(expert, -1) for expert in range(num_experts))
        self.tokens_X: Tensor | None = None
        self.copies_EX: Tensor | None = None

    def count(self, tokens_X: Tensor) -> None:
        """Start counting routed tokens per replica in `tokens_X`.

        Padding tokens are not counted. With a placement, routing also maps experts to replicas, by
        a table that is made here.
        """
        held = list(chain(*self.ranks))
        copies: list[list[int]] = [[] for _ in range(max(held) + 1)]
        for at, expert in enumerate(held):
            copies[expert].append(at)
        self.tokens_X = tokens_X
        if held != [*range(len(copies))]:
            turns = [list(islice(cycle(each), TURNS)) for each in copies]
            self.copies_EX = torch.tensor(turns, dtype=torch.int32, device=tokens_X.device)

    def placed(self, slot_mapping_T: Tensor) -> Placed:
        """Return the placement for tokens with these slot mappings. Call `count` first."""
        assert self.tokens_X is not None
        return Placed(slot_mapping_T, self.tokens_X, self.copies_EX)
