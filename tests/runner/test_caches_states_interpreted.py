"""Engines with the delta rule in Triton's interpreter: chunks, decode rows and drafts.

They run in a separate process, since the interpreter must be on before triton is imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.config import Speculate
from nanovllm.layers import kernels
from tests.interpreted import in_interpreter, in_parent, passes
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import WholeEngine, prompts_of, references


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 2)


@in_interpreter
@pytest.mark.parametrize("speculate", [None, Speculate(method="ngram", tokens=2, min_match=1)])
def test_text_is_the_references(
    speculate: Speculate | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        kernels.IMPLEMENTATIONS["torch"], "delta", "nanovllm.attention.delta_triton:TRITON"
    )
    family, overrides = CASES["qwen3_next that repeats itself"]
    sizes = dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_value_heads=4)
    model = make_tiny(tmp_path, family, **{**overrides, **sizes})
    prompts = [[5, 6, 7, 8] * 5, prompts_of(2)[1][:9], prompts_of(3)[2][:30]]
    engine = WholeEngine(
        config_of(tmp_path), step_tokens=24, slots=3, checkpoints=8, speculate=speculate
    )
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, 10)
        engine.loop.step()
    engine.run()
    assert [engine.text[i] for i in range(3)] == references(model, prompts, 10)
    assert speculate is None or engine.scheduler.stats().accepted_tokens > 0
