"""Changes of a checkpoint's config by the recipe: fewer layers, or fp8 weights."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from nanovllm.config import ConfigError, Recipe
from nanovllm.layers.fp8 import BlockFp8
from nanovllm.models.decoder import DecoderConfig


def altered(own: DecoderConfig, recipe: Recipe, path: Path) -> DecoderConfig:
    """Return the config to build the model with. `path` is that of config.json, for errors."""
    num_layers = recipe.num_layers
    if num_layers != "auto":
        if not 1 <= num_layers <= own.num_hidden_layers:
            most = f"{own.num_hidden_layers}, the number in {path}"
            raise ConfigError(f"model.num_layers is {num_layers}; it must be between 1 and {most}")
        own = replace(own, num_hidden_layers=num_layers, checkpoint_layers=own.num_hidden_layers)
    if recipe.quantize is not None:
        if own.quantization_config is not None:
            raise ConfigError(f"quantize is fp8, but {path} is already quantised; remove quantize")
        own = replace(own, quantization_config=BlockFp8("fp8", (128, 128)))
    return own
