"""Checkpoints with a poisoned token, whose embedding makes NaN of all results."""

from __future__ import annotations

import math
from pathlib import Path

from msgspec.structs import replace

from nanovllm.config import Cache, Config, Schedule, Server
from nanovllm.runner.build import build
from nanovllm.runner.runner import Runner
from tests.models.tiny import config_of, make_tiny

POISON = 7  # token id
VALUES = {"nan": math.nan, "inf": math.inf}  # values of its embedding
PAGE_TOKENS, NUM_PAGES, NUM_SLOTS = 4, 60, 8


def poisoned(folder: Path, value: float, **overrides: object) -> Config:
    """Save a tiny random Qwen3 with one token's embedding full of `value`. Return its config.

    The model never generates that token: its logit is 0, and the best ones are positive.
    """
    model = make_tiny(folder, "qwen3", **overrides)
    model.get_input_embeddings().weight.data[POISON] = value
    model.get_output_embeddings().weight.data[POISON] = 0
    model.save_pretrained(folder)
    return config_of(folder)


def runner_of(config: Config) -> Runner:
    recipe = replace(
        config.recipe,
        cache=Cache(page_tokens=PAGE_TOKENS, pages=NUM_PAGES),
        schedule=Schedule(slots=NUM_SLOTS, step_tokens=64),
        server=Server(max_model_tokens=64),
    )
    return build(replace(config, recipe=recipe)).runner
