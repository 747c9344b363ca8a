"""Sampling defaults of a model, from its generation_config.json."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, structs

from nanovllm.config import Config, ConfigError
from nanovllm.server.ends import read
from nanovllm.server.ranges import SAMPLING


class GenerationConfig(Struct, frozen=True):
    """Fields of generation_config.json that are the defaults of requests."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def sampling_defaults(config: Config) -> GenerationConfig:
    """Return the defaults of the model's folder. They have the ranges of a request's fields.

    Raise ConfigError with the path of a broken file, or with the field and its range.
    """
    if config.model_dir is None:
        return GenerationConfig()
    path = Path(config.model_dir) / "generation_config.json"
    if not path.is_file():
        return GenerationConfig()
    defaults = read(path, GenerationConfig)
    for field, value in structs.asdict(defaults).items():
        if value is not None and not SAMPLING[field].holds(value):
            raise ConfigError(f"{path}: {field} must be {SAMPLING[field]}, not {value}")
    return defaults
