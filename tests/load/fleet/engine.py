"""An engine of a fleet on paper: times of steps, a queue of prefills, decode rows and a cache.

Between two events an engine's steps are alike, so it is advanced from event to event and not from
step to step. A step has a token of each decode row. While a prompt is computed, it also has a
chunk, which makes it MIXED times as long (engine/pace.py: PaceKeeper). Prompts are computed one at
a time. Times are of Qwen3-8B on one H200.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

PROMPT_TOKENS_PER_S = 44_271.0  # record bb63d3b5: prompts of 4,000 tokens
WEIGHTS_S = 4.2e-3  # record 29f640f1: a step with one row
ROW_S = 2e-5  # of each further row: record 07bc2e37, 10.8 ms with 256 rows, less weights and cache
KV_BYTES = 147_456  # of a token: 36 layers, 8 heads of 128, keys and values in bfloat16
# Not measured: attention of prompts beyond 4,000 tokens, from 4 * 36 * 4096 operations for each
# pair of tokens at 400 TFLOP/s, and the rate at which decode reads the cache.
PAIR_S = 4 * 36 * 4096 / 400e12
READ_BYTES_PER_S = 4.2e12
CACHE_TOKENS = 740_000  # of 141 GB: 0.9, less 16 GB of weights
MIXED = 2.5
COPY_BYTES_PER_S = 50e9  # one PCIe or 400 Gb/s link, for host memory and for transfers
GAP_BINS_PER_OCTAVE = 8


def prompt_s(num_new: float, num_cached: float) -> float:
    """Return the time to compute new tokens after cached ones, alone."""
    return num_new / PROMPT_TOKENS_PER_S + num_new * (num_cached + num_new / 2) * PAIR_S


def decode_s(rows: int, tokens: float) -> float:
    """Return the time of a decode step with this many tokens of context in all rows."""
    return (WEIGHTS_S + ROW_S * rows + tokens * KV_BYTES / READ_BYTES_PER_S) if rows else 0.0


@dataclass(eq=False)
class Job:
    """A request at one engine."""

    session: int
    prompt: int  # tokens
    answer: int
    sent_s: float
    shared: int = 0  # leading tokens that all sessions have
    engine: int = -1
    believed: int = 0  # tokens that the policy expected on the engine
    cached: int = 0  # tokens found on the engine
    loaded: int = 0  # tokens found in host memory, or received from a prefill engine
    first_s: float = 0.0  # time of the first token
    end_tokens: float = 0.0  # the engine's token clock at its end


@dataclass
class PaperEngine:
    """State of one engine. `advance` must reach a time before jobs are added at it."""

    capacity: int = CACHE_TOKENS
    host: int = 0  # tokens of a tier in host memory, which has what the cache drops
    computes: bool = True  # False: of decode alone; prompts arrive from prefill engines
    now: float = 0.0
    ticks: float = 0.0  # decode steps so far: the token clock
    queue: deque[Job] = field(default_factory=deque)
    prefilling: Job | None = None
    prefill_left_s: float = 0.0
    rows: list[tuple[float, int, Job]] = field(default_factory=list)  # heap by end_tokens
    row_tokens: int = 0
    held: int = 0  # tokens of running requests
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)  # by session, LRU first
    cached_tokens: int = 0
    below: OrderedDict[int, int] = field(default_factory=OrderedDict)  # the same in host memory
    below_tokens: int = 0
    has_shared: bool = False
    gaps: Counter[int] = field(default_factory=Counter)  # tokens by logarithm of their gap
    prefill_busy_s: float = 0.0

    @property
    def load(self) -> int:
        return len(self.queue) + len(self.rows) + (self.prefilling is not None)

    def known(self, session: int, shared: int) -> int:
        """Return the tokens of a session's prompt that the cache or host memory has."""
        own = max(self.cached.get(session, 0), self.below.get(session, 0))
        return max(own, shared if self.has_shared else 0)

    def _rates(self) -> tuple[float, float]:
        """Return the time of a step, and the share of it that computes the prompt."""
        quiet_s = decode_s(len(self.rows), self.row_tokens)
        if self.prefilling is None:
            return quiet_s, 0.0
        step_s = MIXED * quiet_s or math.inf
        return step_s, (1.0 - quiet_s / step_s if self.rows else 1.0)

    def next_event(self) -> float:
        """Return the time of the next first or last token; inf if the engine is idle."""
        step_s, share = self._rates()
        ends = []
        if self.prefilling is not None:
            ends.append(self.now + self.prefill_left_s / share)
        if self.rows:
            ends.append(self.now + max(0.0, self.rows[0][0] - self.ticks) * step_s)
        return min(ends, default=math.inf)

    def advance(self, to: float) -> list[Job]:
        """Run until a time, at most the next event's. Return requests that end there."""
        passed, (step_s, share) = to - self.now, self._rates()
        self.now = to
        if self.rows:
            steps = passed / step_s
            self.ticks += steps
            self.gaps[round(GAP_BINS_PER_OCTAVE * math.log2(step_s))] += steps * len(self.rows)
        if (job := self.prefilling) is not None:
            self.prefill_left_s -= passed * share
            self.prefill_busy_s += passed * share
            if self.prefill_left_s <= 1e-9:
                self.prefilling = None
                job.first_s = to
                self._decode(job)
        ended = []
        while self.rows and self.rows[0][0] <= self.ticks + 1e-6:
            _, _, job = heapq.heappop(self.rows)
            self.row_tokens -= job.prompt + job.answer // 2
            self._release(job)
            ended.append(job)
        self._admit()
        return ended

    def add(self, job: Job) -> None:
        self.queue.append(job)
        self._admit()

    def _decode(self, job: Job) -> None:
        job.end_tokens = self.ticks + max(job.answer - 1, 0)
        heapq.heappush(self.rows, (job.end_tokens, id(job), job))
        self.row_tokens += job.prompt + job.answer // 2

    def _admit(self) -> None:
        """Start the next prompt if its pages fit; on a decode engine, all that do."""
        while self.queue and self.prefilling is None:
            job = self.queue[0]
            if self.held and self.held + job.prompt + job.answer > self.capacity:
                return
            self.queue.popleft()
            self._find(job)
            self.held += job.prompt + job.answer
            self._evict()
            if not self.computes:
                job.first_s = self.now
                self._decode(job)
                continue
            self.prefilling = job
            done = job.cached + job.loaded
            load_s = job.loaded * KV_BYTES / COPY_BYTES_PER_S
            self.prefill_left_s = prompt_s(max(job.prompt - done, 1), done) + load_s

    def _find(self, job: Job) -> None:
        own = self.cached.pop(job.session, 0)
        self.cached_tokens -= own
        job.cached = min(max(own, job.shared if self.has_shared else 0), job.prompt - 1)
        kept = self.below.pop(job.session, 0)
        self.below_tokens -= kept
        job.loaded = max(0, min(kept, job.prompt - 1) - job.cached)
        self.has_shared = True

    def _release(self, job: Job) -> None:
        self.held -= job.prompt + job.answer
        self.cached[job.session] = job.prompt
        self.cached_tokens += job.prompt
        self._evict()

    def _evict(self) -> None:
        """Drop the sessions that were used least recently, each from its end."""
        while self.cached and self.held + self.cached_tokens > self.capacity:
            session, tokens = next(iter(self.cached.items()))
            over = self.held + self.cached_tokens - self.capacity
            left = max(0, tokens - over)
            self.cached_tokens -= tokens - left
            if left:
                self.cached[session] = left
            else:
                del self.cached[session]
            if self.host:
                kept = self.below.get(session, 0)  # more, if its end was dropped earlier
                self.below[session] = max(tokens, kept)
                self.below_tokens += self.below[session] - kept
                self.below.move_to_end(session)
                while self.below_tokens > self.host:
                    self.below_tokens -= self.below.popitem(last=False)[1]
