"""Draft heads with requests of all kinds, on one rank and on several: the text is the plain one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

from nanovllm.config import Config, Speculate
from nanovllm.experts import Experts, write_placement
from nanovllm.parallel import gloo
from nanovllm.parallel.places import RankLostError
from nanovllm.spec.base import DraftStep
from nanovllm.spec.model_drafter import ModelDrafter
from tests.engine.test_ranks import SMALL, cut, ranked, text_of
from tests.models.heads import eagle3_tensors, save_head
from tests.models.test_mtp import make_mtp
from tests.models.tiny import HYBRID, M2, NEXT, V3, config_of, make_tiny
from tests.whole_engine import WholeEngine

VOCABULARY = 5003  # three blocks on two ranks


def eagle3(folder: Path, family: str) -> tuple[Config, Speculate]:
    overrides = dict(M2, num_local_experts=10) if family == "minimax_m2" else {}
    make_tiny(folder / "own", family, vocab_size=VOCABULARY, num_hidden_layers=5, **overrides)
    fields = dict(vocab_size=VOCABULARY, draft_vocab_size=600)
    save_head(folder / "head", eagle3_tensors(**fields), **fields)
    speculate = Speculate(method="eagle3", model=str(folder / "head"), tokens=2, adapt=False)
    return config_of(folder / "own"), speculate


def mtp(folder: Path, family: str) -> tuple[Config, Speculate]:
    layers = dict(num_hidden_layers=2, full_attention_interval=2)  # one of each kind
    overrides = dict(NEXT, num_experts=10, **layers)
    if family == "qwen3_5_text":
        overrides = dict(HYBRID, **layers)
    if family == "deepseek_v3":
        overrides = dict(V3, n_routed_experts=10, n_group=5)
    make_mtp(folder, family, vocab_size=VOCABULARY, **overrides)
    return config_of(folder), Speculate(method="mtp", tokens=2, adapt=False)


@pytest.mark.parametrize(
    ("make", "family", "cuts"),
    [
        (eagle3, "qwen3", [(2, 1)]),
        (eagle3, "minimax_m2", [(2, 2), (1, 2)]),
        (mtp, "deepseek_v3", [(2, 1), (1, 2)]),
        (mtp, "qwen3_next", [(1, 2), (2, 2)]),
        (mtp, "qwen3_5_text", [(2, 1)]),
        (mtp, "qwen3_5_moe_text", [(1, 2)]),
    ],
)
def test_texts_of_all_kinds_are_those_without_drafts(
    make, family: str, cuts: list[tuple[int, int]], tmp_path: Path
) -> None:
    """There are masks, logprobs, penalties, prefix hits and preemptions.

    `cuts` are pairs of tensor-parallel and expert-parallel sizes.
    """
    config, speculate = make(tmp_path, family)
    expected = text_of(WholeEngine(config, **SMALL))
    alone = WholeEngine(config, speculate=speculate, **SMALL)
    assert text_of(alone) == expected
    stats = alone.scheduler.stats()
    assert stats.num_drafts > 50
    for tp, ep in cuts:
        folder = tmp_path / f"{tp} {ep}"
        folder.mkdir()
        with ranked(cut(config, 1, ep), tp, folder, speculate=speculate, **SMALL) as engine:
            assert text_of(engine) == expected
            other = engine.scheduler.stats()
            if tp == 1:  # two lanes have other steps, and the steps limit the drafts
                assert other.num_drafts > 50
                continue
            assert stats.accepted_tokens == other.accepted_tokens
            assert stats.draft_tokens == other.draft_tokens


@pytest.mark.parametrize("tp", [2, 1])
def test_copies_of_the_experts_of_mtp(tp: int, tmp_path: Path) -> None:
    """Its layer is counted after the target's, and placed by the same file, also over lanes."""
    config, speculate = mtp(tmp_path, "deepseek_v3")
    alone = WholeEngine(config, speculate=speculate, **SMALL)
    expected = text_of(alone)
    load = alone.runner.expert_load(wait=True)
    assert load is not None and load.layers == [1, 2]
    file = tmp_path / "placement"
    write_placement(load.lines(), file, 2, 2)
    recipe = replace(config.recipe, experts=Experts(placement=str(file)))
    there = cut(replace(config, recipe=recipe), 1, 2)
    with ranked(there, tp, tmp_path, speculate=speculate, **SMALL) as engine:
        assert text_of(engine) == expected
        head: Any = engine.runner.draft_model
        moe = head.layers[0].mlp
        assert len(moe.places.ranks) == 2 and len(moe.experts.gate_up) == 7


def test_a_lane_at_the_end_of_its_context_keeps_step_with_the_other(tmp_path: Path) -> None:
    """Its last rows have no room for drafts, while the other lane drafts 2 tokens a step."""
    config, speculate = mtp(tmp_path, "deepseek_v3")
    longest = 90
    asks = [
        ([*range(5, 80)], longest - 75),
        ([7, 8, 9], longest - 3),
        ([11] * 88, 2),
        ([12] * 4, 50),
    ]

    def served(engine: WholeEngine) -> dict[int, list[int]]:
        for i, (prompt, max_new) in enumerate(asks):
            engine.submit(i, prompt, max_new)
        engine.run()
        return engine.text

    sizes = dict(slots=2, step_tokens=100, max_tokens=longest)
    expected = served(WholeEngine(config, **sizes))
    with ranked(cut(config, 1, 2), 1, tmp_path, speculate=speculate, **sizes) as engine:
        assert served(engine) == expected
        assert [len(expected[i]) for i in range(4)] == [max_new for _, max_new in asks]
        assert engine.scheduler.stats().draft_tokens > 100


def test_a_lane_that_skips_a_pass_of_drafts_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other lane waits for it in an exchange of experts, for a limited time."""
    propose = ModelDrafter.propose

    def skipping(drafter: Any, step: DraftStep) -> Tensor:
        skips = drafter.model.layers[0].mlp.exchange.mesh.lane == 1
        return propose(drafter, dataclasses.replace(step, proposes=False) if skips else step)

    config, speculate = mtp(tmp_path, "deepseek_v3")
    sizes = dict(slots=2, step_tokens=100, max_tokens=90)
    with ranked(cut(config, 1, 2), 1, tmp_path, speculate=speculate, **sizes) as engine:
        monkeypatch.setattr(gloo, "EXCHANGE_S", 1.0)
        monkeypatch.setattr(ModelDrafter, "propose", skipping)
        engine.submit(0, [7, 8, 9], 20)
        with pytest.raises(RankLostError):
            engine.run()
    assert caplog.messages == [
        "rank 0 has waited 1 s for another rank, which hangs or computes less"
    ]
