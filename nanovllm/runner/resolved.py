"""Resolution of a recipe's "auto" values on this machine.

All but the size of the cache is resolved before anything is loaded. That size is the memory which
remains after the measured peak of a full step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.choose import choose_backend
from nanovllm.attention.grouped import bytes_of_element
from nanovllm.config import Cache, Config, ConfigError, Recipe, Speculate, resolve_context
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.split import Split, host_page_bytes, room_for_pages, running_bytes
from nanovllm.layers.fp8 import has_kernel
from nanovllm.layers.kernels import CHOSEN_ELSEWHERE, OPERATIONS, fastest, reason, select_ops
from nanovllm.layers.ops import Ops
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.models.weights import default_dtype
from nanovllm.parallel.cut import check_cut
from nanovllm.parallel.mesh import Mesh, first_rank
from nanovllm.registry import resolve
from nanovllm.schedule import Auto, given_or, resolve_schedule
from nanovllm.spec import DRAFT_LOADERS
from nanovllm.spec.model_base import DraftLoader, DraftModel

GIB = 1 << 30
MEASURED_LATER = 1 << 30  # pages


@dataclass(frozen=True, slots=True)
class DraftSource:
    """The model that drafts, before it is made."""

    loader: DraftLoader
    backend: AttentionBackend  # for its own layers


@dataclass(frozen=True, slots=True)
class Resolved:
    recipe: Recipe  # every "auto" resolved except cache.pages and mixed_step_tokens
    family: type[Decoder]
    model_config: DecoderConfig
    layout: CacheLayout  # of the model's layers, then of the draft model's
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend
    reason: str  # implementations that kernels "auto" means here, and why
    passed_over: str  # preferred attention backends that were not chosen, with reasons
    asked_context: int | Auto  # server.max_model_tokens of the recipe
    drafts: DraftSource | None = None

    @property
    def page_tokens(self) -> int:
        return int(self.recipe.cache.page_tokens)

    @property
    def own_layout(self) -> CacheLayout:
        """The layout without the layers of a draft model."""
        count = len(self.drafts.loader.layout.paged) if self.drafts is not None else 0
        return replace(self.layout, paged=self.layout.paged[: len(self.layout.paged) - count])

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
        wanted, tokens = self.asked_context, self.max_model_tokens
        return fitting_context(wanted, tokens, num_pages, self.recipe, layout=self.layout)

    def empty_model(self, device: torch.device) -> Decoder:
        """Return the model with uninitialised parameters. On "meta" it has shapes only.

        Raise ConfigError if the recipe names a kernel that cannot run here, or a placement of
        experts that does not fit the model.
        """
        with device, default_dtype(self.dtype):
            return self.family(self.model_config, self.mesh, self._ops(), self.max_model_tokens)

    def empty_draft_model(self, target: Decoder, device: torch.device) -> DraftModel | None:
        """Return the model that drafts for `target`, with uninitialised parameters, or None."""
        if self.drafts is None:
            return None
        speculate, most = self.recipe.speculate, self.max_model_tokens
        is_fp8 = speculate is not None and speculate.dtype == "fp8"
        with device, default_dtype(self.dtype):
            return self.drafts.loader.empty(target, self._ops(), most, fp8=is_fp8)

    def empty_models(self, device: torch.device) -> tuple[Decoder, nn.ModuleList]:
        """Return the model, and it together with the model that drafts for it."""
        model = self.empty_model(device)
        drafts: Any = self.empty_draft_model(model, device)
        return model, nn.ModuleList([model] if drafts is None else [model, drafts])

    def _ops(self) -> Ops:
        ops = select_ops(self.recipe.kernels, self.device)
        return dataclasses.replace(ops, experts=ops.experts.with_options(self.recipe.experts))


def resolve_config(config: Config, mesh: Mesh | None = None) -> Resolved:
    """Resolve the recipe. Raise ConfigError if this machine cannot serve it.

    `mesh` is this process's; None means that of rank 0.
    """
    device, dtype = choose_device(config.recipe)
    if config.recipe.kernels.invariant:
        refuse_variant(config.recipe, device)
    family, model_config = read_model_config(config)
    mesh = mesh or first_rank(config.recipe.parallel)
    check_cut(mesh, model_config)
    element_bytes = bytes_of_element(config.recipe.cache.dtype, dtype, device)
    own = layout = family.cache_layout(model_config, mesh, element_bytes)
    if config.recipe.cache.state_dtype == "bfloat16":
        own = layout = with_short_states(layout)
    loader = loader_of(config, model_config, mesh, element_bytes)
    if loader is not None:
        layout = layout.followed_by(loader.layout)
    recipe = without_autos(config.recipe, device, dtype, model_config.STEP_TOKENS)
    wanted, longest = recipe.server.max_model_tokens, model_config.max_position_embeddings
    pages = known_pages(recipe, layout) or MEASURED_LATER
    check_host_pages(
        recipe, Split(pages, recipe.cache, layout, int(recipe.cache.page_tokens)), mesh
    )
    most = fitting_context(wanted, longest, pages, recipe, layout=layout)
    recipe = replace(recipe, server=replace(recipe.server, max_model_tokens=most))
    choose = partial(
        choose_backend,
        recipe.kernels,
        device,
        dtype,
        page_tokens=int(recipe.cache.page_tokens),
    )
    backend, kernels, passed_over = choose(own)
    drafts = None if loader is None else DraftSource(loader, choose(loader.layout)[0])
    speculate = with_draft_dtype(recipe, loader, device, dtype)
    return Resolved(
        recipe=replace(recipe, kernels=kernels, speculate=speculate),
        family=family,
        model_config=model_config,
        layout=layout,
        mesh=mesh,
        device=device,
        dtype=dtype,
        backend=backend,
        reason=reason(config.recipe.kernels, device),
        passed_over=passed_over,
        asked_context=wanted,
        drafts=drafts,
    )


def refuse_variant(recipe: Recipe, device: torch.device) -> None:
    """Raise ConfigError if a key makes a request's numbers depend on the others of its steps."""
    if recipe.kernels.eager and device.type == "cuda":
        raise ConfigError("kernels.eager is true, but kernels.invariant needs a GPU's kernels")
    states, experts = recipe.cache.state_dtype, recipe.experts
    rates = [] if recipe.speculate is None else recipe.speculate.accept
    slots, copies = "slots choose experts", "pages choose among copies of an expert"
    for key, value, is_variant, cause in (
        ("cache.state_dtype", states, states == "bfloat16", "ends of steps round the states"),
        ("experts.routing", experts.routing, experts.routing == "uniform", slots),
        ("experts.placement", experts.placement, experts.placement is not None, copies),
        ("speculate.accept", rates, bool(rates), "drafts are accepted at random"),
    ):
        if is_variant:
            raise ConfigError(f"{key} is {value}, but {cause}; drop it or kernels.invariant")


