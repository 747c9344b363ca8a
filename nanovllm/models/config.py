"""Conversion of a checkpoint's config.json to the typed config of its family.

Both spellings of rotary parameters are accepted: `rope_parameters`, and the older `rope_theta`
with an optional `rope_scaling` and `partial_rotary_factor`. A file with both is read as
transformers reads it. YaRN increases max_position_embeddings. All other fields are those that the
family's Config declares.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.config import NOT_JSON, Config, ConfigError
from nanovllm.models import MODELS
from nanovllm.models.altered import altered
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.models.names import text_name
from nanovllm.models.support import check_config, check_only
from nanovllm.models.tied import has_own_head
from nanovllm.registry import resolve

log = logging.getLogger("engine")
LONGEST, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
Flat = dict[str, bool | int | float | str | list[float] | None]  # same for all layers


class Spelling(Struct, frozen=True):
    """Fields that are read before the family's own Config."""

    architectures: list[str]
    rope_parameters: Flat | None = None
    rope_scaling: Flat | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    max_position_embeddings: int | None = None
    original_max_position_embeddings: int | None = None  # takes precedence over that of rope


def read_model_config(config: Config) -> tuple[type[Decoder], DecoderConfig]:
    """Return the model class and its config. Raise ConfigError with the file and the field."""
    path = Path(config.config_path)
    try:
        raw = check_config(path, config.recipe.model)
        spelling = msgspec.convert(raw, Spelling)
        family: type[Decoder] = resolve(MODELS, spelling.architectures[0])
        check_only(raw, family.Config.ONLY, path)
        raw["rope_parameters"] = rope = rope_parameters(spelling, path)
        rename_kept(raw.get("quantization_config"))
        lengthen(raw, rope)
        own = untied(msgspec.convert(raw, family.Config), config)
        return family, altered(own, config.recipe, path)
    except NOT_JSON as error:  # also a missing field, or one of the wrong type
        raise ConfigError(f"{path}: {error}") from None


def rope_parameters(spelling: Spelling, path: Path) -> dict[str, Any]:
    """Return all spellings as `rope_parameters`, with rope_type and without null fields.

    `rope_scaling` takes precedence over `rope_parameters`, and both over top-level fields.
    """
    own = spelling.rope_parameters or {}
    rope = {**(spelling.rope_scaling or own)}
    for name in ("rope_theta", "partial_rotary_factor"):
        rope.setdefault(name, own.get(name, getattr(spelling, name)))
    if rope["rope_theta"] is None:
        raise ConfigError(f"{path}: missing field rope_theta (or rope_parameters)")
    kind = rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("llama3", "yarn"):
        original = spelling.original_max_position_embeddings or spelling.max_position_embeddings
        if spelling.original_max_position_embeddings or rope.get(ORIGINAL) is None:
            rope[ORIGINAL] = original
    return {name: value for name, value in rope.items() if value is not None}


def lengthen(raw: dict[str, Any], rope: dict[str, Any]) -> None:
    """Set max_position_embeddings to YaRN's factor times the original context.

    Checkpoints that add YaRN to a finished model, as the cards of Qwen3 recommend, do not change
    the field. A larger value stays.
    """
    if rope["rope_type"] != "yarn":
        return
    own, factor, original = raw.get(LONGEST), rope.get("factor"), rope.get(ORIGINAL)
    if not isinstance(own, int) or not isinstance(original, int):
        return  # reported elsewhere
    if isinstance(factor, int | float) and 0 < factor * original < 1 << 31:
        raw[LONGEST] = max(own, round(factor * original))


def rename_kept(quantised: object) -> None:
    """Rename modules that are not quantised to the names that WEIGHTS use."""
    for field in ("modules_to_not_convert", "ignored_layers"):
        if isinstance(quantised, dict) and isinstance(names := quantised.get(field), list):
            quantised[field] = [text_name(name) for name in names if isinstance(name, str)]


def untied(own: DecoderConfig, config: Config) -> DecoderConfig:
    """Return the config without tie_word_embeddings if the checkpoint has a separate head."""
    if not own.tie_word_embeddings or config.model_dir is None:
        return own
    if config.recipe.load.format == "dummy" or not has_own_head(Path(config.model_dir)):
        return own
    log.info(
        "lm_head.weight differs from the embedding: loaded, although tie_word_embeddings is true"
    )
    return replace(own, tie_word_embeddings=False)
