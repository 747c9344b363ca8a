"""Any mix of adapters in one concurrent batch has the texts of PEFT, request by request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nanovllm.config import Speculate
from tests.adapters.peft_adapters import config_with, peft_model, save_adapter
from tests.models.tiny import make_tiny
from tests.whole_engine import WholeEngine, greedy_texts, prompts_of

SHARED = [*range(20, 35), *range(20, 35)]
PROMPTS = [*prompts_of(4, seed=12), SHARED, [*SHARED, 7], [*SHARED, 9, 9, 9]]
MAX_NEW = 9
ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": dict(target_modules="all-linear", r=33, lora_alpha=40),
    "one": dict(r=1, target_modules=["q_proj", "v_proj"]),
    "rslora": dict(r=17, use_rslora=True, lora_alpha=6, alpha_pattern={"up_proj": 30}),
    "layer": dict(layers_to_transform=[1], rank_pattern={"o_proj": 19}),
}
NAMES = ["", *ADAPTERS]
Row = tuple[int, str]  # a prompt, and the adapter of the request


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a tiny Qwen3 and of its adapters."""
    root = tmp_path_factory.mktemp("mixes")
    make_tiny(root / "model", "qwen3")
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        save_adapter(root / "model", root / "adapters" / name, seed, **options)
    return root / "model", root / "adapters"


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> dict[Row, list[int]]:
    """Return PEFT's text of each prompt with each adapter, without those that have near ties."""
    model, adapters = folders
    found: dict[Row, list[int]] = {}
    for name in NAMES:
        made = peft_model(model, adapters / name if name else None)
        for at, (text, margin) in enumerate(greedy_texts(made, PROMPTS, MAX_NEW)):
            if margin > 2e-4:
                found[at, name] = text
    assert len(found) > 0.9 * len(PROMPTS) * len(NAMES)
    return found


ROWS = st.lists(
    st.tuples(st.integers(0, len(PROMPTS) - 1), st.sampled_from(NAMES)), min_size=2, max_size=9
)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=ROWS,
    slots=st.integers(1, 4),
    step_tokens=st.sampled_from([9, 24, 64]),
    pages=st.sampled_from([26, 200]),
    drafts=st.booleans(),
)
def test_any_mix_has_the_texts_of_peft(
    folders: tuple[Path, Path],
    expected: dict[Row, list[int]],
    rows: list[Row],
    slots: int,
    step_tokens: int,
    pages: int,
    drafts: bool,
) -> None:
    """Rows are submitted twice, so that the second ones find pages in the prefix cache."""
    engine = WholeEngine(
        config_with(*folders, slots=slots),
        pages=pages,
        step_tokens=step_tokens,
        slots=5,
        max_tokens=90,
        speculate=Speculate(method="ngram", tokens=3, min_match=1) if drafts else None,
    )
    wanted = [row for row in rows if row in expected]
    for turn in range(2):
        for i, (at, name) in enumerate(wanted, 100 * turn):
            engine.submit(i, PROMPTS[at], MAX_NEW, adapter=name)
        engine.run()
        texts = [engine.text[100 * turn + i] for i in range(len(wanted))]
        assert texts == [expected[row] for row in wanted]


def test_a_mix_meets_preemption_drafts_and_prefix_hits(
    folders: tuple[Path, Path], expected: dict[Row, list[int]]
) -> None:
    """The sizes above reach what they are for."""
    speculate = Speculate(method="ngram", tokens=3, min_match=1)
    engine = WholeEngine(
        config_with(*folders, slots=2),
        pages=26,
        step_tokens=24,
        max_tokens=90,
        speculate=speculate,
    )
    for i, (at, name) in enumerate(expected):
        engine.submit(i, PROMPTS[at], MAX_NEW, adapter=name)
    engine.run()
    assert [engine.text[i] for i in range(len(expected))] == [*expected.values()]
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.draft_tokens > 0
    assert sum(engine.cached.values()) > 0
