"""The paper engine: tokens at a fixed rate, without a model, a device or torch.

It serves to measure the server alone. HTTP, text, messages, scheduler and cache are the real ones.
Every answer repeats one sentence. Requested log-probabilities are absent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.checkpoint import text_fields
from nanovllm.config import NOT_JSON, Config, ConfigError, Recipe, resolve_context
from nanovllm.grammars.runtime.matching import tokens_of
from nanovllm.kv.layout import CacheLayout
from nanovllm.plan import (
    AdapterContent,
    AdapterDone,
    Int32,
    Masks,
    Moved,
    Moves,
    StepPlan,
    StepResult,
    mode_key,
)
from nanovllm.schedule import given_or, resolve_schedule
from nanovllm.tokenizer import read_tokenizer
from nanovllm.wire import Generate

SENTENCE = " These words come from an engine made of paper, which has nothing to think about."


class Numbers(Struct, frozen=True):
    """Fields of config.json that the paper engine needs."""

    vocab_size: int
    max_position_embeddings: int


@dataclass(slots=True)
class PaperHandle:
    result: StepResult
    masked: list[int]
    ends_at: float
    gap_s: float = 0.0
    busy_s: float = 0.0
    mode: str = ""

    def sample(self, masks: Masks) -> None:
        """Replace each token that its mask does not allow by the first allowed one."""
        for row, mask in zip(self.masked, masks, strict=True):
            allowed = tokens_of(mask)
            if self.result.tokens[row, 0] not in allowed:
                self.result.tokens[row, 0] = allowed[0]

    def wait(self) -> StepResult:
        time.sleep(max(0.0, self.ends_at - time.monotonic()))
        return self.result


class PaperExecutor:
    """Implementation of engine.executor.Executor. Steps take `step_s` each, one after another."""

    def __init__(self, sentence: list[int], num_slots: int, step_s: float) -> None:
        self._sentence: Int32 = np.array(sentence, np.int32)
        self._num_generated = np.zeros(num_slots, np.int64)  # output tokens until now, per slot
        self._decodes: Int32 = np.zeros(0, np.int32)
        self._step_s = step_s
        self._ends_at = 0.0  # end of the latest step
        self.steps_by_mode: Counter[str] = Counter()
        self.padded_tokens = 0
        self.disk = self.lender = self.remote = None
        self.first_adapters: dict[str, AdapterContent] = {}

    def vet(self, request: Generate) -> None:
        """Accept every request."""

    def move(self, moves: Moves) -> None:
        """Refuse, since build() refuses cache.host_gib."""
        raise ValueError("the paper engine has no tiers below the device")

    def moved(self) -> list[Moved]:
        """Return an empty list."""
        return []

    def call_when_moved(self, wake: Callable[[], object]) -> None:
        """Do nothing: there are no transfers."""

    def expert_load(self, *, wait: bool) -> None:
        """Return None: there are no experts."""

    def read_adapter(self, number: int, folder: str, done: AdapterDone) -> None:
        """Accept every adapter."""
        done(content_of(folder))

    def commit_adapter(self, number: int) -> bool:
        return True

    def drop_adapters(self, numbers: Sequence[int]) -> None:
        """Do nothing."""

    def launch(self, plan: StepPlan) -> PaperHandle:
        for admit in plan.admits:
            self._num_generated[admit.slot] = len(admit.tokens) // 4 - admit.num_prompt
        if plan.decodes is not None:
            self._decodes = np.frombuffer(plan.decodes, np.int32)
        firsts = [chunk.slot for chunk in plan.chunks if chunk.samples]
        slots = np.concatenate((self._decodes, np.array(firsts, np.int32)))
        tokens = self._sentence[self._num_generated[slots] % len(self._sentence)]
        self._num_generated[slots] += 1
        gap_s = max(0.0, time.monotonic() - self._ends_at)
        self._ends_at += gap_s + self._step_s
        mode = mode_key("PAPER", plan)
        self.steps_by_mode[mode] += 1
        return PaperHandle(
            result=StepResult(plan.step, tokens.reshape(-1, 1)),
            masked=plan.masked,
            ends_at=self._ends_at,
            gap_s=gap_s,
            busy_s=self._step_s,
            mode=mode,
        )


def content_of(adapter: str) -> AdapterContent:
    """Return the content of an adapter, of which only the name counts here."""
    return AdapterContent(rank=1, digest=sha256(adapter.encode()).digest())


def build(config: Config) -> tuple[PaperExecutor, Recipe, int, CacheLayout]:
    """Return the same as process.build. The cache layout has no bytes per page and no states."""
    if config.recipe.cache.host_gib:
        raise ConfigError("cache.host_gib is for engine: model; engine: paper has no bytes to keep")
    if config.recipe.transfer is not None:
        raise ConfigError("transfer is for engine: model; engine: paper has no bytes to send")
    path = Path(config.config_path)
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        model = msgspec.convert(text_fields(raw), Numbers)
    except NOT_JSON as error:
        raise ConfigError(f"{path}: {error}") from None
    recipe = resolve(config.recipe, model.max_position_embeddings)
    tokenizer = read_tokenizer(Path(config.tokenizer_dir))
    sentence = tokenizer.encode(SENTENCE, add_special_tokens=False).ids
    executor = PaperExecutor(sentence, int(recipe.schedule.slots), 1 / recipe.paper.tokens_per_s)
    if recipe.adapters is not None:
        executor.first_adapters = {name: content_of(name) for name in recipe.adapters.names}
    return executor, recipe, model.vocab_size, CacheLayout(paged=())


def resolve(recipe: Recipe, model_tokens: int, step_tokens: int = 8192) -> Recipe:
    """Resolve "auto" like on a GPU, with pages for every slot at full context.

    `step_tokens` is the step size if the recipe leaves it open.
    """
    cache, server = recipe.cache, recipe.server
    schedule = resolve_schedule(recipe.schedule, on_cpu=False, most=step_tokens)
    page_tokens = given_or(cache.page_tokens, 128)
    cache_tokens = given_or(cache.pages, 1 << 30) * page_tokens
    most = resolve_context(server.max_model_tokens, model_tokens, cache_tokens, "raise cache.pages")
    pages = given_or(cache.pages, int(schedule.slots) * -(-most // page_tokens))
    return replace(
        recipe,
        schedule=schedule,
        cache=replace(cache, page_tokens=page_tokens, pages=pages),
        server=replace(server, max_model_tokens=most),
    )
