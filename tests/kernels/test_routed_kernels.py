"""Routing, sorting, products and sums of experts in Triton, where check-kernels' cases are silent.

In Triton's interpreter, in a process of its own: TRITON_INTERPRET must be set before triton is
imported. The kernels are combine.py, expert_rows.py, experts.py and route.py; what they mean is
held to loops by test_experts_reference.py.
"""

from __future__ import annotations

import math
from dataclasses import fields
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st
from nanovllm_kernels import expert_rows, experts, route, route_reference
from nanovllm_kernels.route_reference import ExpertRows, Placed, Routing
from nanovllm_kernels.routed_cases import sort_inputs

from tests.interpreted import in_interpreter, in_parent, passes

CPU = torch.device("cpu")
SOFTMAX = Routing("softmax", renormalise=True)
SIGMOID = Routing("sigmoid", renormalise=True)
GROUPS = Routing("sigmoid", renormalise=False, scale=2.0, num_groups=4, chosen_groups=2)


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 19)


def assert_equal(found: ExpertRows, expected: ExpertRows) -> None:
    for field in fields(ExpertRows):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same, (field.name, one, other)


@in_interpreter
@pytest.mark.parametrize("rule", [SOFTMAX, SIGMOID, GROUPS], ids=["softmax", "sigmoid", "groups"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_any_logits_choose_different_experts(rule, bad) -> None:
    """All bad, one bad, every other one bad: no expert twice, and none that there is not."""
    logits_TE = torch.linspace(-3, 3, 20).repeat(4, 1)
    logits_TE[0], logits_TE[1, 7], logits_TE[2, ::2] = bad, bad, bad
    weights_TK, experts_TK = route.route(logits_TE, None, 6, rule)
    rows = expert_rows.sort_rows(experts_TK, 0, 20, 4)
    assert_equal(rows, route_reference.sort_rows(experts_TK, 0, 20, 4))
    assert all(len(set(row)) == 6 and set(row) <= set(range(20)) for row in experts_TK.tolist())
    assert weights_TK[3].isfinite().all()
    if math.isnan(bad):
        assert weights_TK[:3].isnan().any(1).all()


@in_interpreter
def test_of_equal_scores_the_lower_experts_are_chosen() -> None:
    """-0 and 0 are equal, and so are scores that are too small to tell from 0."""
    logits_TE = torch.tensor([[0.0, -0.0] * 4, [-500.0, -400.0, -300.0, 0.0] * 2])
    _, experts_TK = route.route(logits_TE, None, 4, SOFTMAX)
    assert experts_TK.tolist() == [[0, 1, 2, 3], [3, 7, 0, 1]]


@in_interpreter
@pytest.mark.parametrize("rule", [SOFTMAX, GROUPS], ids=["softmax", "groups"])
@pytest.mark.parametrize("has_copies", [False, True])
def test_copies_are_found_and_counted_as_defined(rule: Routing, has_copies: bool) -> None:
    """Of 20 experts, some have 2 copies or 3 on 3 ranks; every third token is nobody's."""
    logits_TE = torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
    at_T = torch.arange(64) * 37 % 1000
    at_T[::3] = 0
    copies: list[list[int]] = [[e, *range(20 + e, 30, 5)] for e in range(20)]
    turns_EX = torch.tensor([(each * 6)[:6] for each in copies], dtype=torch.int32)
    found = []
    for kernel in (route.route, route_reference.route):
        tokens_X = torch.full((30,), 2**33)
        placed = Placed(at_T, tokens_X, turns_EX if has_copies else None)
        found.append((kernel(logits_TE, None, 6, rule, None, placed)[1], tokens_X))
    (ours_TK, counts_X), (experts_TK, expected_X) = found
    assert torch.equal(ours_TK, experts_TK) and torch.equal(counts_X, expected_X)
    sorting = ours_TK, 10, 20, 4
    assert_equal(expert_rows.sort_rows(*sorting), route_reference.sort_rows(*sorting))
    assert (ours_TK[::3] == -1).all() and int((counts_X - 2**33).sum()) == 6 * int((at_T > 0).sum())
    assert {int(e) for e in ours_TK.unique()} > {-1, *range(10)}
    assert bool((counts_X[20:] > 2**33).all()) is has_copies


@in_interpreter
@settings(deadline=None, max_examples=25)
@given(
    T=st.sampled_from([1, 2, 31, 128, 129, 300]),
    E=st.sampled_from([3, 8, 40]),
    K=st.integers(1, 3),
    tile=st.sampled_from([1, 16, 64]),
    kind=st.sampled_from(["plain", "one", "few"]),
    data=st.data(),
)
def test_sorted_rows_equal_the_definition(T, E, K, tile, kind, data) -> None:
    first = data.draw(st.integers(0, E - 1))
    num_experts = data.draw(st.integers(1, E - first))
    args = sort_inputs(T, E, K, first, num_experts, tile, kind, CPU)
    expected = route_reference.sort_rows(*args)
    assert_equal(expert_rows.sort_rows(*args), expected)
    with patch.object(expert_rows, "COMPARED", 0):
        assert_equal(expert_rows.sort_rows(*args), expected)


@in_interpreter
def test_tiles_are_large_where_experts_have_many_rows() -> None:
    assert experts.tile_of(8, 128) == experts.tile_of(2047, 128) == experts.FEW
    assert experts.tile_of(2048, 128) == experts.MANY
