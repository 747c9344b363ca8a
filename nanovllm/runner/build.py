"""Construction of a Runner from a Config: weights, cache size, kernels, graphs.

Steps of padding rows only measure memory, compile kernels and capture graphs.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from msgspec.structs import asdict, replace
from nanovllm_kernels.compile_cache import use_folder
from nanovllm_kernels.device import FOLLOWING

from nanovllm.attention.paged import CUTE_ROWS
from nanovllm.config import Config, Recipe, cache_dir
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.split import Split, are_checkpoints_in_host
from nanovllm.layers.describe import products
from nanovllm.log import Progress, fields
from nanovllm.models.decoder import Decoder
from nanovllm.models.weights import filler
from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.places import num_ranks
from nanovllm.runner.adapters import AdapterBank
from nanovllm.runner.batch import BatchPrep, Slots, StepRows, decode_rows
from nanovllm.runner.caches import make_caches, states_of
from nanovllm.runner.disk import disk_of
from nanovllm.runner.graphs import graph_sizes, largest_graph, obstacles, piecewise_sizes
from nanovllm.runner.invariance import check_products, check_states
from nanovllm.runner.peers_and_disk import PeersAndDisk
from nanovllm.runner.precompile import compile_in_background, jobs_of
from nanovllm.runner.resolved import Resolved, num_pages_that_fit, resolve_config
from nanovllm.runner.roles import lender_of, offered_memory, remote_of
from nanovllm.runner.room import check_room
from nanovllm.runner.runner import Runner
from nanovllm.runner.transfer import HostPages, Mover
from nanovllm.sampling.columns import reserve_pinned
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.shards import Shard
from nanovllm.schedule import given_or
from nanovllm.spec.base import Drafter, drafter_of
from nanovllm.spec.model_base import DraftModel
from nanovllm.spec.model_drafter import ModelDrafter

log = logging.getLogger("engine")


@dataclass(frozen=True, slots=True)
class Built:
    runner: Runner
    recipe: Recipe  # every "auto" resolved except mixed_step_tokens
    vocab_size: int
    layout: CacheLayout


def build(config: Config, mesh: Mesh | None = None) -> Built:
    """Build the device side. Raise ConfigError if this machine cannot serve the recipe."""
    started = time.perf_counter()
    resolved = resolve_config(config, mesh)
    log.info("kernels: %s", resolved.reason)
    resolved.mesh.connect()
    (model, draft_model), device = load(config, resolved), resolved.device
    # With a GPU, torch's threads would spin for the next small copy and take cores from others.
    torch.set_num_threads(cpu_threads(resolved.recipe, model) if device.type == "cpu" else 1)
    if resolved.recipe.kernels.invariant and device.type == "cuda":
        check_products(model, resolved.dtype)
        check_states(model, resolved.dtype)
    loaded = time.perf_counter()
    log.info("sizing the cache, which compiles what the largest steps need")
    adapters = adapters_of(resolved.recipe, model)
    runner, recipe = with_caches(resolved, model, draft_model, adapters)
    captured = threading.Event()
    split = Split(int(recipe.cache.pages), recipe.cache, resolved.layout, resolved.page_tokens)
    add_tiers(runner, config, resolved, num_pages=split.host_pages, captured=captured)
    pages = HostPages(runner.caches, 0, runner.states.saved_NX)
    runner.offered = offered_memory(resolved, pages)
    runner.lender = lender_of(
        config, resolved, pages, int(recipe.cache.pages), offered=runner.offered
    )
    sized = time.perf_counter()
    own = resolved.model_config.max_position_embeddings
    log.info(
        "cache of %d pages of %d tokens, %.2f GB; a request has up to %d tokens (the model's own "
        "context is %d)",
        recipe.cache.pages,
        resolved.page_tokens,
        int(recipe.cache.pages) * resolved.page_tokens * resolved.layout.bytes_per_token / 1e9,
        recipe.server.max_model_tokens,
        own,
    )
    slots, most = int(recipe.schedule.slots), int(recipe.schedule.step_tokens)
    sizes = sorted({*graph_sizes(slots), *piecewise_sizes(most)})
    log.info("products by rows: %s", products(model.layers[0], model.head, sizes))
    prepare(runner, recipe)
    captured.set()
    runner.experts.tokens_X.zero_()
    log.info(
        "built %s",
        fields(
            device=device.type,
            dtype=recipe.dtype,
            **asdict(recipe.kernels),
            not_chosen=repr(resolved.passed_over) if resolved.passed_over else None,
            pages=recipe.cache.pages,
            page_tokens=recipe.cache.page_tokens,
            graphs=len(runner.graphs.plain.decode.captured),
            load_s=loaded - started,
            size_s=sized - loaded,
            capture_s=time.perf_counter() - sized,
        ),
    )
    return Built(runner, recipe, resolved.model_config.vocab_size, resolved.layout)


def load(config: Config, resolved: Resolved) -> tuple[Decoder, DraftModel | None]:
    """Return the model with its weights, and the one that drafts for it.

    Meanwhile compile CuTe DSL kernels to disk.
    """
    check_room(resolved)
    if resolved.device.type == "cuda":
        use_folder(cache_dir())
    model = resolved.empty_model(resolved.device)
    draft_model = resolved.empty_draft_model(model, resolved.device)
    with compile_in_background([] if resolved.mesh.rank else jobs_of(resolved, model, draft_model)):
        fillers = [filler(model, config)]  # which check all files before any weight is read
        if resolved.drafts is not None and draft_model is not None:
            fillers.append(resolved.drafts.loader.filler(draft_model))
        for fill in fillers:
            fill()
    resolved.mesh.least(0)  # a barrier: the other ranks wait for the kernels that rank 0 compiles
    return model, draft_model


def drafter_of_model(
    resolved: Resolved, sampler: Sampler, draft_model: DraftModel | None, max_tokens: int
) -> Drafter | None:
    """Return the recipe's drafter, or None without `speculate`."""
    speculate = resolved.recipe.speculate
    if resolved.drafts is None or draft_model is None or speculate is None:
        return drafter_of(resolved.recipe, sampler)
    return ModelDrafter(
        draft_model,
        resolved.drafts.backend,
        sampler,
        options=speculate,
        kernel=resolved.recipe.kernels.batch_prep,
        page_tokens=resolved.page_tokens,
        max_tokens=max_tokens,
    )


