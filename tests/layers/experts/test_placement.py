"""Places of experts on ranks, and the tables of their replicas."""

from __future__ import annotations

import torch

from nanovllm.experts import evenly
from nanovllm.layers.experts.placement import TURNS, ExpertPlaces
from nanovllm.parallel.mesh import Span


def test_equal_shares_need_no_table() -> None:
    places = ExpertPlaces(evenly(6, 2), 1, 6)
    assert places.own == Span(6, 3, 3) and places.places == (-1, -1, -1, 0, 1, 2)
    tokens_X, slots_T = torch.zeros(6, dtype=torch.int64), torch.arange(2)
    places.count(tokens_X)
    placed = places.placed(slots_T)
    assert placed.slot_mapping_T is slots_T and placed.tokens_X is tokens_X
    assert placed.copies_EX is None


def test_replicas_of_an_expert_take_turns() -> None:
    places = ExpertPlaces([[0, 2, 3], [1, 3, 0]], 0, 4)
    assert places.own == Span(6, 0, 3) and places.places == (0, -1, 1, 2)
    places.count(torch.zeros(6, dtype=torch.int64))
    copies_EX = places.placed(torch.arange(2)).copies_EX
    assert copies_EX is not None and copies_EX.shape == (4, TURNS)
    assert copies_EX.dtype == torch.int32
    assert copies_EX[:, :3].tolist() == [[0, 5, 0], [3, 3, 3], [1, 1, 1], [2, 4, 2]]
