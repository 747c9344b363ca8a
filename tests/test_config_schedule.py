"""Token budgets of a schedule: values of "auto", and refused values.

mixed_step_tokens stays "auto", since engine/pace.py adjusts it to measured times.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanovllm.bench.plan import with_numbers_of_a_gpu
from nanovllm.config import ConfigError, Schedule, load_config
from nanovllm.engine import paper
from nanovllm.runner.resolved import resolve_config, without_autos
from nanovllm.schedule import resolve_schedule

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.parametrize(
    ("schedule", "on_cpu", "numbers"),  # slots, step_tokens, mixed_step_tokens
    [
        (Schedule(), False, (512, 8192, "auto")),
        (Schedule(), True, (16, 512, "auto")),
        (Schedule(step_tokens=2047, slots=32), False, (32, 2047, "auto")),
        (Schedule(step_tokens=1), False, (1, 1, "auto")),
        (Schedule(step_tokens=100), True, (16, 100, "auto")),
        (Schedule(mixed_step_tokens=4096), False, (512, 8192, 4096)),
        (Schedule(mixed_step_tokens=4096), True, (16, 512, 512)),  # a GPU's recipe on a CPU
        (Schedule(mixed_step_tokens=101, step_tokens=100), False, (100, 100, 100)),
        (Schedule(mixed_step_tokens=8), True, (16, 512, 8)),  # fewer than slots, which is allowed
    ],
)
def test_auto_becomes_numbers(
    schedule: Schedule, on_cpu: bool, numbers: tuple[object, ...]
) -> None:
    found = resolve_schedule(schedule, on_cpu=on_cpu)
    assert (found.slots, found.step_tokens, found.mixed_step_tokens) == numbers
    assert resolve_schedule(found, on_cpu=on_cpu) == found


@pytest.mark.parametrize("value", [0, -1, (1 << 20) + 1])
def test_a_budget_out_of_range_is_refused(value: int) -> None:
    said = f"^schedule.mixed_step_tokens is {value}; it must be between 1 and 1048576$"
    with pytest.raises(ConfigError, match=said):
        load_config(None, [f"schedule.mixed_step_tokens={value}"])


@pytest.mark.parametrize(
    ("key", "value", "limits"),
    [
        ("ageing_s", "0.0", "0.001 and 86400"),
        ("ageing_s", "86401.0", "0.001 and 86400"),
        ("overtake_steps", "-1", "0 and 1048576"),
        ("max_queue", "0", "1 and 1048576"),  # 0 would refuse all requests
    ],
)
def test_who_waits_how_long_has_its_limits(key: str, value: str, limits: str) -> None:
    said = f"^schedule.{key} is {value}; it must be between {limits}$"
    with pytest.raises(ConfigError, match=said):
        load_config(None, [f"schedule.{key}={value}"])


def test_a_budget_is_a_number() -> None:
    with pytest.raises(ConfigError, match=r"mixed_step_tokens"):
        load_config(None, ["schedule.mixed_step_tokens=half"])


def test_recipes_of_gpus_have_numbers() -> None:
    """A model with experts has long steps, since even a small one reads nearly all experts."""
    budgets = {}
    for path in RECIPES.glob("*.yaml"):
        recipe = load_config(str(path), ["load.format=dummy"]).recipe
        budgets[path.stem] = resolve_schedule(recipe.schedule, on_cpu=False).mixed_step_tokens
    numbers = {
        "qwen3-0.6b": 8192,
        **dict.fromkeys(("qwen3-8b", "qwen3-32b", "r1-distill-llama-8b"), 4224),
        **dict.fromkeys(("qwen3.5-27b", "qwen3.6-27b"), 4224),
        **dict.fromkeys(("deepseek-r1", "minimax-m2", "qwen3-30b-a3b", "qwen3-235b-a22b"), 8192),
        **dict.fromkeys(("qwen3-next-80b-a3b", "qwen3-next-80b-a3b-thinking"), 8192),
    }
    experts = ("deepseek-r1-0528", "deepseek-v3", "deepseek-v3-0324", "deepseek-v3.1")
    experts += ("glm-4.7-flash", "minimax-m2.1", "minimax-m2.5", "minimax-m2.7")
    experts += ("qwen3.5-35b-a3b", "qwen3.5-397b-a17b", "qwen3.6-35b-a3b")
    numbers |= dict.fromkeys(experts, 8192)
    others = dict.fromkeys(("demo", "paper", "r1-distill-llama-70b"), "auto")
    assert budgets == others | numbers


@pytest.mark.parametrize(
    ("name", "most"),
    [("qwen3-0.6b", 8192), ("qwen3-8b", 8448), ("qwen3-30b-a3b", 16384), ("minimax-m2", 16384),
     ("deepseek-r1", 16384), ("qwen3-next-80b-a3b", 16384)],
)  # fmt: skip
def test_models_with_experts_take_long_steps_on_gpus_alone(name: str, most: int) -> None:
    config = load_config(
        name, ["load.format=dummy", "parallel.tp=1", "schedule.slots=8"], {"device": "cpu"}
    )
    on_gpu = resolve_config(with_numbers_of_a_gpu(config, is_hopper=True)).recipe.schedule
    assert on_gpu.step_tokens == most
    asked = config.recipe.schedule.step_tokens
    assert resolve_config(config).recipe.schedule.step_tokens == (512 if asked == "auto" else asked)


def test_engines_get_numbers() -> None:
    demo = load_config(None, ["schedule.mixed_step_tokens=300"])
    on_cpu = without_autos(demo.recipe, torch.device("cpu"), torch.float32, 8192)
    assert on_cpu.schedule == Schedule(slots=16, step_tokens=512, mixed_step_tokens=300)
    assert (on_cpu.kernels.sample, on_cpu.kernels.batch_prep) == ("torch", "torch")
    on_gpu = without_autos(demo.recipe, torch.device("cuda"), torch.bfloat16, 8192).kernels
    # This machine has no GPU that kernels were measured on, so norms are compiled.
    assert (on_gpu.sample, on_gpu.batch_prep, on_gpu.rms_norm) == ("triton", "triton", "compile")
    _, on_paper, *_ = paper.build(load_config(str(RECIPES / "paper.yaml")))
    assert on_paper.schedule == Schedule(slots=512, step_tokens=8192, mixed_step_tokens="auto")
