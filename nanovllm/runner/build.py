"""Construction of a Runner from a Config: weights, cache size, kernels, graphs."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from msgspec.structs import asdict, replace
from nanovllm_kernels.compile_cache import use_folder

from nanovllm.config import Config, Recipe, cache_dir, given_or
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.split import Split
from nanovllm.layers.describe import products
from nanovllm.log import fields
from nanovllm.models.decoder import Decoder
from nanovllm.models.weights import fill
from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.places import num_ranks
from nanovllm.runner.batch import BatchPrep
from nanovllm.runner.caches import make_caches
from nanovllm.runner.graphs import graph_sizes, obstacles
from nanovllm.runner.piecewise import piecewise_sizes
from nanovllm.runner.precompile import compile_in_background, jobs_of
from nanovllm.runner.resolved import Resolved, resolved
from nanovllm.runner.room import check_room
from nanovllm.runner.runner import Runner
from nanovllm.runner.sizing import num_pages_that_fit
from nanovllm.runner.slots import Slots
from nanovllm.runner.states import states_of
from nanovllm.runner.warm import capture, largest_steps, warm_up
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.shards import Shard
from nanovllm.spec.base import drafter_of

log = logging.getLogger("engine")


@dataclass(frozen=True, slots=True)
class Built:
    runner: Runner
    recipe: Recipe  # every "auto" resolved but mixed_step_tokens
    vocab_size: int
    layout: CacheLayout


def build(config: Config, mesh: Mesh | None = None) -> Built:
    """Build the device side. Raise ConfigError if this machine cannot serve the recipe."""
    started = time.perf_counter()
    found = resolved(config, mesh)
    found.mesh.connect()
    model, device = load(config, found), found.device
    # With a GPU, torch's threads would spin for the next small copy and take cores from others.
    torch.set_num_threads(cpu_threads(found.recipe, model) if device.type == "cpu" else 1)
    loaded = time.perf_counter()
    log.info("sizing the cache, which compiles what the largest steps need")
    runner, recipe = with_caches(found, model)
    sized = time.perf_counter()
    own = found.model_config.max_position_embeddings
    log.info(
        "cache of %d pages of %d tokens, %.2f GB; a request has up to %d tokens (the model's own "
        "context is %d)",
        recipe.cache.pages,
        found.page_tokens,
        int(recipe.cache.pages) * found.page_tokens * found.layout.bytes_per_token / 1e9,
        recipe.server.max_model_tokens,
        own,
    )
    slots, most = int(recipe.schedule.slots), int(recipe.schedule.step_tokens)
    sizes = sorted({*graph_sizes(slots), *piecewise_sizes(most)})
    log.info("products by rows: %s", products(model.layers[0], model.head, sizes))
    log.info("warming up")
    warm_up(runner, recipe)
    if not obstacles(recipe):
        capture(runner, recipe)
    runner.experts.tokens_X.zero_()
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
    return Built(runner, recipe, found.model_config.vocab_size, found.layout)


def load(config: Config, found: Resolved) -> Decoder:
    """Return the model with its weights. Meanwhile compile its CuTe DSL kernels to disk."""
    check_room(found)
    use_folder(cache_dir())
    model = found.empty_model(found.device)
    with compile_in_background([] if found.mesh.rank else jobs_of(found, model)):
        fill(model, config)
    found.mesh.least(0)  # a barrier: the other ranks wait for the kernels that rank 0 compiles
    return model


def prep_and_sampler(found: Resolved, max_tokens: int) -> tuple[BatchPrep, Sampler]:
    """Return the slots' BatchPrep and sampler, for requests of up to `max_tokens`."""
    recipe, device = found.recipe, found.device
    num_slots = int(recipe.schedule.slots)
    slots = Slots(num_slots, max_tokens, found.page_tokens, device, num_drafts=recipe.num_drafts)
    sampler = Sampler(
        num_slots=num_slots,
        shard=Shard(found.mesh, found.model_config.vocab_size),
        device=device,
        tokens_NL=slots.tokens_NL,
        prompt_lengths_N=slots.prompt_lengths_N,
        kernel=recipe.kernels.sample,
    )
    return BatchPrep(slots, recipe.kernels.batch_prep), sampler


def with_caches(found: Resolved, model: Decoder) -> tuple[Runner, Recipe]:
    """Return a runner with the number of pages that fit, and the recipe with that number."""
    recipe, device, page_tokens = found.recipe, found.device, found.page_tokens
    num_slots, most = int(recipe.schedule.slots), found.max_model_tokens
    rows = prep_and_sampler(found, most)

    def runner_with(num_pages: int, checkpoints: int) -> Runner:
        caches = make_caches(found.layout, num_pages, page_tokens, found.dtype, device=device)
        kept = states_of(
            found.layout,
            num_slots=num_slots,
            num_checkpoints=checkpoints,
            num_drafts=recipe.num_drafts,
            dtype=found.dtype,
            device=device,
            in_host=recipe.cache.checkpoint_host_gib > 0,
        )
        prep, sampler = rows
        return Runner(
            model=model,
            prep=prep,
            sampler=sampler,
            caches=caches,
            backend=found.backend,
            drafter=drafter_of(recipe, sampler),
            states=kept,
        )

    def full_step() -> None:
        largest_steps(first := runner_with(1, 0), recipe)
        first.states.forget()

    num_pages = recipe.cache.pages
    if num_pages == "auto":
        fitting = num_pages_that_fit(
            recipe,
            found.layout,
            useful_pages=num_slots * rows[0].slots.max_pages,
            full_step=full_step,
            device=device,
        )
        num_pages = found.mesh.least(fitting)
        if (held := found.context_in(num_pages)) < most:
            most, rows = held, prep_and_sampler(found, held)
    checkpoints = Split(num_pages, recipe.cache, found.layout, page_tokens).checkpoints
    cache, server = replace(recipe.cache, pages=num_pages, checkpoints=checkpoints), recipe.server
    sized = replace(recipe, cache=cache, server=replace(server, max_model_tokens=most))
    return runner_with(num_pages, checkpoints), sized


def cpu_threads(recipe: Recipe, model: Decoder) -> int:
    """Return the number of threads of matrix products.

    One per 50 M weights, since threads of a small model mostly wait for each other, and at most
    this rank's share of the cores.
    """
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    num_cores = torch.get_num_threads() // (num_ranks(recipe.parallel) * recipe.parallel.dp)
    return given_or(recipe.cpu_threads, max(1, min(num_cores, num_weights // 50_000_000)))