def prep_and_sampler(resolved: Resolved, max_tokens: int) -> tuple[BatchPrep, Sampler]:
    """Return the slots' BatchPrep and sampler, for requests of up to `max_tokens`."""
    recipe, device = resolved.recipe, resolved.device
    num_slots = int(recipe.schedule.slots)
    slots = Slots(num_slots, max_tokens, resolved.page_tokens, device, num_drafts=recipe.num_drafts)
    sampler = Sampler(
        num_slots=num_slots,
        shard=Shard(resolved.mesh, resolved.model_config.vocab_size),
        device=device,
        tokens_NL=slots.tokens_NL,
        prompt_lengths_N=slots.prompt_lengths_N,
        kernel=recipe.kernels.sample,
    )
    return BatchPrep(slots, recipe.kernels.batch_prep), sampler


def adapters_of(recipe: Recipe, model: Decoder) -> AdapterBank | None:
    """Return the recipe's adapters on the device, or None if it has none."""
    if recipe.adapters is None:
        return None
    bank = AdapterBank(recipe.adapters, model, int(recipe.schedule.slots))
    log.info(
        "adapters: %s; %d ranks of %.3f MB on the device",
        ", ".join(recipe.adapters.names) or "none yet",
        len(bank.ranks_RX),
        bank.ranks_RX[0].nbytes / 1e6,
    )
    return bank


