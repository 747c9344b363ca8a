"""Rules by which pages are stored to host memory, on a simulated device.

    python -m tests.load.tier_rules [--sets 0.5,1,2,4] [--hosts 1,4] [--rates 50,10]
        [--results-dir results]

The loop, the scheduler, the memory and the host tier are those of the server. Steps and copies take
the times of Qwen3-8B on one H200, and the clock is simulated. Sessions of the load "agents" run
under three rules:

- `filled`: a page is stored soon after it has filled, as by a server with a disk.
- `evicted`: a page is stored when it is evicted. The copy starts with the plan, while the previous
  step runs. The step that overwrites the page waits for its end.
- `ahead`: the pages that will be evicted next are stored, as by a server without a disk
  (kv/tiers.py).

The last two keep host memory for pages that the device does not have. The working set is the tokens
of the running sessions at their mean length, over the tokens that the device keeps.
"""

from __future__ import annotations

import argparse
import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np

from nanovllm.bench.agents import AgentLoad, TurnPlan
from nanovllm.bench.measure import now
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.pace import PaceKeeper
from nanovllm.kv.costs import HOST_RATE, TransferCosts
from nanovllm.kv.keys import Key
from nanovllm.kv.tiered import TieredMemory
from nanovllm.kv.tiers import AHEAD, MOST_STORING, HostTier
from nanovllm.plan import Copies, Masks, Moved, Moves, StepPlan, StepResult
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Generate, Sampling, StepOutput
from tests.load.fleet.engine import KV_BYTES, WEIGHTS_S, decode_s, prompt_s
from tests.load.tiered import conclude, log, show_progress

PAGE = 128  # tokens
PAGE_BYTES = PAGE * KV_BYTES
GPU_PAGES = 680  # as in results/rows.py: agents
# By which stores lengthen the steps that run meanwhile: w1 takes 13.37 s without host memory
# (record 1bce0ae4), and 13.53 s with it (60fb2b1e), which stores 276,793 tokens.
SLOWED_S_PER_BYTE = (13.532 - 13.368) / (276_793 * KV_BYTES)
SLOTS, STEP_TOKENS = 512, 8192
SIZES = {"turns": 8, "shared_len": 4000, "growth": (1000, 3000), "answers": (50, 300)}
PER_SLOT = 3  # sessions in turn, for each that runs at a time
SHOWN = ("requests_per_minute", "ttft_p50_ms", "ttft_p99_ms", "gpu_hits_percent",
         "host_hits_percent", "stored_gb", "dropped", "slowed_percent",
         "waited_percent")  # fmt: skip


# -- rules --------------------------------------------------------------------------------------


class NotedTier(HostTier):
    """A tier that starts no store, and keeps the keys of pages that may be stored."""

    def __init__(self, num_slots: int, **options: object) -> None:
        super().__init__(num_slots, **options)
        self.noted: set[Key] = set()

    def note(self, key: Key, page: int, *, is_issued: bool) -> None:
        self.noted.add(key)

    def wants(self, key: Key) -> bool:
        return key in self.noted and self.is_needed(key)


class StoresEvicted(TieredMemory):
    """The rule `evicted`. `leaving` are the pages that the plan under construction overwrites."""

    def __init__(self, *sizes: int, tier: NotedTier) -> None:
        super().__init__(*sizes, tier=tier)
        self.noted, self.leaving = tier, dict[Key, int]()
        self.pool._forget = self._evict  # it calls this for evictions only

    def _evict(self, page: int) -> None:
        keys = filter(self.noted.wants, self._keys_of.get(page, ()))
        self.leaving |= dict.fromkeys(keys, page)
        self._forget(page)

    def taken_moves(self) -> Moves | None:
        leaving, self.leaving = self.leaving, {}
        for page in self.tier.start_store(leaving, self._dirty):
            self.pool.hold(page)
        return self.tier.taken_moves()


RULES = ("filled", "evicted", "ahead")


