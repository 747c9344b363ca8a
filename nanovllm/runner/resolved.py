"""What a recipe becomes on this machine, as far as that is known before anything is loaded.

Knows neither weights nor requests.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.choose import choose_backend
from nanovllm.attention.grouped import bytes_of_element
from nanovllm.config import Auto, Config, ConfigError, Recipe, given_or, resolve_schedule
from nanovllm.kv.layout import CacheLayout
from nanovllm.layers.ops import OPERATIONS, fastest, select_ops
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.models.weights import default_dtype
from nanovllm.parallel.cut import check_cut
from nanovllm.parallel.mesh import Mesh, first_rank
from nanovllm.runner.sizing import fitting_context, known_pages

MEASURED_LATER = 1 << 30  # pages


@dataclass(frozen=True, slots=True)
class Resolved:
    recipe: Recipe  # without any "auto" but cache.pages and mixed_step_tokens
    family: type[Decoder]
    model_config: DecoderConfig
    layout: CacheLayout
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend
    passed_over: str  # attention backends that were not chosen, and why
    asked_context: int | Auto  # server.max_model_tokens, before the cache's size had its say

    @property
    def page_tokens(self) -> int:
        return int(self.recipe.cache.page_tokens)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @property
    def max_model_tokens(self) -> int:
        return int(self.recipe.server.max_model_tokens)

    def context_in(self, num_pages: int) -> int:
        """server.max_model_tokens in a cache of so many pages. Raises ConfigError: too few."""
        asked, tokens = self.asked_context, self.max_model_tokens
        return fitting_context(asked, tokens, num_pages, self.recipe, self.layout)

    def empty_model(self, device: torch.device) -> Decoder:
        """With its tables, but nothing in its parameters. On "meta" it has shapes alone.

        Raises ConfigError if the recipe asks for a kernel that cannot run here, or a placement of
        experts that does not fit.
        """
        ops = select_ops(self.recipe.kernels, self.device)
        ops = dataclasses.replace(ops, experts=ops.experts.as_asked(self.recipe.experts))
        with device, default_dtype(self.dtype):
            return self.family(self.model_config, self.mesh, ops, self.max_model_tokens)


def resolved(config: Config, mesh: Mesh | None = None) -> Resolved:
    """Raises ConfigError if this machine cannot serve the recipe.

    `mesh`: this process's place; None: rank 0's, of as many as the recipe has.
    """
    device, dtype = choose_device(config.recipe)
    family, model_config = read_model_config(config)
    mesh = mesh or first_rank(config.recipe.parallel)
    check_cut(mesh, model_config)
    element_bytes = bytes_of_element(config.recipe.cache.dtype, dtype, device)
    layout = family.cache_layout(model_config, mesh, element_bytes)
    if config.recipe.cache.state_dtype == "bfloat16":
        layout = with_short_states(layout)
    recipe = without_autos(config.recipe, device, dtype, model_config.STEP_TOKENS)
    asked, own = recipe.server.max_model_tokens, model_config.max_position_embeddings
    pages = known_pages(recipe, layout) or MEASURED_LATER
    most = fitting_context(asked, own, pages, recipe, layout)
    recipe = replace(recipe, server=replace(recipe.server, max_model_tokens=most))
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
        asked_context=asked,
    )


def with_short_states(layout: CacheLayout) -> CacheLayout:
    """The layout with recurrences in bfloat16. Raises ConfigError if it has none."""
    if layout.state is None:
        raise ConfigError("cache.state_dtype is bfloat16, but the model keeps no recurrent states")
    return replace(layout, state=replace(layout.state, recurrent_bytes=2))


def choose_device(recipe: Recipe) -> tuple[torch.device, torch.dtype]:
    name = recipe.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but no CUDA device is visible; use --device cpu")
    dtype = recipe.dtype
    if dtype == "auto":
        dtype = "bfloat16" if name == "cuda" else "float32"
    if name == "cuda":
        # One stream of our own for everything: plans run in order, and graphs can be captured.
        torch.cuda.set_stream(torch.cuda.Stream())
        return torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype)
    return torch.device("cpu"), getattr(torch, dtype)


def without_autos(recipe: Recipe, device: torch.device, dtype: torch.dtype, most: int) -> Recipe:
    """The recipe without any "auto" but the cache's pages and the context: they go together.

    `most`: tokens of a step, where a GPU's recipe leaves that open.
    """
    on_cpu = device.type == "cpu"
    cache, kernels = recipe.cache, recipe.kernels
    for name in ("sample", "batch_prep"):
        if on_cpu and getattr(kernels, name) == "triton":
            raise ConfigError(f"kernels.{name} is triton, which needs a GPU; use torch")
    names = (*OPERATIONS, "sample", "batch_prep")
    chosen = {k: fastest(k, device) for k in names if getattr(kernels, k) == "auto"}
    return replace(
        recipe,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        schedule=resolve_schedule(recipe.schedule, on_cpu=on_cpu, most=most),
        cache=replace(cache, page_tokens=given_or(cache.page_tokens, 16 if on_cpu else 128)),
        kernels=replace(kernels, **chosen),
    )
