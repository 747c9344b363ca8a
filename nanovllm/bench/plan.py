"""Memory plan of a recipe on a GPU, and lower bounds of step times.

All numbers are computed from config.json, the recipe and the GPU's data. Nothing is allocated, and
no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import nn

from nanovllm.bench.gpus import CPU, Gpu
from nanovllm.config import Config, ConfigError, Kernels, Recipe, Schedule
from nanovllm.engine.paper import resolve
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.split import Split, decode_bytes, num_paged, room_for_pages, running_bytes
from nanovllm.layers.experts.products import weight_traffic
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.parallel.mesh import Mesh, first_rank
from nanovllm.runner.adapters import adapter_memory
from nanovllm.runner.host_memory import NO_ADAPTERS, AdapterMemory
from nanovllm.runner.resolved import GIB, Resolved, resolve_config
from nanovllm.runner.room import need_of, step_bytes
from nanovllm.schedule import given_or, resolve_schedule
from nanovllm.spec.model_base import DraftModel

WEIGHTS, STEP, OTHERS, GRAPHS = "weights", "full step", "CUDA and others", "graphs"
STATES, LOGPROBS, ADAPTERS = "running states", "log-probabilities", "adapters"
CUDA_BYTES = 757 << 20  # CUDA context with the code of kernels, measured on an H200
RANKS_BYTES = 512 << 20  # buffers between ranks, not measured yet
HOST_GPUS = (1, 2, 4, 8)
# Resolved.empty_models on the meta device, by mesh and context.
Models = dict[tuple[Mesh, int], tuple[Decoder, nn.ModuleList]]
SMALLEST = "the smallest cache (2 pages)"
MOST_HALVINGS = 5  # from 512 slots and 8192 tokens to 16 and 256


@dataclass(frozen=True)
class MemoryPlan:
    """One rank's share. All ranks have the same number of pages."""

    recipe: Recipe
    resolved: Resolved
    model: Decoder  # on the meta device
    gpu: Gpu
    share: int  # usable bytes
    spare: int  # bytes in addition, which only log-probabilities may use
    used: dict[str, int]  # bytes of everything but the cache, by name
    adapters: AdapterMemory
    draft_model: DraftModel | None = None  # on the meta device

    @property
    def room(self) -> int:
        """Return the bytes left for pages and checkpoints; negative if memory is too small."""
        return self.share - sum(self.used.values()) + self.used[LOGPROBS]

    @property
    def pages(self) -> int:
        page_bytes = self.resolved.layout.bytes_per_token * self.resolved.page_tokens
        fitting = room_for_pages(self.room, self.recipe.cache, self.resolved.layout) // page_bytes
        useful = int(self.resolved.recipe.schedule.slots) * self.pages_of(
            self.resolved.max_model_tokens
        )
        return given_or(self.recipe.cache.pages, max(0, min(fitting - 1, useful)))

    @property
    def split(self) -> Split:
        return Split(self.pages, self.recipe.cache, self.resolved.layout, self.resolved.page_tokens)

    @property
    def tokens(self) -> int:
        return self.pages * self.resolved.page_tokens

    @property
    def context(self) -> int:
        """Return the resulting server.max_model_tokens."""
        return min(self.resolved.max_model_tokens, self.tokens)

    def pages_of(self, num_tokens: int) -> int:
        """Return the number of pages of one request with `num_tokens` tokens."""
        return -(-num_tokens // self.resolved.page_tokens)

    def problem(self, lengths: Sequence[int]) -> str:
        """Return the reason why the plan cannot serve requests of these lengths, or ""."""
        lack = self.split._replace(pages=max(2, self.pages)).total - self.room
        if self.gpu is CPU:  # the limit is the host's available memory
            lack = (need := need_of(self.resolved)).total - need.room
        if lack > 0:
            least = f"a cache of {self.pages:,} pages" if self.pages > 2 else SMALLEST
            return f"{lack / GIB:.2f} GiB short of {least}"
        if self.used[LOGPROBS] > self.spare:
            return f"{LOGPROBS} of all slots exceed what cache.memory_fraction leaves"
        most = max(given_or(self.recipe.server.max_model_tokens, 1), *lengths, 1)
        if self.tokens < most:
            return f"{self.tokens:,} tokens of cache are fewer than {most:,}"
        return ""

    # -- lower bounds of times ------------------------------------------------------------------

    def decode_s(self, rows: int, length: int, fed: int = 1) -> float:
        """Return a lower bound of the time of a step with `rows` decode rows of a length.

        Each row feeds `fed` tokens: its latest one and drafts.
        """
        resolved, own = self.resolved, self._own(rows)
        products = self._products_s([self.model.layers], rows * fed, self.model.head, fed * own)
        cached = decode_bytes(resolved.own_layout, length)
        attended = self._flops(resolved.own_layout, resolved.model_config, resolved.mesh)
        return products + own * self._least(cached, fed * length * attended)

    def drafted_s(self, rows: int, length: int) -> float:
        """Return a lower bound of the time of a decode step that feeds and proposes all drafts.

        A draft model runs over the tokens of the step for the first draft, and over one token of
        each row for each further draft. Only rows with logits read its output head.
        """
        drafts, own = self.recipe.num_drafts, self._own(rows)
        step_s = self.decode_s(rows, length, fed=1 + drafts)
        model, source = self.draft_model, self.resolved.drafts
        if model is None or source is None:
            return step_s
        loader = source.loader
        cached = decode_bytes(loader.layout, length)
        attended = self._flops(loader.layout, loader.model_config, loader.mesh)
        step_s += self._products_s(model.read_by_given, rows * (1 + drafts))
        first = 1 + drafts + 1 - model.lag
        for tokens in (first, *[1] * (drafts - 1)):
            step_s += self._products_s(model.read_by_pass, rows * tokens, model.output, own)
            step_s += own * self._least(cached, tokens * length * attended)
        return step_s

    def _products_s(
        self,
        modules: Iterable[nn.Module],
        num_tokens: int,
        head: Any = None,  # noqa: ANN401
        num_logits: int = 0,
    ) -> float:
        """Return a lower bound of the time of products: of all tokens, and of an output head.

        `num_tokens` are those of all lanes, `num_logits` the rows of logits of this rank.
        """
        num_bytes = flops = 0.0
        for module in modules:
            read, multiplied = weight_traffic(module, num_tokens, self.resolved.mesh.lanes)
            num_bytes, flops = num_bytes + read, flops + 2 * multiplied * num_tokens
        if head is not None:
            num_bytes += sum(x.nbytes for x in (*head.parameters(), *head.buffers()))
            flops += 2 * head.weight.numel() * num_logits
        return self._least(num_bytes, flops)

    def _own(self, rows: int) -> int:
        """Return the rows of the lane that has most of them."""
        return -(-rows // self.resolved.mesh.lanes)

    def prefill_s(self, rows: int, length: int) -> float:
        """Return a lower bound of the time of `rows` prompts of a length.

        Half of attention's products are masked.
        """
        num_bytes, layers = weight_traffic(
            self.model.layers, rows * length, self.resolved.mesh.lanes
        )
        head, own = self.model.head.weight, -(-rows // self.resolved.mesh.lanes)
        attended = self._flops(
            self.resolved.own_layout, self.resolved.model_config, self.resolved.mesh, decodes=False
        )
        each = 2 * head.numel() + attended * length**2 / 2
        flops = rows * 2 * layers * length + own * each
        return self._least(num_bytes + head.nbytes, flops)

    @staticmethod
    def _flops(
        layout: CacheLayout, config: DecoderConfig, mesh: Mesh, *, decodes: bool = True
    ) -> int:
        """Return the FLOP per query and attended token, over all layers and one rank's heads."""
        heads = config.num_attention_heads // mesh.tp_size
        return 2 * num_paged(layout) * heads * config.key_value_size(decodes=decodes)

    def _least(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.gpu.gb_per_s / 1e9, flops / self.gpu.tflops / 1e12)


def plan_of(config: Config, gpu: Gpu, size: int, models: Models | None = None) -> MemoryPlan:
    """Return the plan of a config over `size` ranks.

    `models` caches the models of earlier plans, for other schedules and lengths of the same recipe.
    Raise ConfigError if the recipe is invalid, or the model cannot be cut over the ranks.
    """
    recipe = config.recipe
    sized = config if gpu is CPU else with_numbers_of_a_gpu(config, is_hopper=gpu.is_hopper)
    resolved = resolve_config(sized, first_rank(recipe.parallel).first_of(size))
    models = {} if models is None else models
    key = resolved.mesh, resolved.max_model_tokens
    empty = models[key] = models.get(key) or resolved.empty_models(torch.device("meta"))
    model, weights = empty[0], sum(t.nbytes for t in (*empty[1].parameters(), *empty[1].buffers()))
    slots = int(resolved.recipe.schedule.slots)
    used = {WEIGHTS: weights, STATES: running_bytes(resolved.layout, resolved.recipe), LOGPROBS: 0}
    adapters = NO_ADAPTERS
    if recipe.adapters is not None:
        adapters = adapter_memory(recipe.adapters, model, resolved.dtype)
        used[ADAPTERS] = adapters.device_bytes
    total = share = weights + used.get(ADAPTERS, 0) + int(recipe.cache.cpu_gib * GIB)
    if gpu is not CPU:
        total = int(gpu.gib * GIB)
        share = int(total * recipe.cache.memory_fraction)
        used |= {
            STEP: step_bytes(resolved, model, fuses_gate=gpu.is_hopper),
            OTHERS: CUDA_BYTES + (RANKS_BYTES if size > 1 else 0),
            GRAPHS: GIB,
            # For a row in every slot: logits, a float32 copy, and exponentials to be summed.
            LOGPROBS: (resolved.dtype.itemsize + 4 + 4) * slots * len(model.head.weight),
        }
    return MemoryPlan(
        recipe=recipe,
        resolved=resolved,
        model=model,
        gpu=gpu,
        share=share,
        spare=total - share,
        used=used,
        adapters=adapters,
        draft_model=cast("DraftModel", empty[1][1]) if len(empty[1]) > 1 else None,
    )


def with_numbers_of_a_gpu(config: Config, *, is_hopper: bool) -> Config:
    """Return the config with "auto" resolved as on a GPU, for a machine without one.

    The cache has room for every context. `is_hopper`: the GPU has fp8 kernels.
    """
    model = read_model_config(config)[1]
    recipe = resolve(config.recipe, model.max_position_embeddings, model.STEP_TOKENS)
    dtype = "bfloat16" if recipe.dtype == "auto" else recipe.dtype
    speculate, has_fp8 = recipe.speculate, is_hopper and dtype == "bfloat16"
    if speculate is not None and speculate.dtype == "auto" and speculate.has_dtype:
        named = "fp8" if has_fp8 and recipe.kernels.fp8_linear != "torch" else "own"
        speculate = replace(speculate, dtype=named)
    changes = dict(device="cpu", dtype=dtype, kernels=Kernels(), speculate=speculate)
    return replace(config, recipe=replace(recipe, **changes))


# -- nearest plan that fits -----------------------------------------------------------------------


def nearest(config: Config, gpu: Gpu, lengths: Sequence[int]) -> MemoryPlan | None:
    """Return the first plan that fits, with more GPUs, smaller steps or a shorter context."""
    own = replace(config.recipe, cache=replace(config.recipe.cache, pages="auto"))
    short = replace(own, server=replace(own.server, max_model_tokens="auto"))
    models: Models = {}
    most = read_model_config(config)[1].STEP_TOKENS
    for base, needed in ((own, lengths), (short, ())):
        for halvings, size in product(range(MOST_HALVINGS + 1), HOST_GPUS):
            recipe = replace(base, schedule=halved(base.schedule, halvings, most, gpu is CPU))
            with suppress(ConfigError):  # some models cannot be cut over some numbers of ranks
                plan = plan_of(replace(config, recipe=recipe), gpu, size, models)
                if not plan.problem(needed):
                    return plan
    return None


def halved(schedule: Schedule, times: int, most: int, on_cpu: bool = False) -> Schedule:
    """Return the schedule with slots and step_tokens halved `times` times.

    `most` is the default of step_tokens.
    """
    full = resolve_schedule(schedule, on_cpu=on_cpu, most=most)
    slots, tokens = (max(1, int(n) >> times) for n in (full.slots, full.step_tokens))
    return replace(schedule, slots=slots, step_tokens=tokens)


def pins(plan: MemoryPlan) -> str:
    """Return the lines of a recipe that fix a plan. They replace earlier values of these keys."""
    recipe, mesh = plan.resolved.recipe, plan.resolved.mesh
    cache, schedule, parallel = recipe.cache, recipe.schedule, plan.recipe.parallel
    sizes = {"ep": mesh.ep_size, "dp": parallel.dp}
    others = "".join(f", {k}: {n}" for k, n in sizes.items() if {n, getattr(parallel, k)} != {1})
    dtypes = "dtype: fp8, " if cache.dtype == "fp8" else ""
    if cache.state_dtype == "bfloat16":
        dtypes += "state_dtype: bfloat16, "
    return (
        f"parallel: {{tp: {mesh.tp_size}{others}}}\n"
        f"cache: {{{dtypes}page_tokens: {cache.page_tokens}, "
        f"{plan.split.pin}, memory_fraction: {cache.memory_fraction:g}}}\n"
        f"schedule: {{slots: {schedule.slots}, step_tokens: {schedule.step_tokens}}}\n"
        f"server: {{max_model_tokens: {plan.context}}}"
    )
