"""From a Config to a Runner: device, weights, cache size, kernels, graphs. Resolves every "auto".

Knows no requests and no sockets.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from msgspec.structs import asdict, replace
from nanovllm_kernels.kept import keep_in

from nanovllm.attention.choose import Factory, choose_backend
from nanovllm.config import (
    Config,
    ConfigError,
    Recipe,
    cache_dir,
    given_or,
    resolve_schedule,
)
from nanovllm.dist.mesh import Mesh
from nanovllm.kv.layout import CacheLayout
from nanovllm.layers.ops import Ops, fastest, select_ops
from nanovllm.log import fields
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.models.weights import load_model
from nanovllm.runner.batch import BatchPrep
from nanovllm.runner.graphs import obstacles
from nanovllm.runner.runner import Runner
from nanovllm.runner.sizing import make_caches, num_pages_that_fit
from nanovllm.runner.slots import Slots
from nanovllm.runner.warm import capture, largest_steps, warm_up
from nanovllm.sampling.sampler import Sampler

log = logging.getLogger("engine")
MOST_TOKENS = 32768  # context served by default, when the model's own is longer


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a recipe becomes on this machine, as far as is known before anything is loaded."""

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


@dataclass(frozen=True, slots=True)
class Built:
    runner: Runner
    recipe: Recipe  # without any "auto"
    num_pages: int
    max_model_tokens: int
    vocab_size: int


def build(config: Config) -> Built:
    """Raises ConfigError, with one line for the user, if this machine cannot serve the recipe."""
    started = time.perf_counter()
    found = resolved(config)
    model, device = load(config, found), found.device
    # Beside a GPU, threads that wait for the next small copy would take the cores of the others.
    torch.set_num_threads(cpu_threads(found.recipe, model) if device.type == "cpu" else 1)
    loaded = time.perf_counter()
    runner, recipe = with_caches(found, model)
    sized = time.perf_counter()
    warm_up(runner, recipe)
    if not obstacles(recipe):
        capture(runner, recipe)
    log.info(
        "built %s",
        fields(
            device=device.type,
            dtype=recipe.dtype,
            **asdict(recipe.kernels),
            not_chosen=repr(found.passed_over) if found.passed_over else None,
            pages=recipe.cache.pages,
            page_tokens=recipe.cache.page_tokens,
            graphs=len(runner.graphs.captured),
            load_s=loaded - started,
            size_s=sized - loaded,
            capture_s=time.perf_counter() - sized,
        ),
    )
    return Built(
        runner=runner,
        recipe=recipe,
        num_pages=int(recipe.cache.pages),
        max_model_tokens=int(recipe.server.max_model_tokens),
        vocab_size=found.model_config.vocab_size,
    )


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


def load(config: Config, found: Resolved) -> Decoder:
    """The model with its weights."""
    ops = select_ops(found.recipe.kernels, found.device)
    most = int(found.recipe.server.max_model_tokens)
    return load_model(config, found.mesh, found.device, found.dtype, ops, most)


def with_caches(found: Resolved, model: Decoder) -> tuple[Runner, Recipe]:
    """A runner with as many pages as fit, and the recipe that says so."""
    recipe, device, page_tokens = found.recipe, found.device, found.page_tokens
    num_slots = int(recipe.schedule.slots)
    slots = Slots(num_slots, int(recipe.server.max_model_tokens), page_tokens, device)
    prep = BatchPrep(slots, recipe.kernels.batch_prep)
    sampler = Sampler(
        num_slots=num_slots,
        vocab_size=found.model_config.vocab_size,
        device=device,
        tokens_NL=slots.tokens_NL,
        prompt_lengths_N=slots.prompt_lengths_N,
        kernel=recipe.kernels.sample,
    )
    keep_in(cache_dir() / "cute")  # before any runs

    def runner_with(num_pages: int) -> Runner:
        caches = make_caches(found.layout, num_pages, page_tokens, found.dtype, device)
        return Runner(model, slots, prep, sampler, caches, found.backend(caches), device)

    num_pages = recipe.cache.pages
    if num_pages == "auto":
        num_pages = num_pages_that_fit(
            recipe,
            found.layout,
            page_tokens=page_tokens,
            useful_pages=num_slots * slots.max_pages,
            full_step=lambda: largest_steps(runner_with(1), recipe),
            device=device,
        )
    cache = replace(recipe.cache, pages=num_pages)
    return runner_with(num_pages), replace(recipe, cache=cache)


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


def cpu_threads(recipe: Recipe, model: Decoder) -> int:
    """One for each 50 M weights: threads of a small model mostly wait for each other."""
    if recipe.cpu_threads != "auto":
        return recipe.cpu_threads
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    return max(1, min(torch.get_num_threads(), num_weights // 50_000_000))


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
    names = (*Ops.__dataclass_fields__, "sample", "batch_prep")
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