def memory_by(rule: str, gpu_pages: int, host_pages: int) -> TieredMemory:
    """Return a memory as kv.hybrid.memory_of makes it, with a rule for stores."""
    make = NotedTier if rule == "evicted" else HostTier
    tier = make(
        host_pages,
        page_bytes=PAGE_BYTES,
        costs=TransferCosts(page_s=PAGE_BYTES / HOST_RATE),
        ahead=None if rule == "filled" else max(1, round(host_pages * AHEAD)),
        most_queued=gpu_pages,
        most_storing=max(1, min(MOST_STORING, gpu_pages // 8)),
    )
    return (StoresEvicted if rule == "evicted" else TieredMemory)(gpu_pages, PAGE, tier=tier)


# -- the device ---------------------------------------------------------------------------------


@dataclass
class Handle:
    """A step that ends at a time of the simulated clock."""

    device: Device
    result: StepResult
    ends_at: float
    busy_s: float
    gap_s: float = 0.0
    mode: str = ""

    def sample(self, masks: Masks) -> None:
        raise AssertionError("no request has a grammar")

    def lengthen(self, seconds: float) -> None:
        self.ends_at += seconds
        self.busy_s += seconds
        self.device.step_end += seconds
        self.device.slowed_s += seconds

    def wait(self) -> StepResult:
        self.device.now = max(self.device.now, self.ends_at)
        return self.result


class Device:
    """An engine.executor.Executor with a clock. Each direction of copies is in order.

    `waits`: the next step waits for the stores that start with its plan.
    """

    def __init__(self, copy_rate: float, *, waits: bool) -> None:
        self.page_s, self.waits = PAGE_BYTES / copy_rate, waits
        self.now = self.step_end = self.busy_s = self.slowed_s = self.waited_s = 0.0
        self.ends = {"store": 0.0, "load": 0.0}  # of the last copy
        self._copies: list[tuple[float, int, Moved]] = []  # heap of those that have not ended
        self._stores: deque[tuple[float, float]] = deque()  # begin and end
        self._lengths = np.zeros(SLOTS, np.int64)  # tokens in memory, by slot
        self._decodes = np.zeros(0, np.int32)
        self._latest: Handle | None = None

    def vet(self, request: Generate) -> None:
        """Accept all requests."""

    def move(self, moves: Moves) -> None:
        for copies in moves.stores:
            begin = max(self.ends["store"], self.now if self.waits else self.step_end)
            self._stores.append((begin, self._copy("store", begin, copies)))
            if self._latest is not None and begin < self.step_end:
                self._latest.lengthen(self._slowed(self.now, self.step_end))
        for copies in moves.loads:
            begin = max(self.ends["load"], self.step_end)
            if self.waits:  # a page to load may have been stored by the same plan
                begin = max(begin, self.ends["store"])
            self._copy("load", begin, copies)

    def _copy(self, kind: str, begin: float, copies: Copies) -> float:
        seconds = len(copies.pairs) * self.page_s
        end = self.ends[kind] = begin + seconds
        moved = Moved(copies.ticket, num_bytes=len(copies.pairs) * PAGE_BYTES, seconds=seconds)
        heapq.heappush(self._copies, (end, copies.ticket, moved))
        return end

    def moved(self) -> list[Moved]:
        ended = []
        while self._copies and self._copies[0][0] <= self.now:
            ended.append(heapq.heappop(self._copies)[2])
        return ended

    @property
    def next_end(self) -> float:
        """The end of the next copy, in seconds; inf without any."""
        return self._copies[0][0] if self._copies else math.inf

    def launch(self, plan: StepPlan) -> Handle:
        for admit in plan.admits:
            self._lengths[admit.slot] = admit.num_cached
        if plan.decodes is not None:
            self._decodes = np.frombuffer(plan.decodes, np.int32)
        tokens = int(self._lengths[self._decodes].sum())
        seconds = decode_s(len(self._decodes), tokens)
        for chunk in plan.chunks:
            seconds += prompt_s(chunk.num_tokens, int(self._lengths[chunk.slot]))
            self._lengths[chunk.slot] += chunk.num_tokens
        self._lengths[self._decodes] += 1
        begin = free = max(self.now, self.step_end)
        if self.waits:
            begin = max(begin, self.ends["store"])
        seconds = max(seconds, WEIGHTS_S)
        slowed = self._slowed(begin, begin + seconds)
        self.step_end = begin + seconds + slowed
        self.busy_s += seconds
        self.slowed_s += slowed
        self.waited_s += begin - free
        rows = plan.num_decodes + sum(chunk.samples for chunk in plan.chunks)
        result = StepResult(plan.step, np.zeros((rows, 1), np.int32))
        self._latest = Handle(self, result, self.step_end, seconds + slowed)
        return self._latest

    def _slowed(self, begin: float, end: float) -> float:
        """Return the time by which stores lengthen a step."""
        while self._stores and self._stores[0][1] <= begin:
            self._stores.popleft()
        overlap = sum(max(0.0, min(end, e) - max(begin, b)) for b, e in self._stores)
        return overlap / self.page_s * PAGE_BYTES * SLOWED_S_PER_BYTE


# -- sessions -----------------------------------------------------------------------------------


class NoMasks:
    """Implementation of engine.loop.Masker for requests without grammars."""

    def fill(self, rows: list[tuple[int, list[int]]]) -> Masks:
        raise AssertionError("no request has a grammar")

    def advance(self, output: StepOutput) -> Collection[int]:
        return ()


class Session:
    """A conversation. As in nanovllm.bench.agents, its answers are words of the load."""

    def __init__(self, load: AgentLoad, number: int, shared: array[int]) -> None:
        self.rng, self.plans = Random(f"tokens {load.seed} {number}"), load.planned(number)
        self.tokens, self.plan = array("i", shared), next(self.plans)
        self._extend(self.plan)

    def _extend(self, plan: TurnPlan) -> None:
        self.tokens.extend(words(self.rng, plan.prompt - len(self.tokens)))

    def next(self) -> bool:
        """Prepare the next request. Return False if there is none."""
        plan = next(self.plans, None)
        if plan is not None:
            self.plan = plan
            self._extend(plan)
        return plan is not None


def words(rng: Random, count: int) -> list[int]:
    return rng.choices(range(1, 1 << 17), k=count)


@dataclass
class Run:
    """One run of a load under one rule."""

    load: AgentLoad
    memory: TieredMemory
    device: Device
    sent: dict[int, float] = field(default_factory=dict)  # by request
    first: dict[int, float] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    num_prompt: int = 0

    def metrics(self) -> dict[str, float]:
        shared, sessions = array("i", words(Random("shared"), self.load.shared_len)), {}
        waiting = iter(range(self.load.sessions))
        due: list[tuple[float, int]] = []  # heap: time, session
        rng, request_id, running = Random("starts"), 0, dict[int, int]()
        for number in islice(waiting, self.load.concurrency):
            sessions[number] = Session(self.load, number, shared)
            heapq.heappush(due, (20.0 * rng.random(), number))
        scheduler = Scheduler(
            self.memory, num_slots=SLOTS, step_tokens=STEP_TOKENS, max_model_tokens=40_960
        )
        loop = EngineLoop(
            scheduler, self.device, self.publish, NoMasks(),
            pace=PaceKeeper(STEP_TOKENS, STEP_TOKENS), now=lambda: self.device.now,
        )  # fmt: skip
        while due or running:
            while due and due[0][0] <= self.device.now:
                _, number = heapq.heappop(due)
                request_id += 1
                running[request_id], plan = number, sessions[number].plan
                self.sent[request_id] = self.device.now
                self.num_prompt += plan.prompt
                prompt = sessions[number].tokens.tobytes()
                loop.handle(Generate(request_id, prompt, plan.answer, [], Sampling()))
            loop.step()
            for done in self.done:
                number = running.pop(done)
                if not sessions[number].next():
                    del sessions[number]
                    if (number := next(waiting, -1)) < 0:
                        continue
                    sessions[number] = Session(self.load, number, shared)
                heapq.heappush(due, (self.device.now + sessions[number].plan.pause_s, number))
            self.done.clear()
            if (due or running) and (loop.idle or loop.is_blocked):
                at = min(due[0][0] if due else math.inf, self.device.next_end)
                self.device.now = max(self.device.now, at)
        scheduler.check()
        return self.summary()

    def publish(self, output: StepOutput) -> None:
        assert not output.refused
        for name in np.frombuffer(output.ids, np.int64).tolist():
            self.first.setdefault(name, self.device.now)
        self.done += [one.request_id for one in output.finished]

    def summary(self) -> dict[str, float]:
        ttft = [1e3 * (at - self.sent[name]) for name, at in self.first.items()]
        device, counts = self.device, self.memory.tier.counts
        return {
            "requests_per_minute": 60 * len(ttft) / device.now,
            "ttft_p50_ms": float(np.percentile(ttft, 50)),
            "ttft_p99_ms": float(np.percentile(ttft, 99)),
            "ttft_mean_ms": float(np.mean(ttft)),
            "gpu_hits_percent": 100 * counts["gpu.hit_tokens"] / self.num_prompt,
            "host_hits_percent": 100 * counts["host.hit_tokens"] / self.num_prompt,
            "stored_gb": counts["host.stored"] * PAGE_BYTES / 1e9,
            "loaded_gb": counts["host.loaded"] * PAGE_BYTES / 1e9,
            "dropped": float(counts["host.dropped"]),
            "declined": float(counts["host.declined"]),
            "slowed_percent": 100 * device.slowed_s / device.busy_s,
            "waited_percent": 100 * device.waited_s / device.busy_s,
            "busy_percent": 100 * device.busy_s / device.now,
        }


def load_of(working_set: float, gpu_pages: int, seed: int = 0) -> AgentLoad:
    """Return sessions whose tokens are `working_set` times those that the device keeps."""
    one = AgentLoad(sessions=64, concurrency=1, longest=24_000, seed=seed, **SIZES)
    prompts = [plan.prompt for number in range(one.sessions) for plan in one.planned(number)]
    own = sum(prompts) / len(prompts) - one.shared_len
    at_once = max(1, round((working_set * gpu_pages * PAGE - one.shared_len) / own))
    return AgentLoad(
        sessions=PER_SLOT * at_once, concurrency=at_once, longest=24_000, seed=seed, **SIZES
    )


def case(
    rule: str, working_set: float, host: float, rate_gb: float, gpu_pages: int = GPU_PAGES
) -> dict[str, float]:
    """Return the metrics of one run. `host` is the size of host memory over the device's."""
    memory = memory_by(rule, gpu_pages, round(host * gpu_pages))
    device = Device(rate_gb * 1e9, waits=rule == "evicted")
    return Run(load_of(working_set, gpu_pages), memory, device).metrics()


def numbers(text: str) -> Iterator[float]:
    return map(float, text.split(","))


def main(words: Sequence[str] | None = None, run: Callable[..., dict[str, float]] = case) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sets", default="0.5,1,2,4", help="working sets over the GPU's pages")
    parser.add_argument("--hosts", default="1,4", help="host memory over the GPU's pages")
    parser.add_argument("--rates", default="50,10", help="GB/s of copies")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--results-dir", type=Path, help="write a record there")
    options = parser.parse_args(words)
    show_progress()
    started_at, found = now(), dict[str, float]()
    log.info("%-30s %s", "", " ".join(f"{name:>19}" for name in SHOWN))
    for rate in numbers(options.rates):
        for host in numbers(options.hosts):
            for working_set in numbers(options.sets):
                for rule in options.rules.split(","):
                    metrics = run(rule, working_set, host, rate)
                    name = f"set {working_set:g}, host {host:g}, {rate:g} GB/s, {rule}"
                    log.info("%-36s %s", name, " ".join(f"{metrics[s]:15.2f}" for s in SHOWN))
                    found |= {f"{name}: {key}": value for key, value in metrics.items()}
    load = {name: getattr(options, name) for name in ("sets", "hosts", "rates", "rules")}
    conclude(options, None, started_at, found, {"name": "tier_rules", **load})


if __name__ == "__main__":
    main()
