"""Lanes as threads, each with its own Runner and requests: the text is that of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.config import Speculate
from tests.engine.test_ranks import NGRAM, SMALL, cut, ranked, text_of
from tests.models.tiny import CASES, config_of, make_tiny
from tests.parallel.test_mesh import COUNTS
from tests.whole_engine import WholeEngine


@pytest.mark.parametrize(
    ("family", "drafts", "ep"),
    [
        ("qwen3_moe", NGRAM, 2),
        ("qwen3_moe", None, 4),
        ("minimax_m2", NGRAM, 4),
        ("deepseek_v3", None, 2),
        ("deepseek_v3", NGRAM, 4),
    ],
)
def test_text_is_that_of_one_rank(
    family: str, drafts: Speculate | None, ep: int, tmp_path: Path
) -> None:
    overrides = {**CASES[family][1], COUNTS[family]: 12, "vocab_size": 5003}
    if family == "deepseek_v3":
        overrides["n_group"] = 6
    make_tiny(tmp_path, family, **overrides)
    config = config_of(tmp_path)
    expected = text_of(WholeEngine(config, speculate=drafts, **SMALL))
    with ranked(cut(config, 1, ep), 1, tmp_path, speculate=drafts, **SMALL) as engine:
        assert text_of(engine) == expected
