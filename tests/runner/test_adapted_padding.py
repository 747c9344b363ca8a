"""The largest steps are also tried with adapters, so that the cache leaves room for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanovllm.runner.build import run_padding
from nanovllm.runner.runner import Runner
from tests.adapters.peft_adapters import config_with, save_adapter
from tests.models.tiny import make_tiny
from tests.whole_engine import WholeEngine


def test_steps_with_adapters_are_run_before_the_cache_is_sized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path / "model", "qwen3")
    save_adapter(tmp_path / "model", tmp_path / "adapters" / "a", 1)
    runner = WholeEngine(config_with(tmp_path / "model", tmp_path / "adapters")).runner
    seen, hidden = list[bool](), Runner.hidden

    def noted(self: Runner, ctx: Any, *, adapted: bool = False) -> Any:
        seen.append(adapted)
        return hidden(self, ctx, adapted=adapted)

    monkeypatch.setattr(Runner, "hidden", noted)
    run_padding(runner, 2, 5)
    run_padding(runner, 3, 1)
    assert seen == [False, True, False, True]
