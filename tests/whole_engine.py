"""Scheduler, runner and sampler in one process: a whole engine without IPC or HTTP."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from nanovllm.config import (
    Cache,
    Config,
    Disk,
    Recipe,
    Schedule,
    Server,
    Speculate,
    load_config,
)
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.ranks import RankedExecutor, mesh_of
from nanovllm.kv.hybrid import memory_of
from nanovllm.kv.memory import KVMemory
from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.places import Place
from nanovllm.plan import Masks
from nanovllm.runner.build import Built, build
from nanovllm.sched.adapters import adapter_slots
from nanovllm.sched.lanes import planner_of
from nanovllm.sched.scheduler import Scheduler
from nanovllm.schedule import Auto
from nanovllm.wire import FinishReason, Generate, Sampling, StepOutput, TokenLogprobs

GREEDY = Sampling(temperature=0.0)
MAX_TOKENS = 200
BLOCKED_S = 0.05  # longest wait for the end of a transfer before another step


class WholeEngine:
    """A whole engine. With `place` it is one of several ranks, and rank 0 is the engine."""

    def __init__(
        self,
        config: Config,
        *,
        pages: int = 200,
        page_tokens: int = 4,
        slots: int = 8,
        step_tokens: int = 64,
        prefix: bool = True,
        checkpoints: int | Auto = "auto",
        checkpoint_fraction: float = 0.25,
        host_gib: float = 0.0,
        disk: Disk | None = None,
        depth: int = 1,
        max_tokens: int = MAX_TOKENS,
        speculate: Speculate | None = None,
        place: Place | None = None,
        cache_dtype: str = "auto",
        state_dtype: str = "float32",
    ) -> None:
        max_tokens = min(max_tokens, pages * page_tokens)
        recipe = replace(
            config.recipe,
            cache=Cache(
                dtype=cache_dtype,
                state_dtype=state_dtype,
                page_tokens=page_tokens,
                pages=pages,
                prefix=prefix,
                checkpoints=checkpoints,
                checkpoint_fraction=checkpoint_fraction,
                host_gib=host_gib,
                disk=disk,
            ),
            schedule=Schedule(slots=slots, step_tokens=step_tokens, depth=depth),
            server=Server(max_model_tokens=max_tokens),
            speculate=speculate,
        )
        self.mesh = Mesh() if place is None else mesh_of(config, place)
        built = build(replace(config, recipe=recipe), self.mesh)
        self.runner = built.runner
        is_first = place is not None and place.rank == 0
        executor = RankedExecutor(self.runner, place) if is_first else self.runner
        self.vocab_size, self.num_masked = built.vocab_size, 0
        memory = partial(memory_of, built.layout, built.recipe.cache, executor.disk)
        make = self.scheduler_of(recipe)
        self.scheduler = planner_of(make, memory, self.mesh.lanes, recipe.parallel)
        if isinstance(self.scheduler, Scheduler):
            self.memory = self.scheduler.memory
        self.loop = EngineLoop(self.scheduler, executor, self.collect, self, depth)
        self.loop.measures = False  # plans do not depend on the speed of this machine
        self._moved = threading.Event()
        executor.call_when_moved(self._moved.set)
        self.text: dict[int, list[int]] = {}
        self.cached, self.finish = dict[int, int](), dict[int, FinishReason]()
        self.logprobs, self.handovers = dict[int, list[TokenLogprobs]](), dict[int, str]()

    def scheduler_of(self, recipe: Recipe) -> Callable[[KVMemory], Scheduler]:
        return partial(
            Scheduler,
            num_slots=recipe.schedule.slots,
            step_tokens=recipe.schedule.step_tokens,
            max_model_tokens=recipe.server.max_model_tokens,
            drafts=recipe.drafts,
            adapters=partial(adapter_slots, recipe.adapters, self.runner.first_adapters),
            lender=self.runner.lender,
        )

    def fill(self, rows: list[tuple[int, list[int]]]) -> Masks:
        """Return masks that allow even tokens only. Part of the Masker interface."""
        count = sum(1 + len(drafts) for _, drafts in rows)
        self.num_masked += count
        return np.full((count, -(-self.vocab_size // 32)), 0x55555555, np.int32)

    def advance(self, output: StepOutput) -> tuple[int, ...]:
        """Ignore the output. Part of the Masker interface."""
        return ()

    def collect(self, out: StepOutput) -> None:
        names, tokens = np.frombuffer(out.ids, np.int64), np.frombuffer(out.tokens, np.int32)
        if out.counts:
            names = np.repeat(names, np.frombuffer(out.counts, np.int32))
        for name, token in zip(names.tolist(), tokens.tolist(), strict=True):
            self.text.setdefault(name, []).append(token)
        self.cached |= {s.request_id: s.num_cached for s in out.started}
        for entry in out.logprobs:
            self.logprobs.setdefault(entry.request_id, []).append(entry)
        self.finish |= {f.request_id: f.reason for f in out.finished}
        self.handovers |= {f.request_id: f.handover for f in out.finished if f.handover}

    def submit(
        self,
        request_id: int,
        prompt: list[int],
        max_new: int,
        sampling: Sampling = GREEDY,
        stops: Iterable[int] = (),
        grammar: str = "",
        adapter: str = "",
        salt: str = "",
    ) -> None:
        self.loop.handle(
            Generate(
                request_id,
                array("i", prompt).tobytes(),
                max_new,
                list(stops),
                sampling,
                salt=salt,
                grammar=grammar,
                adapter=adapter,
            )
        )

    def run(self) -> None:
        """Run until no request is left.

        While nothing can run, wait for the end of a transfer, as the engine process does. Without
        the wait this thread would take the GIL from the threads that transfer.
        """
        while not self.loop.idle:
            self._moved.clear()
            self.loop.step()
            self.scheduler.check()
            if self.loop.is_blocked:
                self._moved.wait(BLOCKED_S)


def small_demo(slots: int, *changes: str) -> Built:
    """Return the demo model's runner on a CPU, with 100 pages of 8 tokens for up to 256 tokens."""
    sizes = ["cache.pages=100", "cache.page_tokens=8", "server.max_model_tokens=256"]
    sizes += [f"schedule.slots={slots}", "schedule.step_tokens=64"]
    return build(load_config(None, ["device=cpu", *sizes, *changes]))


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 199, rng.integers(3, 60)).tolist() for _ in range(count)]


@torch.inference_mode()
def greedy_texts(
    model: PreTrainedModel, prompts: list[list[int]], max_new: int
) -> list[tuple[list[int], float]]:
    """Return transformers' greedy text of each prompt, and the least margin of its logits.

    Short prompts are padded on the left, where the attention mask leaves the padding out. A batch
    takes hardly more time than one prompt.
    """
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    out = model.generate(
        torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
        do_sample=False,
        max_new_tokens=max_new,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best, second = torch.stack(out.logits).float().topk(2).values.unbind(-1)
    margins = (best - second).amin(0).tolist()
    return list(zip(out.sequences[:, longest:].tolist(), margins, strict=True))


def references(model: PreTrainedModel, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """Return transformers' texts. Their margins exceed errors of other summation orders."""
    texts, margins = zip(*greedy_texts(model, prompts, max_new), strict=True)
    assert min(margins) > 2e-4, "a near tie: choose another prompt"
    return [*texts]


def reference(model: PreTrainedModel, prompt: list[int], max_new: int) -> list[int]:
    return references(model, [prompt], max_new)[0]