def loader_of(
    config: Config, model_config: DecoderConfig, mesh: Mesh, element_bytes: int
) -> DraftLoader | None:
    """Return the loader of the recipe's draft model, or None if no model drafts."""
    speculate = config.recipe.speculate
    if speculate is None or speculate.method not in DRAFT_LOADERS:
        return None
    make: Callable[..., DraftLoader] = resolve(DRAFT_LOADERS, speculate.method)
    return make(config, model_config, mesh, element_bytes)


def with_draft_dtype(
    recipe: Recipe, loader: DraftLoader | None, device: torch.device, dtype: torch.dtype
) -> Speculate | None:
    """Return the recipe's `speculate` with dtype resolved: fp8 if a kernel supports it."""
    speculate = recipe.speculate
    if speculate is None or loader is None or loader.fp8_shape is None:
        return speculate
    if speculate.dtype != "auto":
        return speculate
    is_fp8 = has_kernel(select_ops(recipe.kernels, device), loader.fp8_shape, dtype)
    return replace(speculate, dtype="fp8" if is_fp8 else "own")


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
    """Return the recipe with every "auto" resolved except the cache's pages and the context.

    `most` is the default of schedule.step_tokens on a GPU.
    """
    on_cpu = device.type == "cpu"
    cache, kernels = recipe.cache, recipe.kernels
    for name in CHOSEN_ELSEWHERE:
        if on_cpu and getattr(kernels, name) == "triton":
            raise ConfigError(f"kernels.{name} is triton, which needs a GPU; use torch")
    names = (*OPERATIONS, *CHOSEN_ELSEWHERE)
    best = partial(fastest, device=device, invariant=kernels.invariant)
    chosen = {name: best(name) for name in names if getattr(kernels, name) == "auto"}
    return replace(
        recipe,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        schedule=resolve_schedule(recipe.schedule, on_cpu=on_cpu, most=most),
        cache=replace(cache, page_tokens=given_or(cache.page_tokens, 16 if on_cpu else 128)),
        kernels=replace(kernels, **chosen),
    )


