"""What a recipe becomes on this machine, as far as that is known before anything is loaded.

Knows neither weights nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from msgspec.structs import replace

from nanovllm.attention.choose import Factory, choose_backend
from nanovllm.config import Config, ConfigError, Recipe, given_or, resolve_schedule
from nanovllm.dist.mesh import Mesh
from nanovllm.kv.layout import CacheLayout
from nanovllm.layers.ops import OPERATIONS, fastest, select_ops
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.models.weights import default_dtype

MOST_TOKENS = 32768  # context served by default, when the model's own is longer


@dataclass(frozen=True, slots=True)
class Resolved:
    recipe: Recipe  # without any "auto" but cache.pages
    family: type[Decoder]
    model_config: DecoderConfig
    layout: CacheLayout
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    backend: Factory
    passed_over: str  # attention backends that were not chosen, and why

    @property
    def page_tokens(self) -> int:
        return int(self.recipe.cache.page_tokens)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @property
    def max_model_tokens(self) -> int:
        return int(self.recipe.server.max_model_tokens)

    def empty_model(self, device: torch.device) -> Decoder:
        """With its tables, but nothing in its parameters. On "meta" it has shapes alone.

        Raises ConfigError if the recipe asks for a kernel that cannot run here.
        """
        ops = select_ops(self.recipe.kernels, self.device)
        with device, default_dtype(self.dtype):
            return self.family(self.model_config, self.mesh, ops, self.max_model_tokens)


def resolved(config: Config) -> Resolved:
    """Raises ConfigError if this machine cannot serve the recipe."""
    device, dtype = choose_device(config.recipe)
    family, model_config = read_model_config(config)
    recipe = without_autos(config.recipe, device, dtype, model_config.max_position_embeddings)
    mesh = Mesh()
    layout = family.cache_layout(model_config, mesh, dtype.itemsize)
    backend, kernels, passed_over = choose_backend(
        recipe.kernels, device, dtype, layout, int(recipe.cache.page_tokens)
    )
    return Resolved(
        recipe=replace(recipe, kernels=kernels),
        family=family,
        model_config=model_config,
        layout=layout,
        mesh=mesh,
        device=device,
        dtype=dtype,
        backend=backend,
        passed_over=passed_over,
    )


def choose_device(recipe: Recipe) -> tuple[torch.device, torch.dtype]:
    name = recipe.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but no CUDA device is visible; use --device cpu")
    if recipe.parallel.tp != 1:
        raise ConfigError(f"parallel.tp is {recipe.parallel.tp}; this version runs on one device")
    dtype = recipe.dtype
    if dtype == "auto":
        dtype = "bfloat16" if name == "cuda" else "float32"
    if name == "cuda":
        # One stream of our own for everything: plans run in order, and graphs can be captured.
        torch.cuda.set_stream(torch.cuda.Stream())
        return torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype)
    return torch.device("cpu"), getattr(torch, dtype)


def without_autos(
    recipe: Recipe, device: torch.device, dtype: torch.dtype, model_tokens: int
) -> Recipe:
    """Every "auto" that needs no measurement."""
    on_cpu = device.type == "cpu"
    cache, server, kernels = recipe.cache, recipe.server, recipe.kernels
    most = given_or(server.max_model_tokens, min(model_tokens, MOST_TOKENS))
    if most > model_tokens:
        raise ConfigError(
            f"server.max_model_tokens is {most}; the model's context is {model_tokens} tokens"
        )
    names = (*OPERATIONS, "sample", "batch_prep")
    chosen = {k: fastest(k, device) for k in names if getattr(kernels, k) == "auto"}
    return replace(
        recipe,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        schedule=resolve_schedule(recipe.schedule, on_cpu=on_cpu),
        cache=replace(cache, page_tokens=given_or(cache.page_tokens, 16 if on_cpu else 128)),
        server=replace(server, max_model_tokens=most),
        kernels=replace(kernels, **chosen),
    )
