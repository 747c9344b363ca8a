"""Loading experts' tensors into stacked parameters: selection and slicing by rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nanovllm.layers.linear import Placement, parameter
from nanovllm.models.decoder import Rule
from nanovllm.models.weights import destinations
from nanovllm.parallel.mesh import Mesh, Span
from tests.times import done_within

E, F, D = 6, 8, 5
RULES: tuple[Rule, ...] = (
    ("model.layers.{}.mlp.experts.{}.gate_proj.weight", "layers.{}.experts.gate_up", "gate"),
    ("model.layers.{}.mlp.experts.{}.up_proj.weight", "layers.{}.experts.gate_up", "up"),
    ("model.layers.{}.mlp.experts.{}.down_proj.weight", "layers.{}.experts.down"),
    ("model.layers.{}.mlp.gate.weight", "layers.{}.router"),
)


class Experts(nn.Module):
    def __init__(self, experts: Span, inner: Span, hidden_size: int) -> None:
        super().__init__()
        self.gate_up = parameter(experts.count, 2 * inner.count, hidden_size)
        self.down = parameter(experts.count, hidden_size, inner.count)
        self.placements = {
            "gate_up": Placement(0, (("gate", inner), ("up", inner)), places_of(experts)),
            "down": Placement(1, (("", inner),), places_of(experts)),
        }


def places_of(experts: Span) -> tuple[int, ...]:
    """Return each expert's index on a rank, or -1."""
    own = range(experts.start, experts.start + experts.count)
    return tuple(e - experts.start if e in own else -1 for e in range(experts.full))


class Layer(nn.Module):
    def __init__(self, experts: Span, inner: Span, hidden_size: int) -> None:
        super().__init__()
        self.router = parameter(experts.full, hidden_size)
        self.experts = Experts(experts, inner, hidden_size)


class Model(nn.Module):
    def __init__(self, num_layers: int, experts: Span, inner: Span, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts, inner, hidden_size) for _ in range(num_layers))


def spans(rank: int, tp: int, ep: int) -> tuple[Span, Span]:
    """Return the experts and the inner elements of a rank."""
    if ep > 1:
        return Mesh(rank, tp).span("num_experts", E), Span(F, 0, F)
    return Span(E, 0, E), Mesh(rank, tp).span("intermediate_size", F)


def checkpoint() -> dict[str, Tensor]:
    """Return tensors in which all elements are different."""
    shapes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    found, at = {}, 0
    for layer in range(2):
        of_layer = {
            f"experts.{e}.{name}": shape for e in range(E) for name, shape in shapes.items()
        }
        for name, (rows, columns) in {**of_layer, "gate": (E, D)}.items():
            values = torch.arange(at, at + rows * columns, dtype=torch.float32)
            found[f"model.layers.{layer}.mlp.{name}.weight"] = values.view(rows, columns)
            at += rows * columns
    return found


@pytest.mark.parametrize("tp, ep", [(1, 1), (2, 1), (4, 1), (2, 2), (3, 3), (6, 6)])
def test_every_rank_keeps_its_slice_of_its_experts(tp: int, ep: int) -> None:
    tensors = checkpoint()
    for rank in range(tp):
        experts, inner = spans(rank, tp, ep)
        model = Model(2, experts, inner, D)
        model.requires_grad_(requires_grad=False)
        wanted = destinations(model, RULES)
        assert wanted.keys() == tensors.keys()
        for name, to in wanted.items():
            to.into.copy_(tensors[name].narrow(to.dim, to.start, to.count))
        own = range(experts.start, experts.start + experts.count)
        cut = slice(inner.start, inner.start + inner.count)
        for number, layer in enumerate(model.layers):
            of = f"model.layers.{number}.mlp"
            for at, e in enumerate(own):
                gate, up, down = (
                    tensors[f"{of}.experts.{e}.{part}_proj.weight"]
                    for part in ("gate", "up", "down")
                )
                assert torch.equal(layer.experts.gate_up[at], torch.cat([gate[cut], up[cut]]))
                assert torch.equal(layer.experts.down[at], down[:, cut])
            assert torch.equal(layer.router, tensors[f"{of}.gate.weight"])
        for e in set(range(E)) - set(own):
            assert wanted[f"model.layers.1.mlp.experts.{e}.up_proj.weight"].count == 0


def test_rules_without_an_expert_do_not_fill_experts() -> None:
    rules = (*RULES[:2], ("model.layers.{}.mlp.down.weight", "layers.{}.experts.down"), RULES[3])
    with pytest.raises(
        AssertionError, match=r"down\.weight does not fill layers\.0\.experts\.down"
    ):
        destinations(Model(1, Span(E, 0, E), Span(F, 0, F), D), rules)
    with pytest.raises(AssertionError, match=r"WEIGHTS does not fill layers\.0\.experts\.gate_up"):
        destinations(Model(1, Span(E, 0, E), Span(F, 0, F), D), RULES[1:])


def test_a_hundred_thousand_tensors_are_planned_at_once() -> None:
    """MiniMax-M2 has 96,103 tensors, half of them scales."""
    with torch.device("meta"):
        model = Model(130, Span(256, 64, 64), Span(16, 0, 16), 8)
    wanted = done_within(3, lambda: destinations(model, RULES))  # 1 s
    assert len(wanted) == 130 * (3 * 256 + 1)
