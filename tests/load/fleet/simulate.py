"""A run of a fleet on paper: sessions of agents or single prompts, engines, and what came of it."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from nanovllm.bench.agents import TurnPlan
from tests.load.fleet.engine import (
    COPY_BYTES_PER_S,
    GAP_BINS_PER_OCTAVE,
    KV_BYTES,
    Job,
    PaperEngine,
)
from tests.load.fleet.routing import LeastLoad, Policy

LAST_CHUNK = 8192  # tokens of a prompt that are sent after its end
Plans = Callable[[int], Iterator[TurnPlan]]  # requests of a session


@dataclass
class RunFacts:
    """Sums of a run. Requests that were sent before `from_s` warm the caches up."""

    from_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)  # mean per answer
    end_s: float = 0.0

    def note(self, job: Job, now: float) -> None:
        self.end_s = now
        if job.sent_s < self.from_s:
            return
        self.prompt_tokens += job.prompt
        self.cached_tokens += job.cached
        self.loaded_tokens += job.loaded
        self.ttft_s.append(job.first_s - job.sent_s)
        if job.answer > 1:
            self.token_s.append((now - job.first_s) / (job.answer - 1))

    def metrics(self, engines: Sequence[PaperEngine]) -> dict[str, float]:
        gaps = sum((engine.gaps for engine in engines), Counter[int]())
        total = max(self.prompt_tokens, 1)
        return {
            "hits_percent": 100.0 * (self.cached_tokens + self.loaded_tokens) / total,
            "gpu_hits_percent": 100.0 * self.cached_tokens / total,
            "ttft_p50_s": float(np.percentile(self.ttft_s, 50)),
            "ttft_p99_s": float(np.percentile(self.ttft_s, 99)),
            "token_p50_ms": 1e3 * float(np.percentile(self.token_s, 50)),
            "gap_p99_ms": 1e3 * gap_at(gaps, 0.99),
            "requests_per_minute": 60.0 * len(self.ttft_s) / (self.end_s - self.from_s),
        }


def gap_at(gaps: Counter[int], share: float) -> float:
    """Return a quantile of the gaps between tokens, in seconds."""
    left = share * sum(gaps.values())
    for at in sorted(gaps):
        left -= gaps[at]
        if left <= 0:
            return 2.0 ** (at / GAP_BINS_PER_OCTAVE)
    return 0.0


class Fleet:
    """Engines that compute prompts and decode; with `decoders`, the former only compute prompts."""

    def __init__(
        self,
        engines: Sequence[PaperEngine],
        policy: Policy,
        decoders: Sequence[PaperEngine] = (),
        shared: int = 0,
        from_s: float = 0.0,
    ) -> None:
        """`shared`: leading tokens that all sessions have. Earlier requests are not measured."""
        self.engines, self.policy, self.decoders = [*engines, *decoders], policy, decoders
        self._places = LeastLoad(decoders) if decoders else None
        self._first_decoder, self._shared = len(engines), shared
        self._loads = np.zeros(len(self.engines), np.int64)
        self._versions = [0] * len(self.engines)
        self._events: list[tuple[float, int, int, object]] = []  # time, order, engine or -1, what
        self._order = 0
        self.facts = RunFacts(from_s)
        self._answers: dict[int, int] = {}  # tokens, of sessions whose prompt is computed apart

    def run(self, plans: Plans, starts_s: Sequence[float], at_once: int = 0) -> dict[str, float]:
        """Run sessions. The first `at_once` (0: all) start at their times, others as they end."""
        at_once = at_once or len(starts_s)
        sessions = {at: plans(at) for at in range(len(starts_s))}
        for at in range(at_once):
            self._push(starts_s[at], -1, (at, next(sessions[at])))
        following = iter(range(at_once, len(starts_s)))
        while self._events:
            now, _, engine, what = heapq.heappop(self._events)
            if engine == -1:
                self._send(now, *what)
                continue
            if isinstance(what, Job):
                self._arrive(now, engine, what)
                continue
            if what != self._versions[engine]:
                continue
            for job in self._advance(engine, now):
                if self._hand_over(job, now):
                    continue
                self.facts.note(job, now)
                if not self.decoders:
                    self.policy.ended(job)
                plan, session = next(sessions[job.session], None), job.session
                if plan is None and (session := next(following, -1)) >= 0:
                    plan = next(sessions[session])
                if plan is not None:
                    self._push(now + plan.pause_s, -1, (session, plan))
        return self.facts.metrics(self.decoders or self.engines)

    def _push(self, at: float, engine: int, what: object) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, engine, what))

    def _send(self, now: float, session: int, plan: TurnPlan) -> None:
        job = Job(session, plan.prompt, plan.answer, now, shared=self._shared)
        if self._places is not None:
            self._answers[session], job.answer = job.answer, 1
        self._arrive(now, self.policy.choose(job, self._loads[: self._first_decoder]), job)

    def _arrive(self, now: float, engine: int, job: Job) -> None:
        job.engine = engine
        ended = self._advance(engine, now)
        assert not ended  # ends are events of their own
        self.engines[engine].add(job)
        self._watch(engine)

    def _advance(self, engine: int, now: float) -> list[Job]:
        ended = self.engines[engine].advance(now)
        self._watch(engine)
        return ended

    def _watch(self, engine: int) -> None:
        self._versions[engine] += 1
        self._loads[engine] = self.engines[engine].load
        if (at := self.engines[engine].next_event()) < math.inf:
            self._push(at, engine, self._versions[engine])

    def _hand_over(self, job: Job, now: float) -> bool:
        """Send a computed prompt to a decode engine; return False for other ends."""
        if self._places is None or job.engine >= self._first_decoder:
            return False
        at = self._places.choose(job, self._loads[self._first_decoder :])
        # Cached pages are sent at once, and chunks as they finish: what is left is the last chunk.
        last_s, all_s = (
            num * KV_BYTES / COPY_BYTES_PER_S
            for num in (min(job.prompt - job.cached, LAST_CHUNK), job.prompt)
        )
        moved_s = max(last_s, all_s - (job.first_s - job.sent_s))
        job.answer = self._answers.pop(job.session)
        self._push(now + moved_s, self._first_decoder + at, job)
        return True


def alone(prompt: int, answer: int) -> Plans:
    """Return sessions of one request without reuse."""
    plan = TurnPlan(prompt=prompt, answer=answer, reusable=0, result=prompt, pause_s=0.0)
    return lambda session: iter([plan])


def poisson(count: int, per_s: float, seed: int = 0) -> list[float]:
    """Return arrival times in seconds."""
    rng, at, times = Random(f"fleet {seed}"), 0.0, list[float]()
    for _ in range(count):
        at += rng.expovariate(per_s)
        times.append(at)
    return times
