"""Draft heads with requests of all kinds, on one rank and on several: the text is the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.config import Config, Speculate
from tests.engine.test_ranks import SMALL, cut, ranked, text_of
from tests.models.heads import eagle3_tensors, save_head
from tests.models.test_mtp import make_mtp
from tests.models.tiny import M2, NEXT, V3, config_of, make_tiny
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
    overrides = dict(NEXT, num_experts=10)
    if family == "deepseek_v3":
        overrides = dict(V3, n_routed_experts=10, n_group=5)
    make_mtp(folder, family, vocab_size=VOCABULARY, **overrides)
    return config_of(folder), Speculate(method="mtp", tokens=2, adapt=False)


@pytest.mark.parametrize(
    ("make", "family", "tp", "ep"),
    [
        (eagle3, "qwen3", 2, 1),
        (eagle3, "minimax_m2", 2, 2),
        (eagle3, "minimax_m2", 1, 2),  # two lanes
        (mtp, "deepseek_v3", 2, 1),
        (mtp, "qwen3_next", 2, 2),
    ],
)
def test_texts_of_all_kinds_are_those_without_drafts(
    make, family: str, tp: int, ep: int, tmp_path: Path
) -> None:
    """There are masks, logprobs, penalties, prefix hits and preemptions."""
    config, speculate = make(tmp_path, family)
    expected = text_of(WholeEngine(config, **SMALL))
    alone = WholeEngine(config, speculate=speculate, **SMALL)
    assert text_of(alone) == expected
    assert alone.scheduler.stats().num_drafts > 50
    with ranked(cut(config, 1, ep), tp, tmp_path, speculate=speculate, **SMALL) as engine:
        assert text_of(engine) == expected
        stats, other = alone.scheduler.stats(), engine.scheduler.stats()
        if tp == 1:  # lanes have other steps, and the steps limit the drafts
            assert other.num_drafts > 50
            return
        assert stats.accepted_tokens == other.accepted_tokens
        assert stats.draft_tokens == other.draft_tokens
