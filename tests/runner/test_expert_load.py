"""Routed tokens that runner/expert_load.py counts, without waiting for the device.

tests/engine/test_ranks.py shows that counts do not depend on the placement of experts.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.experts import decode_lines
from nanovllm.runner import expert_load
from nanovllm.runner.build import run_padding
from nanovllm.runner.expert_load import ExpertCounter
from tests.models.steps import load
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import WholeEngine


def counts_of(engine: WholeEngine) -> list[tuple[int, list[int]]]:
    found = engine.runner.expert_load(wait=True)
    assert found is not None
    return [(one.layer, one.tokens) for one in decode_lines(found.lines())]


def test_tokens_of_requests_are_counted_in_layers_with_experts(tmp_path: Path) -> None:
    """The last layer counts only a prompt's sampled token; each later step counts one."""
    family, overrides = CASES["qwen3_moe 7, top 1, dense between"]
    make_tiny(tmp_path, family, **overrides)
    engine = WholeEngine(config_of(tmp_path))
    assert counts_of(engine) == [(1, [0] * 7)]  # warm-up is not counted
    engine.submit(1, [5, 6, 7, 8, 9], 4)
    engine.run()
    ((_, tokens),) = counts_of(engine)
    assert sum(tokens) == 5 + 3
    run_padding(engine.runner, 3, 1)
    assert counts_of(engine) == [(1, tokens)]
    found = engine.runner.expert_load(wait=False)
    assert found is not None and found.by_rank == {"0": 8}
    assert found.imbalance == {"1/experts": max(tokens) * 7 / 8, "1/ranks": 1.0}


def test_a_dense_model_has_no_load(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    assert ExpertCounter(load(tmp_path), torch.device("cpu")).newest(wait=True) is None


class Device:
    """Device whose copies complete when `is_done` is set."""

    def __init__(self) -> None:
        self.is_done = False
        self.num_waits = 0

    def event(self) -> Any:
        def synchronize() -> None:
            self.num_waits += 1
            self.is_done = True

        return SimpleNamespace(
            record=lambda: None, query=lambda: self.is_done, synchronize=synchronize
        )


def test_nobody_waits_for_a_copy_unless_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path, *(CASES["qwen3_moe"][:1]), **CASES["qwen3_moe"][1])
    device = Device()
    counter = ExpertCounter(load(tmp_path), torch.device("cpu"))
    monkeypatch.setattr(expert_load, "new_event", lambda _: device.event())

    def newest(*, wait: bool = False) -> int | None:
        found = counter.newest(wait=wait)
        return None if found is None else sum(found.by_rank.values())

    assert newest() is None
    counter.tokens_X += 1
    assert newest() is None  # the first copy is in flight
    device.is_done = True
    assert newest() == 0
    assert newest() == 10
    device.is_done = False
    counter.tokens_X += 1
    assert newest() == newest() == 10
    assert device.num_waits == 0
    assert newest(wait=True) == 20
    assert device.num_waits == 1