def with_caches(
    resolved: Resolved,
    model: Decoder,
    draft_model: DraftModel | None = None,
    adapters: AdapterBank | None = None,
) -> tuple[Runner, Recipe]:
    """Return a runner with the number of pages that fit, and the recipe with that number."""
    recipe, layout = resolved.recipe, resolved.layout
    device, page_tokens = resolved.device, resolved.page_tokens
    num_slots, most = int(recipe.schedule.slots), resolved.max_model_tokens
    prep, sampler = prep_and_sampler(resolved, most)

    def runner_with(num_pages: int, checkpoints: int) -> Runner:
        states = states_of(
            layout,
            num_slots=num_slots,
            num_checkpoints=checkpoints,
            num_drafts=recipe.num_drafts,
            dtype=resolved.dtype,
            device=device,
            in_host=are_checkpoints_in_host(recipe.cache, layout),
        )
        return Runner(
            model=model,
            prep=prep,
            sampler=sampler,
            caches=make_caches(layout, num_pages, page_tokens, resolved.dtype, device=device),
            backend=resolved.backend,
            drafter=drafter_of_model(resolved, sampler, draft_model, most),
            states=states,
            draft_model=draft_model,
            adapters=adapters,
        )

    def full_step() -> None:
        runner = runner_with(1, 0)
        largest_steps(runner, recipe)
        runner.states.forget()

    num_pages = recipe.cache.pages
    if num_pages == "auto":
        fitting = num_pages_that_fit(
            recipe,
            layout,
            useful_pages=num_slots * prep.slots.max_pages,
            full_step=full_step,
            device=device,
        )
        num_pages = resolved.mesh.least(fitting)
        if resolved.context_in(num_pages) < most:
            most = resolved.context_in(num_pages)
            prep, sampler = prep_and_sampler(resolved, most)
    checkpoints = Split(num_pages, recipe.cache, layout, page_tokens).checkpoints
    sized = replace(
        recipe,
        cache=replace(recipe.cache, pages=num_pages, checkpoints=checkpoints),
        server=replace(recipe.server, max_model_tokens=most),
    )
    return runner_with(num_pages, checkpoints), sized


def add_tiers(
    runner: Runner, config: Config, resolved: Resolved, num_pages: int, captured: threading.Event
) -> None:
    """Allocate pages in host memory, and open the disk or connect to peers, by the recipe.

    `captured` is set after the capture of graphs, during which no other thread may use the device.
    """
    if num_pages:
        pages = HostPages(runner.caches, num_pages, runner.states.saved_NX)
        remote = remote_of(config, resolved, pages, captured)
        disk = disk_of(config, resolved, pages.state_parts)
        both = partial(PeersAndDisk.open, remote, disk) if remote and disk else None
        runner.mover = Mover(pages, both or remote or disk)


