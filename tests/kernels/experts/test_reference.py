"""route_reference.py and reference.py equal loops over tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from nanovllm_kernels.experts.reference import EXPERTS, combine, expert_down, expert_gate_up
from nanovllm_kernels.experts.route_reference import Placed, Routing, most_tiles, route, sort_rows
from nanovllm_kernels.fp8_reference import BLOCK, Scaled
from torch import Tensor
from torch.nn import functional

SOFTMAX = Routing("softmax", renormalise=True)


def logits(T: int, E: int) -> Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(T * E))


def test_softmax_of_all_then_the_best_renormalised_or_not() -> None:
    logits_TE = logits(5, 7)
    scores_TE = logits_TE.softmax(-1)
    best = scores_TE.topk(3)
    weights_TK, experts_TK = route(
        logits_TE, None, 3, Routing("softmax", renormalise=False, scale=2)
    )
    assert experts_TK.tolist() == best.indices.tolist() and experts_TK.dtype == torch.int32
    torch.testing.assert_close(weights_TK, best.values * 2)
    weights_TK, _ = route(logits_TE.bfloat16(), None, 3, SOFTMAX)
    assert weights_TK.dtype == torch.float32
    torch.testing.assert_close(weights_TK.sum(-1), torch.ones(5))


def test_bias_chooses_and_does_not_weigh() -> None:
    logits_TE = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    bias_E = torch.tensor([5.0, 0.0, 0.0, 0.0])
    weights_TK, experts_TK = route(logits_TE, bias_E, 2, Routing("sigmoid", renormalise=True))
    assert experts_TK.tolist() == [[0, 3]]
    scores = torch.tensor([0.0, 3.0]).sigmoid()
    torch.testing.assert_close(weights_TK[0], scores / scores.sum())


def test_equal_scores_go_to_the_lower_expert() -> None:
    _, experts_TK = route(torch.zeros(2, 6), None, 3, SOFTMAX)
    assert experts_TK.tolist() == [[0, 1, 2]] * 2


def test_groups_are_chosen_by_their_two_best() -> None:
    logits_TE = torch.tensor([[9.0, -9.0, -9.0, 2.0, 2.0, 1.0, 3.0, -9.0, -9.0]])
    rule = Routing("sigmoid", renormalise=False, num_groups=3, chosen_groups=1)
    _, experts_TK = route(logits_TE, None, 2, rule)
    assert experts_TK.tolist() == [[3, 4]]  # 0.88 * 2 is more than 1 + 0 and 0.95 + 0


def test_a_shared_expert_is_the_last_of_every_token() -> None:
    """A shared expert is the last of each token, and does not change the other weights.

    Padding tokens are routed to no expert, and the shared expert is not counted.
    """
    logits_TE = logits(3, 5)
    weights_TK, experts_TK = route(logits_TE, None, 2, SOFTMAX)
    whole, gated = (replace(SOFTMAX, shared=kind) for kind in ("whole", "gated"))
    counts_X = torch.zeros(5, dtype=torch.int64)
    placed = Placed(torch.tensor([7, 0, 9]), counts_X, None)
    found, chosen = route(logits_TE, None, 2, whole, None, placed)
    assert torch.equal(found, torch.cat([weights_TK, torch.ones(3, 1)], 1))
    assert chosen.tolist() == [[*experts_TK[0], 5], [-1, -1, -1], [*experts_TK[2], 5]]
    assert counts_X.sum() == 4
    gate_T1 = torch.tensor([[0.5], [-3.0], [80.0]])
    found, chosen = route(torch.cat([logits_TE, gate_T1], 1), None, 2, gated)
    assert torch.equal(found, torch.cat([weights_TK, gate_T1.sigmoid()], 1))
    assert torch.equal(chosen[:, :2], experts_TK) and chosen[:, 2].tolist() == [5, 5, 5]


def test_a_nan_chooses_distinct_experts_and_shows() -> None:
    logits_TE = logits(2, 5)
    logits_TE[1, 2] = torch.nan
    weights_TK, experts_TK = route(logits_TE, None, 3, SOFTMAX)
    assert len(set(experts_TK[1].tolist())) == 3 and weights_TK[1].isnan().any()
    assert weights_TK[0].isfinite().all()


def test_uniform_routing_is_a_function_of_slot_position_and_layer() -> None:
    T, E, K = 4000, 16, 4
    positions_T = torch.arange(T, dtype=torch.int32)
    slots_T = torch.full((T,), 3)
    logits_TE = torch.zeros(T, E)
    logits_TE[:, 0] = 50  # scores would choose one expert alone
    weights_TK, experts_TK = route(logits_TE, None, K, SOFTMAX, (slots_T, positions_T, 1))
    loads_E = experts_TK.flatten().bincount(minlength=E)
    assert int(loads_E.min()) > 900 and int(loads_E.max()) < 1100  # 1000 each
    assert all(len(set(row)) == K for row in experts_TK.tolist())
    again = route(logits_TE[7:8], None, K, SOFTMAX, (slots_T[:1], positions_T[7:8], 1))
    assert torch.equal(again[1][0], experts_TK[7]) and torch.equal(again[0][0], weights_TK[7])
    other = route(logits_TE, None, K, SOFTMAX, (slots_T, positions_T, 2))
    assert (other[1] == experts_TK).all(-1).float().mean() < 0.01


@pytest.mark.parametrize(("first", "count"), [(0, 6), (2, 3), (5, 1)])
@pytest.mark.parametrize("tile", [1, 4, 64])
def test_sorted_rows(first: int, count: int, tile: int) -> None:
    experts_TK = torch.tensor([[0, 3], [3, 5], [1, 3], [4, 3], [3, 0]], dtype=torch.int32)
    rows = sort_rows(experts_TK, first, count, tile)
    pairs = [
        [pair for pair, expert in enumerate(experts_TK.flatten().tolist()) if expert == first + own]
        for own in range(count)
    ]
    flat = [*chain.from_iterable(pairs)]
    assert rows.pair_of_X.tolist() == flat + [-1] * (10 - len(flat))
    row_of = [flat.index(pair) if pair in flat else -1 for pair in range(10)]
    assert rows.row_of_TK.flatten().tolist() == row_of and rows.row_of_TK.shape == (5, 2)
    starts = [sum(map(len, pairs[:own])) for own in range(count + 1)]
    assert rows.starts_E1.tolist() == starts
    tiles = [
        (own, start) for own in range(count) for start in range(starts[own], starts[own + 1], tile)
    ]
    dead = [-1] * (most_tiles(10, count, tile) - len(tiles))
    assert rows.num_tiles_1.tolist() == [len(tiles)] and rows.tile == tile
    assert rows.tile_expert_X.tolist() == [own for own, _ in tiles] + dead
    assert rows.tile_start_X.tolist() == [start for _, start in tiles] + dead


def test_most_tiles_is_reached_and_never_passed() -> None:
    for num_pairs, num_experts, tile in [(1, 8, 4), (9, 3, 4), (10, 3, 4), (64, 4, 16), (5, 9, 1)]:
        generator = torch.Generator().manual_seed(0)
        found = 0
        for _ in range(200):
            experts = torch.randint(num_experts, (num_pairs, 1), generator=generator)
            found = max(found, int(sort_rows(experts, 0, num_experts, tile).num_tiles_1))
        assert found == most_tiles(num_pairs, num_experts, tile)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(("first", "count"), [(0, 5), (1, 3)])
def test_products(first: int, count: int, is_fp8: bool) -> None:
    T, D, F, K = 9, 160, 136, 2
    generator = torch.Generator().manual_seed(0)
    gate_up_E2FD = torch.randn(5, 2 * F, D, generator=generator) * D**-0.5
    down_EDF = torch.randn(5, D, F, generator=generator) * F**-0.5
    scales: tuple[Tensor | None, Tensor | None] = None, None
    if is_fp8:
        gate_up_E2FD, down_EDF = (
            gate_up_E2FD.to(torch.float8_e4m3fn),
            down_EDF.to(torch.float8_e4m3fn),
        )
        scales = torch.rand(5, 4, 2, generator=generator), torch.rand(5, 2, 2, generator=generator)
    x_TD, residual_TD = (torch.randn(T, D, generator=generator) for _ in range(2))
    weights_TK, experts_TK = route(logits(T, 5), None, K, SOFTMAX)
    rows = sort_rows(experts_TK, first, count, EXPERTS.tile(T * K, count))
    ours = slice(first, first + count)
    scale_gate_up, scale_down = (None if s is None else s[ours] for s in scales)
    y_XF = expert_gate_up(x_TD, gate_up_E2FD[ours], scale_gate_up, rows, K)
    y_XD = expert_down(y_XF, down_EDF[ours], scale_down, rows, K)
    actual = combine(y_XD, weights_TK, rows.row_of_TK, x_TD, residual_TD)

    expected = x_TD + residual_TD
    for t in range(T):
        for weight, expert in zip(weights_TK[t], experts_TK[t].tolist(), strict=True):
            if expert in range(first, first + count):
                gate_up_XD, down_DF = gate_up_E2FD[expert].float(), down_EDF[expert].float()
                if scales[0] is not None and scales[1] is not None:
                    halves = zip(gate_up_XD.chunk(2), scales[0][expert].chunk(2), strict=True)
                    gate_up_XD = torch.cat([Scaled(w, s).dequantised() for w, s in halves])
                    down_DF = Scaled(down_DF, scales[1][expert]).dequantised()
                gate, up = (gate_up_XD @ x_TD[t]).chunk(2)
                expected[t] += weight * (down_DF @ (functional.silu(gate) * up))
    torch.testing.assert_close(actual, expected)


def test_a_scale_is_of_a_block_of_128_by_128() -> None:
    weight_XX = torch.ones(130, 260).to(torch.float8_e4m3fn)
    found = Scaled(weight_XX, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).dequantised()
    assert BLOCK == 128 and found.dtype == torch.float32
    assert [found[i, j].item() for i, j in ((127, 127), (127, 128), (128, 255), (129, 256))] == [
        1.0, 2.0, 5.0, 6.0,
    ]  # fmt: skip
