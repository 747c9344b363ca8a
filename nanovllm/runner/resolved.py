"""Resolution of a recipe's "auto" values on this machine, before anything is loaded."""

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
    recipe: Recipe  # every "auto" resolved but cache.pages and mixed_step_tokens
    family: type[Decoder]
    model_config: DecoderConfig
    layout: CacheLayout
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend
    passed_over: str  # preferred attention backends that were not chosen, with reasons
    asked_context: int | Auto  # server.max_model_tokens of the recipe

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
        """Return server.max_model_tokens for a cache of `num_pages`.

        Raise ConfigError if the cache is too small for the recipe's value.
        """
        asked, tokens = self.asked_context, self.max_model_tokens
        return fitting_context(asked, tokens, num_pages, self.recipe, layout=self.layout)

    def empty_model(self, device: torch.device) -> Decoder:
        """Return the model with uninitialised parameters. On "meta" it has shapes only.

        Raise ConfigError if the recipe names a kernel that cannot run here, or a placement of
        experts that does not fit the model.
        """
        ops = select_ops(self.recipe.kernels, self.device)
        ops = dataclasses.replace(ops, experts=ops.experts.as_asked(self.recipe.experts))
        with device, default_dtype(self.dtype):
            return self.family(self.model_config, self.mesh, ops, self.max_model_tokens)


def resolved(config: Config, mesh: Mesh | None = None) -> Resolved:
    """Resolve the recipe. Raise ConfigError if this machine cannot serve it.

    `mesh` is this process's; None means that of rank 0.
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
    most = fitting_context(asked, own, pages, recipe, layout=layout)
    recipe = replace(recipe, server=replace(recipe.server, max_model_tokens=most))
    backend, kernels, passed_over = choose_backend(
        recipe.kernels, device, dtype, layout, page_tokens=int(recipe.cache.page_tokens)
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
    """Return the layout with bfloat16 recurrent states. Raise ConfigError if it has no states."""
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
        # A single stream for all work: plans run in order, and graphs can be captured.
        torch.cuda.set_stream(torch.cuda.Stream())
        return torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype)
    return torch.device("cpu"), getattr(torch, dtype)


def without_autos(recipe: Recipe, device: torch.device, dtype: torch.dtype, most: int) -> Recipe:
    """Return the recipe with every "auto" resolved but the cache's pages and the context.

    `most` is the default of schedule.step_tokens on a GPU.
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
