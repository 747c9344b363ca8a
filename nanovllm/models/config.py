"""A checkpoint's config.json as the typed config of its family.

Both spellings of rotary parameters are accepted: `rope_parameters`, and the older `rope_theta`
with an optional `rope_scaling` and `partial_rotary_factor`. Everything else is what the family's
Config declares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.config import Config, ConfigError, Recipe
from nanovllm.layers.fp8 import BlockFp8
from nanovllm.layers.rope import Rope
from nanovllm.models import MODELS
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.registry import resolve


class Spelling(Struct, frozen=True):
    """What must be read before the family's own Config can be."""

    architectures: list[str]
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float = 1.0


def read_model_config(config: Config) -> tuple[type[Decoder], DecoderConfig]:
    """The model class and its config. Raises ConfigError naming the file and the field."""
    path = Path(config.config_path)
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        spelling = msgspec.convert(raw, Spelling)
        name = spelling.architectures[0] if spelling.architectures else "empty"
        if name not in MODELS:
            known = ", ".join(sorted(MODELS))
            raise ConfigError(f"{path}: architectures is {name}; supported are {known}")
        family: type[Decoder] = resolve(MODELS, name)
        for field, only in family.Config.ONLY.items():
            if raw.get(field, only) != only:
                shown, allowed = (
                    msgspec.json.encode(value).decode() for value in (raw[field], only)
                )
                raise ConfigError(f"{path}: {field} is {shown}; only {allowed} is supported")
        raw["rope_parameters"] = rope_parameters(spelling, path)
        return family, changed(msgspec.convert(raw, family.Config), config.recipe, path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:  # not JSON, a missing field, or one of the wrong type
        raise ConfigError(f"{path}: {error}") from None


def changed(own: DecoderConfig, recipe: Recipe, path: Path) -> DecoderConfig:
    """What the recipe makes of the model: fewer layers, or weights in fp8."""
    num_layers = recipe.num_layers
    if num_layers != "auto":
        if not 1 <= num_layers <= own.num_hidden_layers:
            most = f"{own.num_hidden_layers}, which {path} has"
            raise ConfigError(f"model.num_layers is {num_layers}; it must be between 1 and {most}")
        own = replace(own, num_hidden_layers=num_layers)
    if recipe.quantize is not None:
        if own.quantization_config is not None:
            raise ConfigError(f"quantize is fp8, but by {path} the weights are: leave it out")
        own = replace(own, quantization_config=BlockFp8("fp8", (128, 128)))
    return own


def rope_parameters(spelling: Spelling, path: Path) -> dict[str, Any]:
    """Either spelling as `rope_parameters`, with its rope_type."""
    rope = spelling.rope_parameters
    if rope is None:
        if spelling.rope_theta is None:
            raise ConfigError(f"{path}: missing field rope_theta (or rope_parameters)")
        rope = {**(spelling.rope_scaling or {}), "rope_theta": spelling.rope_theta}
        rope.setdefault("partial_rotary_factor", spelling.partial_rotary_factor)
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = [known.__struct_config__.tag for known in get_args(Rope)]
    if kind not in kinds:
        raise ConfigError(f"{path}: rope type is {kind}; supported are {', '.join(kinds)}")
    return {**rope, "rope_type": kind}
