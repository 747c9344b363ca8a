"""What a recipe becomes on this machine, as far as that is known before anything is loaded.

Knows neither weights nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from msgspec.structs import replace

from nanovllm.attention.choose import choose_backend
from nanovllm.config import Config, Recipe
from nanovllm.dist.mesh import Mesh
from nanovllm.kv.layout import CacheLayout
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.runner.build import choose_device, resolve


@dataclass(frozen=True, slots=True)
class Resolved:
    recipe: Recipe  # without any "auto" but cache.pages
    family: type[Decoder]
    model_config: DecoderConfig
    layout: CacheLayout
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    passed_over: str  # attention backends that were not chosen, and why

    @property
    def page_tokens(self) -> int:
        return int(self.recipe.cache.page_tokens)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"


def resolved(config: Config) -> Resolved:
    """Raises ConfigError as the engine would."""
    device, dtype = choose_device(config.recipe)
    family, model_config = read_model_config(config)
    recipe = resolve(config.recipe, device, dtype, model_config.max_position_embeddings)
    mesh = Mesh()
    layout = family.cache_layout(model_config, mesh, dtype.itemsize)
    _, kernels, passed_over = choose_backend(
        recipe.kernels, device, dtype, layout, int(recipe.cache.page_tokens)
    )
    recipe = replace(recipe, kernels=kernels)
    return Resolved(recipe, family, model_config, layout, mesh, device, dtype, passed_over)
