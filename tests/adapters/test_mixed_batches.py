"""Greedy texts equal PEFT's, for rows of different adapters and of none in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.peft_adapters import config_with, save_adapter, texts_of
from tests.models.tiny import make_tiny
from tests.whole_engine import WholeEngine, prompts_of

PROMPTS = prompts_of(10, seed=3)
ADAPTERS: dict[str, dict[str, object]] = {
    "all": dict(target_modules="all-linear", r=33, lora_alpha=40),
    "layer": dict(layers_to_transform=[1]),
    "patterns": dict(
        r=20,
        use_rslora=True,
        rank_pattern={"k_proj": 5, r"layers\.1\.mlp\..*": 17},
        alpha_pattern={"up_proj": 30, "0.self_attn.q_proj": 1},
    ),
    "regex": dict(
        target_modules=r".*\.(q|o|down)_proj", exclude_modules=["layers.0.mlp.down_proj"]
    ),
    "small": dict(r=1, target_modules=["q_proj", "v_proj"]),
}
NAMES = ["", *ADAPTERS]
MAX_NEW = 8


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a tiny Qwen3 and of its adapters."""
    root = tmp_path_factory.mktemp("dense")
    model, adapters = root / "model", root / "adapters"
    make_tiny(model, "qwen3")
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        save_adapter(model, adapters / name, seed, **settings)
    return model, adapters


def test_a_mixed_batch_has_the_texts_of_peft_twice(dense: tuple[Path, Path]) -> None:
    model, adapters = dense
    chosen = [NAMES[i % len(NAMES)] for i in range(len(PROMPTS))]
    expected = {
        name: texts_of(
            model,
            adapters / name if name else None,
            [p for p, n in zip(PROMPTS, chosen, strict=True) if n == name],
            MAX_NEW,
        )
        for name in NAMES
    }
    engine = WholeEngine(config_with(model, adapters, slots=3))  # two of five must wait
    for turn in range(2):  # the second time, from cached pages
        ids = range(100 * turn, 100 * turn + len(PROMPTS))
        for i, prompt, name in zip(ids, PROMPTS, chosen, strict=True):
            engine.submit(i, prompt, MAX_NEW, adapter=name)
        engine.run()
        for name in NAMES:
            own = [engine.text[i] for i, n in zip(ids, chosen, strict=True) if n == name]
            assert own == expected[name], name
    assert sum(engine.cached[i] for i in ids) > 0