# -- size of the cache ----------------------------------------------------------------------------


def num_pages_that_fit(
    recipe: Recipe,
    layout: CacheLayout,
    *,
    useful_pages: int,
    full_step: Callable[[], None],
    device: torch.device,
) -> int:
    """Return the number of pages of the cache.

    `full_step` runs the largest possible step, with the states of all slots. `useful_pages` is the
    maximum that all slots can hold together. Raise ConfigError if too few pages fit.
    """
    if (pages := known_pages(recipe, layout)) is None:
        torch.cuda.reset_peak_memory_stats(device)
        full_step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()  # frees the slots' states of full_step
        left = int(total * recipe.cache.memory_fraction) - peak - others - GIB  # 1 GiB for graphs
        pages = pages_in(left, recipe.cache, layout)
    return min(pages, useful_pages)


def pages_in(left: int, cache: Cache, layout: CacheLayout) -> int:
    """Return the number of pages in `left` bytes, next to checkpoints and the padding page.

    Raise ConfigError if fewer than two fit.
    """
    room = room_for_pages(left, cache, layout)
    page_bytes = layout.bytes_per_token * int(cache.page_tokens)
    pages = room // page_bytes - 1
    if pages < 2:
        raise ConfigError(
            f"no room for a cache: {room / GIB:.2f} GiB left, a page takes {page_bytes / GIB:.3f}; "
            "raise cache.memory_fraction (cache.cpu_gib on a CPU) or lower schedule.step_tokens"
        )
    return pages


def check_host_pages(recipe: Recipe, split: Split, mesh: Mesh) -> None:
    """Raise ConfigError if the recipe needs pages in host memory, or cannot have them.

    A state on its way to a disk or from a prefill server takes the place of some pages there.
    """
    if split.host_pages and mesh.lanes > 1:
        raise ConfigError("cache.host_gib needs parallel.ep of at most tp; drop one of them")
    each = host_page_bytes(split.layout, split.page_tokens)
    least = 1 + -(-split.layout.bytes_per_state // each)
    if split.host_pages >= least:
        return
    for key, needs in (
        ("cache.disk", recipe.cache.disk is not None),
        ("transfer.role decode", recipe.transfer is not None and recipe.transfer.role == "decode"),
    ):
        if needs:
            raise ConfigError(
                f"{key} needs {least} pages in host memory, and cache.host_gib has room for "
                f"{split.host_pages}; raise it, or lower cache.checkpoints"
            )


def known_pages(recipe: Recipe, layout: CacheLayout) -> int | None:
    """Return the number of pages, or None if it must be measured (on a GPU)."""
    if recipe.cache.pages != "auto":
        return recipe.cache.pages
    if recipe.device != "cpu":
        return None
    left = int(recipe.cache.cpu_gib * GIB) - running_bytes(layout, recipe)
    return pages_in(left, recipe.cache, layout)


def fitting_context(
    wanted: int | Auto, model_tokens: int, num_pages: int, recipe: Recipe, layout: CacheLayout
) -> int:
    """Return `server.max_model_tokens` as a number for which the cache holds one request.

    Raise ConfigError if `wanted` exceeds the cache or the model's context.
    """
    page_tokens = int(recipe.cache.page_tokens)
    pages = 0 if wanted == "auto" else -(-wanted // page_tokens)
    if recipe.cache.pages != "auto":
        cure = f"--set cache.pages={pages}"
    elif recipe.device == "cpu":
        split = Split(pages, recipe.cache, layout, page_tokens)
        bytes_needed = running_bytes(layout, recipe) + split.total
        cure = f"--set cache.cpu_gib={math.ceil(10 * bytes_needed / GIB) / 10:g}"
    else:
        cure = "raise cache.memory_fraction"
    size = f"{num_pages} pages of {page_tokens}, {layout.bytes_per_token / 1024:.0f} KiB a token"
    return resolve_context(wanted, model_tokens, num_pages * page_tokens, f"{size}; {cure}")
