"""What a recipe takes of a GPU's memory, what has room beside it, and how fast it could be.

Arithmetic from config.json, the recipe and a GPU's facts: nothing is allocated, and no GPU need be
here. Knows bytes and tokens, not requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from nanovllm.bench.gpus import CPU, Gpu
from nanovllm.config import Auto, Config, Kernels, Recipe, given_or, resolve_schedule
from nanovllm.models.config import read_model_config
from nanovllm.models.decoder import Decoder
from nanovllm.parallel.cut import fits
from nanovllm.parallel.mesh import Mesh
from nanovllm.runner.resolved import Resolved, resolved
from nanovllm.runner.room import step_bytes
from nanovllm.runner.sizing import GIB

WEIGHTS, STEP, OTHERS, GRAPHS = "weights", "full step", "CUDA and others", "graphs"
LOGPROBS = "log-probabilities"
CUDA_BYTES = 757 << 20  # with our kernels' code: measured on an H200
RANKS_BYTES = 512 << 20  # of buffers between ranks: not measured yet
HOST_GPUS = (1, 2, 4, 8)
LEAST_STEP = 256  # tokens: no smaller step is proposed


@dataclass(frozen=True)
class Plan:
    """One rank's share. All ranks have the same number of pages."""

    found: Resolved
    model: Decoder  # shapes alone
    gpu: Gpu
    share: int  # bytes that may be taken in all
    spare: int  # bytes beside that, which log-probabilities alone may take
    taken: dict[str, int]  # bytes beside the cache, by what takes them
    asked_context: int | Auto  # server.max_model_tokens

    @property
    def tp(self) -> int:
        return self.found.mesh.tp_size

    @property
    def room(self) -> int:
        """The bytes that are left for pages; below 0: that are lacking."""
        return self.share - sum(self.taken.values()) + self.taken[LOGPROBS]

    @property
    def page_bytes(self) -> int:
        return self.found.layout.bytes_per_token * self.found.page_tokens

    @property
    def pages(self) -> int:
        recipe, fitting = self.found.recipe, self.room // self.page_bytes - 1
        useful = int(recipe.schedule.slots) * self.pages_of(self.found.max_model_tokens)
        return given_or(recipe.cache.pages, max(0, min(fitting, useful)))

    @property
    def tokens(self) -> int:
        return self.pages * self.found.page_tokens

    @property
    def context(self) -> int:
        """What server.max_model_tokens becomes."""
        return min(self.found.max_model_tokens, self.tokens)

    def pages_of(self, num_tokens: int) -> int:
        """How many pages one request of so many tokens takes."""
        return -(-num_tokens // self.found.page_tokens)

    def problem(self, lengths: Sequence[int]) -> str:
        """Why it cannot serve requests of these lengths; empty: it can."""
        lacking = (max(2, self.pages) + 1) * self.page_bytes - self.room
        if lacking > 0:
            return (
                f"{lacking / GIB:.2f} GiB more are needed for a cache of {max(2, self.pages)} pages"
            )
        if self.taken[LOGPROBS] > self.spare:
            return f"{LOGPROBS} of all slots exceed what cache.memory_fraction leaves"
        most = max(given_or(self.asked_context, 1), *lengths, 1)
        return f"{self.tokens:,} tokens of cache are fewer than {most:,}" * (self.tokens < most)

    # -- how fast it could be -------------------------------------------------------------------

    def decode_s(self, rows: int, length: int) -> float:
        """The least time of a step that feeds one token to each of so many requests."""
        num_read, cached = sum(self._read()), rows * length * self.found.layout.bytes_per_token
        products = self._least(num_read * self.found.dtype.itemsize, 2 * num_read * rows)
        return products + self._least(cached, 0)

    def prefill_s(self, rows: int, length: int) -> float:
        """The least time of so many prompts. Half of attention's products are masked."""
        (layers, head), config = self._read(), self.found.model_config
        heads = config.num_attention_heads // self.tp * config.head_size
        attention = 2 * config.num_hidden_layers * heads * length**2
        flops = rows * (2 * layers * length + 2 * head + attention)
        return self._least((layers + head) * self.found.dtype.itemsize, flops)

    def _read(self) -> tuple[int, int]:
        """Parameters that every step reads: of all layers, and of the head."""
        layers = sum(tensor.numel() for tensor in self.model.layers.parameters())
        return layers, self.model.head.weight.numel()

    def _least(self, num_bytes: int, flops: int) -> float:
        return max(num_bytes / self.gpu.gb_per_s / 1e9, flops / self.gpu.tflops / 1e12)


def plan_of(config: Config, gpu: Gpu, tp: int) -> Plan:
    """Raises ConfigError if the recipe is wrong, or the model cannot be cut for so many ranks."""
    asked = config.recipe
    found = resolved(config if gpu is CPU else with_numbers_of_a_gpu(config), Mesh(0, tp))
    model = found.empty_model(torch.device("meta"))
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    taken = {WEIGHTS: weights, LOGPROBS: 0}
    total = share = weights + int(asked.cache.cpu_gib * GIB)
    if gpu is not CPU:
        total = int(gpu.gib * GIB)
        share = int(total * asked.cache.memory_fraction)
        taken |= {
            STEP: step_bytes(found, model, fuses_gate=gpu.is_hopper),
            OTHERS: CUDA_BYTES + RANKS_BYTES * (tp > 1),
            GRAPHS: GIB,
            # Of a row in every slot, beside its logits: what penalties changed, what is asked for
            # and the exponentials that are summed up, in float32.
            LOGPROBS: 3 * 4 * int(found.recipe.schedule.slots) * len(model.head.weight),
        }
    context = asked.server.max_model_tokens
    return Plan(found, model, gpu, share, total - share, taken, context)


def with_numbers_of_a_gpu(config: Config) -> Config:
    """Its "auto"s as on a GPU, but resolved where there is none, with room for any context."""
    recipe = config.recipe
    page_tokens = given_or(recipe.cache.page_tokens, 128)
    numbers = replace(
        recipe,
        device="cpu",
        dtype="bfloat16" if recipe.dtype == "auto" else recipe.dtype,
        kernels=Kernels(),
        schedule=resolve_schedule(recipe.schedule, on_cpu=False),
        cache=replace(recipe.cache, page_tokens=page_tokens, cpu_gib=float(1 << 20)),
    )
    return replace(config, recipe=numbers)


# -- what to ask for ------------------------------------------------------------------------------


def nearest(config: Config, gpu: Gpu, lengths: Sequence[int]) -> Plan | None:
    """The first that fits of: more GPUs, smaller steps of fewer slots, a shorter context."""
    model_config = read_model_config(config)[1]
    own = replace(config.recipe, cache=replace(config.recipe.cache, pages="auto"))
    short = replace(own, server=replace(own.server, max_model_tokens="auto"))
    for base, needed in ((own, lengths), (short, ())):
        for recipe in (base, *smaller(base)):
            for tp in HOST_GPUS:
                if fits(tp, model_config):
                    plan = plan_of(replace(config, recipe=recipe), gpu, tp)
                    if not plan.problem(needed):
                        return plan
    return None


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """With half the slots and half the tokens of a step, and half of that, and so on."""
    schedule = resolve_schedule(recipe.schedule, on_cpu=False)
    slots, tokens = int(schedule.slots), int(schedule.step_tokens)
    while slots > 1 or tokens > LEAST_STEP:
        slots, tokens = max(1, slots // 2), max(min(tokens, LEAST_STEP), tokens // 2)
        yield replace(recipe, schedule=replace(recipe.schedule, slots=slots, step_tokens=tokens))


def pins(plan: Plan) -> str:
    """The lines of a recipe that make it so."""
    cache, schedule = plan.found.recipe.cache, plan.found.recipe.schedule
    return (
        f"parallel: {{tp: {plan.tp}}}\n"
        f"cache: {{page_tokens: {cache.page_tokens}, pages: {plan.pages}, "
        f"memory_fraction: {cache.memory_fraction:g}}}\n"
        f"schedule: {{slots: {schedule.slots}, step_tokens: {schedule.step_tokens}}}\n"
        f"server: {{max_model_tokens: {plan.context}}}"
    )