def cpu_threads(recipe: Recipe, model: Decoder) -> int:
    """Return the number of threads of matrix products.

    One per 50 M weights, since threads of a small model mostly wait for each other, and at most
    this rank's share of the cores.
    """
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    num_cores = torch.get_num_threads() // (num_ranks(recipe.parallel) * recipe.parallel.dp)
    return given_or(recipe.cpu_threads, max(1, min(num_cores, num_weights // 50_000_000)))


# -- steps of padding rows ------------------------------------------------------------------------


def padding_rows(
    runner: Runner, num_rows: int, tokens_each: int, *, drafted: bool = False
) -> StepRows:
    """Return rows of the padding slot, for a step of any shape without requests."""
    device, num_tokens = runner.device, num_rows * tokens_each
    slots_R = torch.full((num_rows,), runner.slots.padding, device=device)
    ones, host = np.ones(num_rows, np.int32), np.full(num_rows, runner.slots.padding, np.int32)
    rows = decode_rows(
        slots_R,
        counts_R=None,
        host_slots=host,
        num_sampled=ones,
        num_tokens=num_rows,
        width=1,
        max_length=tokens_each,
    )
    if tokens_each == 1:
        return rows
    counts_R = torch.full((num_rows,), tokens_each, dtype=torch.int32, device=device)
    if drafted:
        return decode_rows(
            slots_R,
            counts_R=counts_R,
            host_slots=host.repeat(tokens_each),
            num_sampled=tokens_each * ones,
            num_tokens=num_tokens,
            width=tokens_each,
            max_length=tokens_each,
        )
    samples_R1 = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    ends = torch.arange(tokens_each - 1, num_tokens, tokens_each, device=device)
    return dataclasses.replace(
        rows,
        counts_R=counts_R,
        sampled_at=ends,
        samples_R1=samples_R1,
        num_decodes=0,
        num_decode_tokens=0,
        num_tokens=num_tokens,
        max_new=tokens_each,
    )


@torch.inference_mode()
def run_padding(runner: Runner, num_rows: int, tokens_each: int, *, drafted: bool = False) -> None:
    """Run a step, also as one with adapters, which has other kernels and takes more memory."""
    rows = padding_rows(runner, num_rows, tokens_each, drafted=drafted)
    runner.finish(rows, runner.forward(rows), [], None)
    if runner.adapters is not None:
        rows = dataclasses.replace(rows, adapted=True)
        runner.finish(rows, runner.forward(rows), [], None)


def largest_steps(runner: Runner, recipe: Recipe) -> None:
    """Run the steps that take most memory: a full prefill, and all slots' rows with drafts."""
    step_tokens, longest = int(recipe.schedule.step_tokens), int(recipe.server.max_model_tokens)
    num_rows = -(-step_tokens // longest)
    run_padding(runner, num_rows, step_tokens // num_rows)
    each = 1 + runner.num_drafts
    run_padding(runner, min(int(recipe.schedule.slots), step_tokens // each), each, drafted=True)


def prepare(runner: Runner, recipe: Recipe) -> None:
    """Do what the first steps would otherwise wait for: kernels, CUDA graphs, pinned memory.

    Pinned memory comes last, since torch frees what is not in use before each capture.
    """
    log.info("warming up")
    warm_up(runner, recipe)
    if not obstacles(recipe):
        capture(runner, recipe)
    if runner.device.type == "cuda":
        reserve_pinned()


def warm_up(runner: Runner, recipe: Recipe) -> None:
    """Compile all kernels that the first requests would otherwise wait for."""
    if runner.device.type == "cpu":
        run_padding(runner, 1, 2)
        return
    longest = min(int(recipe.schedule.step_tokens), int(recipe.server.max_model_tokens))
    for num_rows, tokens_each in [(1, 1), (1, 2), (1, 17), (2, longest // 2), (1, longest)]:
        run_padding(runner, num_rows, max(1, min(tokens_each, longest)))
    if drafts := runner.num_drafts:  # more rows than any graph has
        most = max(FOLLOWING // (1 + drafts) + 1, CUTE_ROWS.stop)
        run_padding(runner, min(most, int(recipe.schedule.slots)), 1 + drafts, drafted=True)
    with torch.inference_mode():
        logits_SV = runner.forward(padding_rows(runner, 1, 1)).logits_SV
        assert logits_SV is not None
        runner.sampler.warm_up(logits_SV)
    torch.cuda.synchronize(runner.device)


@torch.inference_mode()
def capture(runner: Runner, recipe: Recipe) -> None:
    widths = {1, 1 + runner.num_drafts}
    slots = int(recipe.schedule.slots)
    sizes = [(size, w) for w in widths for size in graph_sizes(largest_graph(slots, w))]
    most = min(recipe.kernels.mixed_graph_tokens, int(recipe.schedule.step_tokens))
    piecewise = piecewise_sizes(most)
    kinds = [runner.graphs.plain]
    if runner.adapters is not None and not runner.adapters.has_experts:
        kinds.append(runner.graphs.adapted)
    draws = [graphs for kind in kinds for graphs in kind.draws.values()]
    mixed, decode = [kind.mixed for kind in kinds], [kind.decode for kind in kinds]
    captured = [(graphs, graphs.distinct(sizes)) for graphs in (*decode, *draws)]
    num_graphs = sum(len(each) for _, each in captured) + len(mixed) * len(piecewise)
    progress = Progress(log, "capturing", num_graphs, "CUDA graphs")
    of_draws = torch.cuda.graph_pool_handle()
    for graphs, each in captured:
        pool = None if graphs in decode else of_draws
        graphs.capture(each, int(recipe.server.max_model_tokens), progress.advance, pool)
    for pieces in mixed:
        pieces.capture(piecewise, progress.advance)
    progress.finish()
