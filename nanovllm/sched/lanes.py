"""Scheduler for data-parallel attention: one scheduler per lane, all lanes in lockstep.

Each lane has its own requests and pages. A request goes to the lane that has cached most of its
prompt, unless that lane is far busier, and stays there. All lanes take part in every step, because
experts compute the tokens of all lanes together. A lane without tokens feeds one padding token.
Either all lanes feed prompt chunks or none does, and likewise for drafts, so that all replay the
same CUDA graph.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left
from collections import ChainMap, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec.structs import asdict, astuple, replace

from nanovllm.config import Parallel
from nanovllm.kv.keys import PageKeys
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import Chunk, StepPlan, StepResult
from nanovllm.sched.queue import Queue
from nanovllm.sched.request import Request
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import STEP_TOKENS, FinishReason, Generate, Stats, StepOutput


class LanesPlan(StepPlan, frozen=True, array_like=True):
    """One step of all lanes. `lanes` has the plan of each.

    The inherited fields are a merged view for monitoring, with slots numbered through all lanes.
    `masked` has the rows of the first lane, then those of the second, and so on.
    """

    lanes: tuple[StepPlan, ...] = ()

    @property
    def num_decoded(self) -> int:
        """Maximum over lanes."""
        return max(plan.num_decoded for plan in self.lanes)

    @property
    def num_prompt(self) -> int:
        """Maximum over lanes."""
        return max(plan.num_prompt for plan in self.lanes)


@dataclass(frozen=True, slots=True)
class LanesResult(StepResult):
    """Results of one step, by lane."""

    lanes: tuple[StepResult, ...] = ()


class Lanes:
    """Several schedulers with the interface of one.

    A request goes to the lane with the least cost: `prefill_weight` times the tokens to compute
    there plus `load_weight` times the lane's requests, as in server/router.py.
    """

    def __init__(self, lanes: list[Scheduler], parallel: Parallel) -> None:
        self.lanes, self.weights = lanes, (parallel.prefill_weight, parallel.load_weight)
        self.queue = Queues([lane.queue for lane in lanes])
        self.step_tokens, self.mixed_step_tokens = lanes[0].step_tokens, lanes[0].mixed_step_tokens
        self.padding = len(lanes[0].queue.decoding.owner)  # index of the padding slot
        self._decodes = [b""] * len(lanes)  # rows of each lane's latest plan
        self._idled = [False] * len(lanes)  # lanes that only padded the latest step
        self._in_flight: deque[list[bool]] = deque()  # for each step, the lanes with results
        self._step = self._turn = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKENS) + 1)

    @property
    def has_work(self) -> bool:
        return any(lane.has_work for lane in self.lanes)

    def add(self, spec: Generate, now: float) -> None:
        prompt = array("i")
        prompt.frombytes(spec.prompt)
        keys = PageKeys(prompt, spec.salt, self.lanes[0].memory.page_tokens)
        costs, (prefill, load) = [], self.weights
        for lane in self.lanes:
            known = lane.memory.find(keys).num_cached
            ahead = len(prompt) - max(known, lane.memory.reach(keys)[1])
            costs.append(prefill * ahead + load * len(lane.queue.by_id))
        count, self._turn = len(costs), self._turn + 1
        best = min(range(count), key=lambda at: (costs[at], (at - self._turn) % count))
        queue = self.lanes[best].queue
        queue.max_queue = self.queue.max_queue - self.queue.num_waiting + queue.num_waiting
        self.lanes[best].add(spec, now)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        for lane in self.lanes:
            lane.abort(request_id, reason)

    def output(self) -> StepOutput:
        return joined([lane.output() for lane in self.lanes])

    def stats(self) -> Stats:
        total = added([asdict(lane.stats()) for lane in self.lanes])
        total["kv_usage"] /= len(self.lanes)
        total |= {"num_steps": self._step, "steps_by_tokens": self._steps_by_tokens.copy()}
        return Stats(**total)

    def plan(self) -> LanesPlan | None:
        decoding = [bool(lane.queue.decoding.rows.requests) for lane in self.lanes]
        beside = min(self.mixed_step_tokens, self.step_tokens)  # if another lane decodes
        for lane, decodes in zip(self.lanes, decoding, strict=True):
            lane.mixed_step_tokens = self.mixed_step_tokens
            lane.step_tokens = beside if any(decoding) and not decodes else self.step_tokens
        plans = [lane.plan() for lane in self.lanes]
        if not any(plans):
            return None
        alike = self._alike(plans)
        self._step += 1
        self._in_flight.append([plan is not None for plan in plans])
        return self._together(plans, alike)

    def _alike(self, plans: list[StepPlan | None]) -> list[StepPlan]:
        """Return a plan for every lane, all with chunks or none, all with drafts or none."""
        planned = [plan for plan in plans if plan is not None]
        has_chunks, has_drafts = any(p.chunks for p in planned), any(p.drafts for p in planned)
        no_chunks = [Chunk(self.padding, 1, samples=False)] if has_chunks else []
        row = b"" if has_chunks else np.array([self.padding], np.int32).tobytes()
        found = []
        for at, plan in enumerate(plans):
            if plan is None:
                plan = StepPlan(
                    step=0,
                    admits=[],
                    grants=[],
                    num_decodes=len(row) // 4,
                    decodes=row,
                    chunks=[],
                    max_length=1,
                    masked=[],
                )
            elif plan.decodes is not None:
                self._decodes[at] = plan.decodes
            elif self._idled[at]:
                plan = replace(plan, decodes=self._decodes[at])
            self._idled[at] = plans[at] is None
            drafts = plan.drafts
            if has_drafts and not drafts:
                drafts = bytes(4 * plan.num_decodes)
            found.append(replace(plan, chunks=plan.chunks or no_chunks, drafts=drafts))
        most = max(plan.num_decoded + plan.num_prompt for plan in found)
        return [replace(plan, lane_tokens=most) for plan in found]

    def _together(self, plans: list[StepPlan | None], alike: list[StepPlan]) -> LanesPlan:
        found = [(at * self.padding, plan) for at, plan in enumerate(plans) if plan is not None]
        num_tokens = sum(plan.num_decoded + plan.num_prompt for _, plan in found)
        self._steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
        decodes = None
        if any(plan.decodes is not None for plan in alike):
            slots = [first + np.frombuffer(self._decodes[first // self.padding], np.int32)
                     for first, plan in found if plan.num_decodes]  # fmt: skip
            decodes = np.concatenate([np.zeros(0, np.int32), *slots]).astype(np.int32).tobytes()
        return LanesPlan(
            step=self._step,
            admits=[replace(a, slot=first + a.slot) for first, plan in found for a in plan.admits],
            grants=[],
            num_decodes=sum(plan.num_decodes for _, plan in found),
            decodes=decodes,
            chunks=[replace(c, slot=first + c.slot) for first, plan in found for c in plan.chunks],
            max_length=max(plan.max_length for _, plan in found),
            masked=[row for _, plan in found for row in plan.masked],
            drafts=b"".join(alike[first // self.padding].drafts for first, _ in found),
            lanes=tuple(alike),
        )

    def masked_rows(self, plan: StepPlan) -> list[tuple[int, list[int]]]:
        assert isinstance(plan, LanesPlan)
        each = zip(self.lanes, plan.lanes, strict=True)
        return [row for lane, own in each if own.masked for row in lane.masked_rows(own)]

    def complete(self, result: StepResult) -> StepOutput:
        assert isinstance(result, LanesResult)
        each = zip(self.lanes, result.lanes, self._in_flight.popleft(), strict=True)
        return joined([lane.complete(own) for lane, own, has_result in each if has_result])

    def check(self) -> None:
        for lane in self.lanes:
            lane.check()


Planner = Scheduler | Lanes


def planner_of(
    make: Callable[[KVMemory], Scheduler],
    memory: Callable[[], KVMemory],
    num_lanes: int,
    parallel: Parallel,
) -> Planner:
    """Return a Scheduler, or Lanes if there are several. Each lane gets its own `memory()`."""
    lanes = [make(memory()) for _ in range(num_lanes)]
    return lanes[0] if num_lanes == 1 else Lanes(lanes, parallel)


class Queues:
    """Merged view of the queues of all lanes, for monitoring."""

    def __init__(self, queues: list[Queue]) -> None:
        self._queues = queues
        self.max_queue, self.ageing_s = queues[0].max_queue, queues[0].ageing_s
        owner = np.concatenate([queue.decoding.owner for queue in queues])
        for queue, part in zip(queues, np.split(owner, len(queues)), strict=True):
            queue.decoding.owner = part
        self.decoding = SimpleNamespace(owner=owner)

    @property
    def waiting(self) -> list[Request]:
        return [request for queue in self._queues for request in queue.waiting]

    @property
    def num_waiting(self) -> int:
        return sum(queue.num_waiting for queue in self._queues)

    @property
    def running(self) -> list[Request]:
        return [request for queue in self._queues for request in queue.running]

    @property
    def by_id(self) -> ChainMap[int, Request]:
        return ChainMap(*(queue.by_id for queue in self._queues))

    @property
    def num_preemptions(self) -> int:
        return sum(queue.num_preemptions for queue in self._queues)

    @property
    def memory(self) -> Any:  # noqa: ANN401 - has only those parts of a KVMemory that are shown
        pools = [queue.memory.pool for queue in self._queues]
        free, cached = sum(pool.num_free for pool in pools), sum(len(pool.cached) for pool in pools)
        return SimpleNamespace(pool=SimpleNamespace(num_free=free, cached=range(cached)))


def added(values: Sequence[Any]) -> Any:  # noqa: ANN401
    """Return the sum of numbers, also inside lists and dicts. Other values are the first's."""
    match values[0]:
        case dict() as first:
            return {key: added([value[key] for value in values]) for key in first}
        case list():
            return [sum(each) for each in zip(*values, strict=True)]
        case int() | float():
            return sum(values)
    return values[0]


def joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """Return the concatenation of outputs of one step. `stats` must not be set in any."""
    if any(out.counts for out in outputs):
        ones = [np.ones(len(out.ids) // 8, np.int32).tobytes() for out in outputs]
        each = zip(outputs, ones, strict=True)
        outputs = [replace(out, counts=out.counts or one) for out, one in each]
    fields = zip(*(astuple(out)[:-1] for out in outputs), strict=True)
    return StepOutput(*(reduce(operator.add, parts) for parts in fields))
