"""Ranks and lanes draft alike, and write the text of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.config import Config, Speculate
from tests.engine.test_ranks import SMALL, cut, ranked, text_of
from tests.models.tiny import CASES, config_of, make_tiny
from tests.parallel.test_mesh import COUNTS
from tests.whole_engine import WholeEngine


def drafted(folder: Path, family: str, **overrides: object) -> tuple[Config, Speculate]:
    """Return a model, and drafts by another one that agrees with it in part of the tokens."""
    own, other = folder / "own", folder / "other"
    make_tiny(own, family, **overrides)
    make_tiny(other, "qwen3", vocab_size=overrides["vocab_size"])
    model = own if family == "qwen3" else other
    return config_of(own), Speculate(method="draft_model", model=str(model), tokens=2)


@pytest.mark.parametrize(
    ("tp", "vocab_size"),
    [
        (2, 5003),  # 3 blocks of the vocabulary on 2 ranks
        (4, 5003),  # each rank has all blocks
    ],
)
def test_ranks_draft_alike(tp: int, vocab_size: int, tmp_path: Path) -> None:
    """The draft model is whole on each rank, and equals the target. Its drafts are accepted."""
    config, speculate = drafted(tmp_path, "qwen3", vocab_size=vocab_size)
    alone = WholeEngine(config, speculate=speculate, **SMALL)
    expected = text_of(alone)
    with ranked(cut(config, tp), tp, tmp_path, speculate=speculate, **SMALL) as engine:
        assert text_of(engine) == expected
        found, usual = engine.scheduler.stats(), alone.scheduler.stats()
        assert found.accepted_by_position == usual.accepted_by_position
        assert found.accepted_tokens > 40
        assert engine.runner.model.layers[0].mlp.down.weight.shape[1] == 96 // tp
        own = engine.runner.draft_model.decoder.layers[0].mlp.down.weight
        assert own.shape[1] == 96


def test_lanes_draft_alike(tmp_path: Path) -> None:
    family = "qwen3_moe"
    sizes = {**CASES[family][1], COUNTS[family]: 12, "vocab_size": 5003}
    config, speculate = drafted(tmp_path, family, **sizes)
    expected = text_of(WholeEngine(config, **SMALL))
    with ranked(cut(config, 1, 2), 1, tmp_path, speculate=speculate, **SMALL) as engine:
        assert text_of(engine) == expected
        assert engine.scheduler.stats().draft_tokens > 10
