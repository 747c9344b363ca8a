"""torch.compile of operations: an engine's warm-up on a GPU covers what requests need.

The engine runs on a CPU that claims to be a GPU during the warm-up.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import _dynamo

from nanovllm.config import Kernels, Schedule, Server, Speculate
from nanovllm.layers.kernels import FUSED
from nanovllm.runner.build import warm_up
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import MAX_TOKENS, WholeEngine, prompts_of

CASE = "qwen3_next that repeats itself"  # uses each operation
DRAFTS = Speculate(method="ngram", tokens=3, min_match=1)


class Gpu(str):
    """A device that claims to be a GPU."""

    type = "cuda"


def num_compiled() -> int:
    return int(_dynamo.utils.counters["stats"]["unique_graphs"])


def test_nothing_is_compiled_after_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path, CASES[CASE][0], **CASES[CASE][1])
    # Dynamo counts its graphs, whose code of C++ takes long to compile.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain = config_of(tmp_path)
    kernels = Kernels(**dict.fromkeys(FUSED, "compile"))
    recipe = replace(
        plain.recipe,
        kernels=kernels,
        schedule=Schedule(slots=8, step_tokens=64),
        server=Server(max_model_tokens=MAX_TOKENS),
    )
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    engines = [
        WholeEngine(config, speculate=DRAFTS) for config in (plain, replace(plain, recipe=recipe))
    ]
    runner = engines[1].runner
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    device, runner.device = runner.device, Gpu("cpu")  # type: ignore[assignment]
    warm_up(runner, recipe)
    runner.device = device
    warmed = num_compiled()
    for engine in engines:
        for name, prompt in enumerate([*prompts_of(9, seed=2), [1], [3, 4] * 70]):
            engine.submit(name, prompt, 12)
        engine.run()
    assert warmed >= 2 * len(FUSED) and num_compiled() == warmed
    assert engines[1].text == engines[0].text  # greedy, in float32
