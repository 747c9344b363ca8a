"""An engine loop over the simulated GPU, stepped by hand, that collects the published texts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nanovllm.engine.loop import EngineLoop
from nanovllm.kv.hybrid import HybridMemory
from nanovllm.kv.memory import KVMemory
from nanovllm.kv.tiered import TieredMemory
from nanovllm.kv.tiers import HostTier
from nanovllm.plan import StepPlan
from nanovllm.sched.planner import Planner
from nanovllm.sched.scheduler import Scheduler
from nanovllm.speculate import Drafts
from nanovllm.wire import Abort, FinishReason, Generate, RefusalKind, Sampling, StepOutput
from tests.kv.states import check_memory
from tests.paper.gpu import PaperGPU, PaperHandle, PaperMasker, ids
from tests.paper.transfers import PaperTiers, PaperTransfers

PAGE = 4


def pack(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def generate(
    request_id: int,
    prompt: list[int],
    max_new: int,
    stops: Sequence[int] = (),
    priority: int = 0,
    grammar: str = "",
    salt: str = "",
    logprobs: int = -1,
) -> Generate:
    sampling = Sampling(logprobs=logprobs)
    return Generate(
        request_id, pack(prompt), max_new, list(stops), sampling, priority, salt, grammar
    )


class PaperEngine:
    """Engine over a simulated GPU. Also an engine.executor.Executor, which records the plans.

    `tiers` are the fields of PaperTiers.

    `checkpoints` is the number of places for recurrent states, or None for a model without
    recurrent layers.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_slots: int,
        budget: int,
        page: int = PAGE,
        mixed: int = 1000,
        depth: int = 1,
        checkpoints: int | None = None,
        every: int = 1000,
        drafts: int = 0,
        prefix: bool = True,
        max_queue: int = 1000,
        ageing: float = 3.0,
        overtake: int = 64,
        min_saved_tokens: int = 6,
        unlucky: int = 0,
        glitches: frozenset[int] = frozenset(),
        wrong_every: int = 3,
        draft_lag: int | None = None,
        **tiers: Any,
    ) -> None:
        self.budget, self.mixed = budget, mixed
        self.tiers = PaperTiers(**tiers)
        tier = self.tiers.tier(num_pages)
        self.memory = self.memory_of(checkpoints, every, num_pages, page, prefix=prefix, tier=tier)
        self.scheduler = Scheduler(
            self.memory,
            num_slots=num_slots,
            step_tokens=budget,
            mixed_step_tokens=mixed,
            max_model_tokens=4096,
            drafts=Drafts(most=drafts, has_model=draft_lag is not None),
            ageing_s=ageing,
            overtake_steps=overtake,
            min_saved_tokens=min_saved_tokens,
        )
        self.gpu = PaperGPU(
            num_slots,
            num_pages,
            page,
            checkpoints,
            unlucky=unlucky,
            glitches=glitches,
            most_drafts=drafts,
            wrong_every=wrong_every,
            draft_lag=draft_lag,
        )
        self.transfers = PaperTransfers([self.gpu, self.gpu.layers], self.tiers)
        tier.below = self.transfers if self.tiers.disk else None
        self.move, self.moved = self.transfers.move, self.transfers.moved
        self.plans: list[StepPlan] = []
        self.steps_by_mode, self.padded_tokens = Counter[str](), 0
        self.max_queue = max_queue
        self.loop = self.loop_of(self.scheduler, depth, self.now)
        self.text: dict[int, list[int]] = {}
        self.finish, self.refused = dict[int, FinishReason](), dict[int, RefusalKind]()
        self.cached: dict[int, int] = {}
        self.num_prompt: dict[int, int] = {}  # of requests with log-probabilities

    def memory_of(
        self, checkpoints: int | None, every: int, *sizes: int, prefix: bool, tier: HostTier
    ) -> KVMemory:
        if checkpoints is not None:
            return HybridMemory(*sizes, checkpoints, prefix=prefix, every=every, tier=tier)
        if self.tiers.host:
            return TieredMemory(*sizes, prefix=prefix, tier=tier)
        return KVMemory(*sizes, prefix=prefix)

    def loop_of(self, planner: Planner, depth: int, now: Callable[[], float]) -> EngineLoop:
        return EngineLoop(
            planner,
            self,
            self.collect,
            PaperMasker(),
            depth,
            max_queue=self.max_queue,
            now=now,
        )

    def collect(self, out: StepOutput) -> None:
        for started in out.started:
            assert started.request_id not in self.cached, "started twice"
            self.cached[started.request_id] = started.num_cached
        tokens = ids(out.tokens)
        names = np.frombuffer(out.ids, np.int64).tolist()
        counts = ids(out.counts) if out.counts else [1] * len(names)
        assert sum(counts) == len(tokens) and all(counts)
        logprobs = []
        for name, count in zip(names, counts, strict=True):
            assert name not in self.finish, "spoke after it finished"
            if name in self.num_prompt:
                at = self.num_prompt[name] + len(self.text.get(name, []))
                logprobs += [(name, tokens[i], -float(at + i)) for i in range(count)]
            self.text.setdefault(name, []).extend(tokens[:count])
            del tokens[:count]
        assert [(p.request_id, p.token_id, p.logprob) for p in out.logprobs] == logprobs
        assert all(p.top_ids == [p.token_id + 1] for p in out.logprobs)
        for done in out.finished:
            assert done.request_id not in self.finish, "finished twice"
            self.finish[done.request_id] = done.reason
        for refusal in out.refused:
            self.refused[refusal.request_id] = refusal.kind

    def now(self) -> float:
        """Return the simulated time: one second per step."""
        return float(self.gpu.steps)

    def say(self, message: Generate | Abort) -> None:
        if isinstance(message, Generate) and message.sampling.logprobs >= 0:
            self.num_prompt[message.request_id] = len(message.prompt) // 4
        if not isinstance(message, Generate) or self.loop.has_room_for(message):
            self.loop.handle(message)
        self.loop.publish_events()

    def vet(self, request: Generate) -> None:
        """Accept all requests."""

    def launch(self, plan: StepPlan) -> PaperHandle:
        self.transfers.check(plan)
        self.plans.append(plan)
        return self.gpu.launch(plan)

    def step(self) -> None:
        self.loop.step()
        self.scheduler.check()
        if isinstance(self.memory, HybridMemory):
            check_memory(self.memory)
        for decoded, fed in self.gpu.fed[-1:]:
            assert decoded + fed <= self.budget
            assert not decoded or fed <= max(self.mixed - decoded, -(-self.mixed // 4))

    def finish_all(self, most_steps: int = 4000) -> None:
        for _ in range(most_steps):
            if self.loop.idle and not self.scheduler.num_moving:
                return
            self.step()
        raise AssertionError("the engine is stuck")
