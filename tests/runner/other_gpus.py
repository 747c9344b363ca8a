"""Kernels that a recipe launches on GPUs other than Hopper's, and with kernels.eager.

Like tests/runner/specialised.py, it must run in a separate process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import asdict

from nanovllm.config import load_config
from nanovllm.runner import resolved
from tests.runner.random_steps import Traffic
from tests.runner.specialised import RECIPES, Notes, Nothing, built_for, imagine_a_gpu

SMALL = (
    "load.format=dummy",
    "model.num_layers=1",
    "schedule.slots=8",
    "schedule.step_tokens=64",
    "server.max_model_tokens=512",
    "kernels.mixed_graph_tokens=32",
)


def main(major: str, name: str, *changes: str) -> None:
    """Print in JSON the reason, the choices, compiled functions, recorded kernels and modes."""
    notes, compiled = Notes(), []

    def compile_noted(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(function.__name__)
        return function

    imagine_a_gpu(notes, int(major))
    torch.compile = compile_noted
    config = load_config(str(RECIPES / f"{name}.yaml"), [*SMALL, *changes])
    found = resolved.resolve_config(config)
    with Nothing():
        traffic = Traffic(config, built_for(notes), notes.enter)
        for length in (1, 20, 80):
            traffic.ask(length, 4)
        traffic.step("three prompts")
    facts = dict(
        reason=found.reason,
        kernels=asdict(found.recipe.kernels),
        compiled=sorted({*compiled}),
        launched=sorted(notes.seen),
        modes=sorted(traffic.engine.runner.steps_by_mode),
    )
    sys.stdout.write(json.dumps(facts))
