"""Defaults of sampling from generation_config.json."""

from __future__ import annotations

import json

import pytest

from nanovllm.config import ConfigError, load_config
from nanovllm.server.generation import GenerationConfig, sampling_defaults
from tests.server.tiny_tokenizer import write_folder


def defaults_of(folder, fields: dict[str, object]) -> GenerationConfig:
    write_folder(folder)
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return sampling_defaults(load_config(None, [f"model={folder}", "load.format=dummy"]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -0.5}, "temperature must be between 0 and 2, not -0.5"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_k": -2}, "top_k must be between -1 and 2147483647, not -2"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, not 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0 and at most 2, not 0.0"),
        ({"top_k": "x"}, "Expected `int | null`, got `str` - at `$.top_k`"),
    ],
)
def test_defaults_outside_the_ranges_of_requests_are_refused(tmp_path, fields, says) -> None:
    """A repetition penalty of 0 makes logits infinite."""
    with pytest.raises(ConfigError) as caught:
        defaults_of(tmp_path, fields)
    assert str(caught.value) == f"{tmp_path / 'generation_config.json'}: {says}"


def test_the_ends_of_ranges_and_null_are_accepted(tmp_path) -> None:
    fields = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": None, "do_sample": True}
    assert defaults_of(tmp_path, fields) == GenerationConfig(temperature=0, top_p=1, top_k=-1)
    (tmp_path / "generation_config.json").unlink()
    config = load_config(None, [f"model={tmp_path}", "load.format=dummy"])
    assert sampling_defaults(config) == GenerationConfig()
