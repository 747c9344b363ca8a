"""Maximum context of a model whose config.json has YaRN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import AutoConfig

from nanovllm.config import ConfigError
from nanovllm.runner.build import build
from tests.models.test_config import RECIPES, read
from tests.models.tiny import config_of, make_tiny

QWEN3_8B: dict[str, Any] = json.loads((RECIPES / "configs" / "Qwen3-8B.json").read_text())
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({}, 40960),
        ({"rope_scaling": YARN}, 131072),  # as in Qwen3's model card
        ({"rope_parameters": {**YARN, "rope_theta": 1000000}}, 131072),
        ({"rope_parameters": YARN}, 131072),  # rope_theta is next to it
        ({"rope_scaling": {**YARN, "factor": 2}}, 65536),
        ({"rope_scaling": {**YARN, "factor": 1.0}}, 40960),
        ({"rope_scaling": YARN, "max_position_embeddings": 131072}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 163840),  # 4 max_position_embeddings
        ({"rope_scaling": YARN, "original_max_position_embeddings": 16384}, 65536),
    ],
)
def test_yarn_lengthens_the_context(tmp_path: Path, change: dict[str, Any], context: int) -> None:
    config = read(tmp_path, QWEN3_8B | change)
    assert config.max_position_embeddings == context
    reference = AutoConfig.from_pretrained(tmp_path)
    reference.standardize_rope_params()  # also called by users of the config
    found = getattr(config.rope_parameters, "original_max_position_embeddings", None)
    assert found == reference.rope_parameters.get("original_max_position_embeddings")


def test_a_lengthened_context_can_be_served(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", rope_parameters=YARN | dict(rope_theta=1e4, factor=2.0))
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["rope_parameters"]["original_max_position_embeddings"] = 200
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = config_of(tmp_path)
    for length, fits in ((400, True), (401, False)):
        server = replace(config.recipe.server, max_model_tokens=length)
        asked = replace(config, recipe=replace(config.recipe, server=server))
        if fits:
            assert build(asked).recipe.server.max_model_tokens == 400
            continue
        with pytest.raises(ConfigError, match="the model's context is 400 tokens"):
            build(asked)
