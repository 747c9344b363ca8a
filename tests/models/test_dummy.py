"""Random weights of a fixed scale, which depend on the seed and not on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanovllm.config import Load
from nanovllm.models.dummy import fill_random
from nanovllm.models.weights import destinations
from nanovllm.parallel.mesh import Mesh
from tests.models.steps import load
from tests.models.test_stacked import RULES, D, Model, spans
from tests.models.tiny import make_tiny


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_dummy_weights_are_the_same_over_any_number_of_ranks(
    tp: int, tied: bool, tmp_path: Path
) -> None:
    make_tiny(tmp_path, "qwen3", vocab_size=5003, tie_word_embeddings=tied)
    how = Load(format="dummy", seed=3)
    whole = load(tmp_path, how=how)
    for rank in range(tp):
        mesh = Mesh(rank, tp)
        model = load(tmp_path, mesh, how=how)
        for name, share in destinations(model, model.WEIGHTS).items():
            into = destinations(whole, whole.WEIGHTS)[name].into
            assert torch.equal(share.into, into.narrow(share.dim, share.start, share.count)), name


def test_dummy_weights_come_from_the_seed(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    one, same, other = (
        dict(load(tmp_path, how=Load(format="dummy", seed=seed)).named_parameters())
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert torch.equal(one["layers.0.attn.q_norm"], torch.ones(16))
    assert torch.equal(one["norm.weight"], torch.ones(64))
    for name, weight in one.items():
        if weight.ndim == 2:
            scale = weight.std() * weight.shape[1] ** 0.5
            assert 0.95 < scale < 1.05, f"{name} is scaled by {scale:.2f}"


@pytest.mark.parametrize("tp, ep", [(2, 1), (4, 1), (3, 3), (2, 2)])
def test_experts_are_the_same_over_any_number_of_ranks(tp: int, ep: int) -> None:
    def drawn(rank: int, tp: int, ep: int) -> Model:
        model = Model(2, *spans(rank, tp, ep), D)
        fill_random(destinations(model, RULES), seed=1)
        return model

    everything = drawn(0, 1, 1)
    for rank in range(tp):
        model, (experts, inner) = drawn(rank, tp, ep), spans(rank, tp, ep)
        own = slice(experts.start, experts.start + experts.count)
        cut = slice(inner.start, inner.start + inner.count)
        for ours, theirs in zip(model.layers, everything.layers, strict=True):
            for part, expected in enumerate(theirs.experts.gate_up[own].chunk(2, 1)):
                assert torch.equal(ours.experts.gate_up.chunk(2, 1)[part], expected[:, cut])
            assert torch.equal(ours.experts.down, theirs.experts.down[own][..., cut])
            assert torch.equal(ours.router, theirs.router)
    all_weights = torch.stack([layer.experts.gate_up for layer in everything.layers])
    assert len(all_weights.unique()) == all_weights.numel()
