"""Warm-up steps without requests, on a CPU that claims to be a GPU."""

from __future__ import annotations

import pytest
import torch

from nanovllm.config import load_config
from nanovllm.runner import build
from nanovllm.runner.runner import Runner


class TakenForAGpu(str):
    type = "cuda"


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ("server.max_model_tokens=512", [(1, 1), (1, 2), (1, 17), (2, 256), (1, 512)]),
        ("server.max_model_tokens=8", [(1, 1), (1, 2), (1, 8), (2, 4), (1, 8)]),
        ("schedule.step_tokens=1", [(1, 1), (1, 1), (1, 1), (2, 1), (1, 1)]),
    ],
)
def test_no_row_is_longer_than_a_request_or_empty(change, steps, monkeypatch) -> None:
    """Otherwise no pages are mapped for the row's tokens, and the engine would not start."""
    built = build.build(load_config(None, [change], {"device": "cpu"}))
    ran, run = [], build.run_padding

    def noted(runner: Runner, num_rows: int, tokens_each: int) -> None:
        ran.append((num_rows, tokens_each))
        run(runner, num_rows, tokens_each)

    monkeypatch.setattr(build, "run_padding", noted)
    monkeypatch.setattr(built.runner, "device", TakenForAGpu("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    build.warm_up(built.runner, built.recipe)
    assert ran == steps
