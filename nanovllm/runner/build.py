"""From a Config to a Runner: device, weights, cache size, kernels, graphs. Resolves every "auto".

Knows no requests and no sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from nanovllm.attention.base import PagedKV
from nanovllm.attention.choose import choose_backend
from nanovllm.config import Config, ConfigError, Recipe
from nanovllm.dist.mesh import Mesh
from nanovllm.layers.ops import select_ops
from nanovllm.log import fields
from nanovllm.models.config import read_model_config
from nanovllm.models.weights import load_model
from nanovllm.runner.batch import StepRows
from nanovllm.runner.graphs import graph_sizes
from nanovllm.runner.runner import Runner
from nanovllm.runner.sizing import make_caches, num_pages_that_fit
from nanovllm.runner.slots import Slots
from nanovllm.sampling.base import SampleRows
from nanovllm.sampling.sampler import Sampler

log = logging.getLogger("engine")
MOST_TOKENS = 32768  # context served by default, when the model's own is longer


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
    device, dtype = choose_device(config.recipe)
    _, model_config = read_model_config(config)
    recipe = resolve(config.recipe, device, dtype, model_config.max_position_embeddings)
    slots_wanted, max_tokens = int(recipe.schedule.slots), int(recipe.server.max_model_tokens)
    mesh = Mesh()
    ops = select_ops(recipe.kernels, device)
    model = load_model(config, mesh, device, dtype, ops, max_tokens)
    loaded = time.perf_counter()
    layout = model.cache_layout(model_config, mesh, dtype.itemsize)
    page_tokens = int(recipe.cache.page_tokens)
    slots = Slots(slots_wanted, max_tokens, page_tokens, device)
    sampler = Sampler(
        num_slots=slots_wanted,
        vocab_size=model_config.vocab_size,
        device=device,
        tokens_NL=slots.tokens_NL,
        prompt_lengths_N=slots.prompt_lengths_N,
        kernel="triton" if recipe.kernels.sample == "triton" else "torch",
    )
    make_backend, chosen, passed_over = choose_backend(
        recipe.kernels.attention, device, dtype, layout, page_tokens
    )

    def runner_on(caches: tuple[PagedKV, ...]) -> Runner:
        return Runner(model, slots, sampler, caches, make_backend(caches), device)

    def full_step() -> None:
        largest_steps(runner_on(make_caches(layout, 1, page_tokens, dtype, device)), recipe)

    num_pages = recipe.cache.pages
    if num_pages == "auto":
        num_pages = num_pages_that_fit(
            recipe,
            layout,
            page_tokens=page_tokens,
            useful_pages=slots_wanted * slots.max_pages,
            full_step=full_step,
            device=device,
        )
    runner = runner_on(make_caches(layout, num_pages, page_tokens, dtype, device))
    recipe = replace(
        recipe,
        cache=replace(recipe.cache, pages=num_pages),
        kernels=replace(recipe.kernels, attention=chosen),
    )
    sized = time.perf_counter()
    warm_up(runner, recipe)
    if recipe.kernels.cuda_graphs and device.type == "cuda":
        sizes = graph_sizes(slots_wanted)
        with torch.inference_mode():
            runner.graphs.capture(sizes, max_tokens)
    log.info(
        "built %s",
        fields(
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            attention=chosen,
            not_chosen=repr(passed_over) if passed_over else None,
            pages=num_pages,
            page_tokens=page_tokens,
            graphs=len(runner.graphs.captured),
            load_s=loaded - started,
            size_s=sized - loaded,
            capture_s=time.perf_counter() - sized,
        ),
    )
    return Built(runner, recipe, num_pages, max_tokens, model_config.vocab_size)


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


def resolve(recipe: Recipe, device: torch.device, dtype: torch.dtype, model_tokens: int) -> Recipe:
    """Every "auto" that needs no measurement."""
    on_cpu = device.type == "cpu"
    schedule, cache, server, kernels = (
        recipe.schedule,
        recipe.cache,
        recipe.server,
        recipe.kernels,
    )

    def pick(value: object, on_cpu_value: int, on_gpu_value: int) -> int:
        return int(str(value)) if value != "auto" else on_cpu_value if on_cpu else on_gpu_value

    most = pick(server.max_model_tokens, *[min(model_tokens, MOST_TOKENS)] * 2)
    if most > model_tokens:
        raise ConfigError(
            f"server.max_model_tokens is {most}; the model's context is {model_tokens} tokens"
        )
    step_tokens = pick(schedule.step_tokens, 512, 8192)
    slots = min(pick(schedule.slots, 16, 512), step_tokens)
    names = ("rms_norm", "add_rms_norm", "silu_mul", "rope_store", "sample")
    fast = "torch" if on_cpu else "triton"
    chosen = {k: fast for k in names if getattr(kernels, k) == "auto"}
    return replace(
        recipe,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        schedule=replace(schedule, step_tokens=step_tokens, slots=slots),
        cache=replace(cache, page_tokens=pick(cache.page_tokens, 16, 128)),
        server=replace(server, max_model_tokens=most),
        kernels=replace(kernels, **chosen),
    )


def dead_rows(runner: Runner, num_rows: int, tokens_each: int) -> StepRows:
    """Rows of the dead slot: any shape of step can be run without a request."""
    slots_R = torch.full((num_rows,), runner.slots.dead, device=runner.device)
    counts_R = torch.full((num_rows,), tokens_each, dtype=torch.int32, device=runner.device)
    host = np.full(num_rows, runner.slots.dead, np.int32)
    return StepRows(
        slots_R=slots_R,
        counts_R=counts_R if tokens_each > 1 else None,
        sampled_rows_S=None,
        sampled_slots=host,
        num_tokens=num_rows * tokens_each,
        max_new=tokens_each,
        max_length=tokens_each,
    )


@torch.inference_mode()
def run_dead(runner: Runner, num_rows: int, tokens_each: int) -> None:
    rows = dead_rows(runner, num_rows, tokens_each)
    forwarded = runner.forward(rows)
    assert forwarded.logits_SV is not None
    drawn = SampleRows(rows.slots_R, forwarded.batch.lengths_R.long(), rows.sampled_slots)
    runner.sampler.sample(forwarded.logits_SV, drawn)


def largest_steps(runner: Runner, recipe: Recipe) -> None:
    """The steps that take most memory: a full prefill, and a row in every slot."""
    step_tokens, longest = int(recipe.schedule.step_tokens), int(recipe.server.max_model_tokens)
    num_rows = -(-step_tokens // longest)
    run_dead(runner, num_rows, step_tokens // num_rows)
    run_dead(runner, int(recipe.schedule.slots), 1)


def warm_up(runner: Runner, recipe: Recipe) -> None:
    """Compile what the first requests would otherwise wait for."""
    if runner.device.type == "cpu":
        run_dead(runner, 1, 2)
        return
    longest = min(int(recipe.schedule.step_tokens), int(recipe.server.max_model_tokens))
    shapes: list[tuple[int, int]] = [(1, 2), (1, 17), (1, longest), (2, longest // 2), (1, 1)]
    run: Callable[[int, int], None] = lambda rows, tokens: run_dead(runner, rows, tokens)  # noqa: E731
    for num_rows, tokens_each in shapes:
        run(num_rows, max(1, tokens_each))
    torch.cuda.synchronize(runner.device)
