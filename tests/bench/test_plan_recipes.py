"""Every recipe has a plan that fits the GPUs that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.bench.gpus import KNOWN
from nanovllm.bench.plan import WEIGHTS, plan_of
from nanovllm.config import load_config

RECIPES = Path(__file__).parents[2] / "recipes"
R1, M2 = (8, 86.3, 70_272), (4, 58.0, 63_488)
NEXT, SMALL_MOE, DENSE = (2, 79.8, 12_288), (1, 69.3, 20_480), (1, 53.8, 65_536)
# Ranks, weights of the first rank in GB, and bytes of pages per token and rank. The whole models
# are in the table of published sizes: for example, 61.1 GB are 30.53 billion parameters.
PLANS: dict[str, tuple[int, float, int]] = {
    **dict.fromkeys(("deepseek-r1", "deepseek-r1-0528", "deepseek-v3", "deepseek-v3.1"), R1),
    "deepseek-v3-0324": R1,
    "demo": (1, 0.0, 4096),
    "glm-4.7-flash": (1, 59.9, 54_144),
    **dict.fromkeys(("minimax-m2", "minimax-m2.1", "minimax-m2.5", "minimax-m2.7"), M2),
    "qwen3-0.6b": (1, 1.2, 114_688),
    "qwen3-235b-a22b": (4, 117.7, 48_128),
    "qwen3-30b-a3b": (1, 61.1, 98_304),
    "qwen3-32b": (1, 65.5, 262_144),
    "qwen3-8b": (1, 16.4, 147_456),
    **dict.fromkeys(("qwen3-next-80b-a3b", "qwen3-next-80b-a3b-thinking"), NEXT),
    **dict.fromkeys(("qwen3.5-27b", "qwen3.6-27b"), DENSE),
    **dict.fromkeys(("qwen3.5-35b-a3b", "qwen3.6-35b-a3b"), SMALL_MOE),
    "qwen3.5-397b-a17b": (4, 99.9, 15_360),
    "r1-distill-llama-70b": (1, 141.1, 327_680),
    "r1-distill-llama-8b": (1, 16.1, 131_072),
}


def test_every_recipe_is_planned() -> None:
    """The recipe `paper` has neither weights nor a GPU."""
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*PLANS, "paper"}


@pytest.mark.parametrize("name", PLANS)
def test_a_recipe_fits_its_gpus(name: str) -> None:
    """On H200s, with the recipe's number of ranks. Only one model has less than 32,768 tokens."""
    config = load_config(name, ["load.format=dummy"])
    plan = plan_of(config, KNOWN["h200"], config.recipe.parallel.tp)
    weights = round(plan.used[WEIGHTS] / 1e9, 1)
    found = plan.resolved.mesh.tp_size, weights, plan.resolved.layout.bytes_per_token
    assert found == PLANS[name]
    expected = {"r1-distill-llama-70b": 6656, "demo": 4096}.get(name, 32_768)
    assert plan.context == expected and plan.problem([expected]) == ""
    assert plan.problem([plan.tokens + 1]).endswith(f"of cache are fewer than {plan.tokens + 1:,}")
