"""Routed experts: selection of products, uniform routing, and memory traffic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from nanovllm_kernels.experts import route_reference
from nanovllm_kernels.experts.reference import EXPERTS, ExpertProducts
from nanovllm_kernels.experts.route_reference import Routing
from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.config import Kernels, load_config
from nanovllm.layers.describe import products
from nanovllm.layers.expert_products import TORCH
from nanovllm.layers.experts.moe import Mixture, MoE
from nanovllm.layers.experts.products import ExpertMLPs, weight_traffic
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Pending, Residual
from nanovllm.parallel.mesh import Mesh, Span
from nanovllm.runner.build import build
from tests.models.steps import CPU, Steps, load
from tests.models.test_parity import LENGTHS, SCHEDULES, our_logits, prompts
from tests.models.tiny import CASES, make_tiny

NO_ROWS = ForwardContext(None, None)  # type: ignore[arg-type]

D, E, F, K = 24, 5, 12, 2
RULE = Routing("softmax", renormalise=True)
OPS = select_ops(Kernels(), CPU)


def moe(
    ops: Ops = OPS,
    mesh: Mesh = Mesh(),
    *,
    exact: bool = False,
    shared: int = 0,
    gated: bool = False,
) -> MoE:
    torch.manual_seed(0)
    mixture = Mixture(
        hidden_size=D,
        experts=("num_experts", E),
        inner=("moe_intermediate_size", F),
        num_chosen=K,
        rule=RULE,
        exact=exact,
        shared=shared,
        gates_shared=gated,
    )
    made = MoE(mixture, eps=1e-6, layer=0, is_last=False, mesh=mesh, ops=ops)
    for parameter in made.parameters():
        parameter.data.normal_()
    return made


def run(block: MoE, residual: Residual) -> Residual:
    return block(residual, NO_ROWS)  # type: ignore[no-any-return]


def test_what_is_pending_is_added_before_and_the_result_behind() -> None:
    x_TD, update_TD = torch.randn(2, 7, D)
    block = moe()
    pending, added = (
        run(block, residual)
        for residual in (Pending(x_TD.clone(), update_TD.clone()), Added(x_TD + update_TD))
    )
    assert isinstance(pending, Added) and isinstance(added, Added)
    torch.testing.assert_close(pending.stream_TD, added.stream_TD)
    assert (added.stream_TD - x_TD - update_TD).abs().max() > 0.1


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_is_one_of_the_experts_or_an_mlp(gated: bool) -> None:
    """It is one of the experts if it has their width."""
    whole, apart = moe(shared=F, gated=gated), moe(shared=2 * F, gated=gated)
    assert whole.shared is None and whole.experts.gate_up.shape == (E + 1, 2 * F, D)
    assert whole.router.weight.shape == (8 if gated else E, D)
    assert apart.shared is not None and apart.experts.gate_up.shape == (E, 2 * F, D)
    gate_up, down = apart.shared.gate_up, apart.shared.down.weight
    gate_up.norm_weight.data.copy_(whole.norm_weight)
    apart.router.weight.data.copy_(whole.router.weight)
    apart.experts.gate_up.data.copy_(whole.experts.gate_up[:E])
    apart.experts.down.data.copy_(whole.experts.down[:E])
    # Twice the width; the other half is zero.
    halves = whole.experts.gate_up[E].unflatten(0, (2, F))
    gate_up.weight.data.copy_(torch.nn.functional.pad(halves, (0, 0, 0, F)).flatten(0, 1))
    down.data.copy_(torch.nn.functional.pad(whole.experts.down[E], (0, F)))
    x_TD = torch.randn(7, D)
    found, expected = (run(block, Added(x_TD.clone())) for block in (whole, apart))
    torch.testing.assert_close(found.stream_TD, expected.stream_TD, rtol=1e-5, atol=1e-4)
    assert whole.experts.num_chosen == K + 1 == apart.experts.num_chosen + 1


def test_only_an_exact_router_is_float32_in_a_model_of_bfloat16() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        exact, plain = moe(exact=True), moe()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (exact.router.weight.dtype, plain.router.weight.dtype) == (torch.float32, torch.bfloat16)
    assert exact.bias is not None and exact.bias.dtype == torch.float32 and plain.bias is None
    assert exact.experts.gate_up.dtype == torch.bfloat16
    logits_TE = exact.router.product(torch.randn(3, D, dtype=torch.bfloat16))
    assert logits_TE.dtype == torch.float32
    after = run(exact, Added(torch.randn(3, D, dtype=torch.bfloat16)))
    assert isinstance(after, Added) and after.stream_TD.dtype == torch.bfloat16


def test_many_rows_have_products_of_their_own() -> None:
    """The pairs that a rank expects decide: half of the experts need twice the tokens."""
    asked: list[tuple[int, int]] = []

    def tile(num_pairs: int, num_experts: int) -> int:
        asked.append((num_pairs, num_experts))
        return 4

    many = ExpertProducts(
        Mock(wraps=EXPERTS.gate_up), EXPERTS.down, tile, lambda n, _: n >= 12, "grouped"
    )
    kernels, all_inner = TORCH._replace(many=(many,)), Span(F, 0, F)
    whole = ExpertMLPs(D, Span(E, 0, E), all_inner, K, RULE, kernels, (*range(E),))
    places = -1, -1, -1, 0, 1, 2
    half = ExpertMLPs(D, Span(6, 3, 3), all_inner, K, RULE, kernels, places)
    assert [whole.by_rows[n].name for n in (5, 6)] == ["torch", "grouped"]
    assert [half.by_rows[n].name for n in (11, 12)] == ["torch", "grouped"]
    x_TD, logits_TE = torch.randn(12, D), torch.randn(12, 6)
    plain = ExpertMLPs(D, Span(6, 3, 3), all_inner, K, RULE, TORCH, places)
    for experts in (half, plain):
        experts.gate_up.data = torch.ones(3, 2 * F, D) * torch.arange(3.0)[:, None, None]
        experts.down.data = torch.ones(3, D, F)
    found, expected = (one(x_TD, *one.route(logits_TE, None, None)) for one in (half, plain))
    torch.testing.assert_close(found, expected)
    assert asked[-1] == (12, 3) and many.gate_up.call_count == 1  # type: ignore[attr-defined]


def test_the_log_says_which_products_run() -> None:
    many = replace(EXPERTS, fits=lambda n, _: n >= 12, name="grouped")
    block = moe(replace(OPS, experts=TORCH._replace(many=(many,))))
    said = products(block, block.router, [1, 5, 6, 100])
    assert said == "router library 1-100; experts torch 1-5, grouped 6-100; head library 1-100"


# -- uniform routing -----------------------------------------------------------------------------


def chosen_in(folder: Path, counts: list[tuple[int, int]]) -> list[Tensor]:
    """Return the chosen experts of each layer and step."""
    found: list[Tensor] = []

    def route(*args: object, **named: object) -> tuple[Tensor, Tensor]:
        chosen = route_reference.route(*args, **named)  # type: ignore[arg-type]
        found.append(chosen[1])
        return chosen

    experts = TORCH._replace(route=route, is_uniform=True)
    steps = Steps(folder, load(folder, ops=replace(OPS, experts=experts)), prompts(), Mesh())
    our_logits(steps, counts)  # type: ignore[arg-type]
    return found


def test_uniform_routing_follows_slot_position_and_layer_alone(tmp_path: Path) -> None:
    """The choice does not depend on how a prompt is cut into steps.

    After the last attention only sampled tokens continue; here all of them do, in reverse.
    """
    family, overrides = CASES["qwen3_moe"]
    make_tiny(tmp_path, family, **overrides)
    (first, last), later = (chosen_in(tmp_path, SCHEDULES[name]) for name in ("whole", "decode"))
    assert len(first) == len(last) == sum(LENGTHS) and first.shape == last.shape
    slots_T = torch.tensor([0] * LENGTHS[0] + [1] * LENGTHS[1])
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    logits_TE = torch.zeros(sum(LENGTHS), 5)
    for layer, found in enumerate((first, last.flip(0))):
        where = slots_T, positions_T, layer
        expected = route_reference.route(logits_TE, None, 3, RULE, where)[1]
        assert torch.equal(found, expected)
    assert not torch.equal(first, last.flip(0))
    assert torch.equal(later[2], first[[30, 33 + 26]])  # the first decoded tokens
    loads_E = first.flatten().bincount(minlength=5)
    assert int(loads_E.min()) > 0.5 * sum(LENGTHS) * 3 / 5


def test_a_recipe_asks_for_uniform_routing(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_moe", **CASES["qwen3_moe"][1])
    dummy = ["device=cpu", "load.format=dummy", "cache.pages=20", "server.max_model_tokens=32"]
    for routing, is_uniform in (("auto", False), ("uniform", True)):
        config = load_config(str(tmp_path), [*dummy, f"experts.routing={routing}"])
        model = build(config).runner.model
        assert model.layers[0].mlp.experts.kernels.is_uniform is is_uniform  # type: ignore[union-attr]


# -- memory traffic of a step ---------------------------------------------------------------------


@pytest.mark.parametrize("fuses_gate", [True, False])
def test_elements_of_a_token(fuses_gate: bool) -> None:
    """Per pair F and D elements and its list entries; per token the logits and the result."""
    assert moe().elements(0, fuses_gate=fuses_gate) == K * (F + D + 8) + E + D


def test_a_step_reads_the_experts_that_are_chosen() -> None:
    block = moe()
    expert, others = 3 * F * D, D + E * D
    assert weight_traffic(block, 1) == (4 * (others + K * expert), others + K * expert)
    num_bytes, used = weight_traffic(block, 3)
    share = 1 - (1 - K / E) ** 3  # average share of experts that three tokens choose
    assert num_bytes == pytest.approx(4 * (others + share * E * expert))
    assert used == others + K * expert
    assert weight_traffic(block, 10_000)[0] == pytest.approx(4 * (others + E * expert))
