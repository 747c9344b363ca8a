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
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from msgspec.structs import asdict, astuple, replace

from nanovllm.config import Parallel
from nanovllm.kv.keys import PageKeys
from nanovllm.kv.memory import KVMemory
from nanovllm.look import Admitted
from nanovllm.plan import AdapterContent, Chunk, LanesPlan, LanesResult, Moved, StepPlan, StepResult
from nanovllm.sched.adapters import BASE
from nanovllm.sched.planner import Planner, Snapshot
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import STEP_TOKENS, FinishReason, Generate, Stats, StepOutput


class Lanes:
    """Several schedulers with the interface of one. Implements planner.Planner.

    A request goes to the lane with the least cost: `prefill_weight` times the tokens to compute
    there plus `load_weight` times the lane's requests, as in server/router.py.
    """

    has_tiers = False  # build refuses cache.host_gib with lanes

    def __init__(self, lanes: list[Scheduler], parallel: Parallel) -> None:
        self.lanes, self.weights = lanes, (parallel.prefill_weight, parallel.load_weight)
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

    def request_ids(self) -> list[int]:
        return [request_id for lane in self.lanes for request_id in lane.request_ids()]

    def add(self, spec: Generate, now: float) -> None:
        prompt = array("i")
        prompt.frombytes(spec.prompt)
        costs, (prefill, load) = [], self.weights
        for lane in self.lanes:
            adapters = lane.queue.adapters
            adapter_key = adapters.page_key(adapters.resolve(spec.adapter) or BASE)
            keys = PageKeys(prompt, spec.salt, lane.memory.page_tokens, adapter_key)
            known = lane.memory.find(keys).num_cached
            ahead = len(prompt) - max(known, lane.memory.reach(keys)[1])
            costs.append(prefill * ahead + load * len(lane.queue.by_id))
        count, self._turn = len(costs), self._turn + 1
        best = min(range(count), key=lambda at: (costs[at], (at - self._turn) % count))
        self.lanes[best].add(spec, now)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        for lane in self.lanes:
            lane.abort(request_id, reason)

    def new_adapter(self) -> int:
        return max([lane.new_adapter() for lane in self.lanes])  # the same in all lanes

    def load_adapter(self, name: str, number: int, content: AdapterContent) -> None:
        for lane in self.lanes:
            lane.load_adapter(name, number, content)

    def unload_adapter(self, name: str) -> None:
        for lane in self.lanes:
            lane.unload_adapter(name)

    def forget_adapters(self) -> list[int]:
        used = [request.adapter for lane in self.lanes for request in lane.queue.by_id.values()]
        _, *others = [lane.forget_adapters(used) for lane in self.lanes]
        return others[0]  # the same in all lanes

    def output(self) -> StepOutput:
        return joined([lane.output() for lane in self.lanes])

    def stats(self) -> Stats:
        total = added([asdict(lane.stats()) for lane in self.lanes])
        total["kv_usage"] /= len(self.lanes)
        total |= {"num_steps": self._step, "steps_by_tokens": self._steps_by_tokens.copy()}
        return Stats(**total)

    @property
    def num_waiting(self) -> int:
        return sum(lane.num_waiting for lane in self.lanes)

    def snapshot(self, num_queued: int = 0) -> Snapshot:
        """Return the sum of the lanes' states, with at most `num_queued` waiting requests."""
        parts = [lane.snapshot(num_queued) for lane in self.lanes]
        return Snapshot(
            slots=b"".join(part.slots for part in parts),
            num_running=sum(part.num_running for part in parts),
            num_waiting=self.num_waiting,
            num_preemptions=sum(part.num_preemptions for part in parts),
            free=sum(part.free for part in parts),
            cached=sum(part.cached for part in parts),
            queue=[one for part in parts for one in part.queue][:num_queued],
            arriving=[request_id for part in parts for request_id in part.arriving],
        )

    def plan(self) -> LanesPlan | None:
        decoding = [bool(lane.queue.decoding.rows.requests) for lane in self.lanes]
        beside = min(self.mixed_step_tokens, self.step_tokens)  # if another lane decodes
        for lane, decodes in zip(self.lanes, decoding, strict=True):
            lane.mixed_step_tokens = self.mixed_step_tokens
            lane.step_tokens = beside if any(decoding) and not decodes else self.step_tokens
        plans = [lane.plan() for lane in self.lanes]
        planned = [plan for plan in plans if plan is not None]
        if not planned:
            return None
        num_tokens = sum(plan.num_decoded + plan.num_prompt for plan in planned)
        self._steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self._step += 1
        self._in_flight.append([plan is not None for plan in plans])
        alike = tuple(self._alike(plans))
        return LanesPlan(self._step, alike, tuple(self._decodes), self.padding)

    def _alike(self, plans: list[StepPlan | None]) -> list[StepPlan]:
        """Return a plan for every lane, all with chunks or none, all with drafts or none."""
        planned = [plan for plan in plans if plan is not None]
        has_chunks, has_drafts = any(p.chunks for p in planned), any(p.drafts for p in planned)
        no_chunks = [Chunk(self.padding, 1, samples=False)] if has_chunks else []
        row = b"" if has_chunks else np.array([self.padding], np.int32).tobytes()
        alike = []
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
            alike.append(replace(plan, chunks=plan.chunks or no_chunks, drafts=drafts))
        most = max(plan.num_decoded + plan.num_prompt for plan in alike)
        proposes = any(plan.proposes for plan in planned)
        late = self.lanes[0].tokens_ahead > 0 and any(plan.masked for plan in alike)
        return [
            replace(plan, lane_tokens=most, proposes=proposes, draws_late=late) for plan in alike
        ]

    @property
    def num_moving(self) -> int:
        return 0

    def moves(self) -> None:
        """Return None: lanes have no tiers below the device."""

    def take_back(self, pages: Sequence[int], state: int = -1, request_id: int = -1) -> None:
        raise ValueError("lanes lend no pages")

    def moved(self, moved: Moved) -> None:
        raise ValueError(f"lanes have no transfer {moved.ticket}")

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Ignore the time, since no load is weighed against it."""

    def masked_rows(self, plan: StepPlan | LanesPlan) -> list[tuple[int, list[int]]]:
        assert isinstance(plan, LanesPlan)
        each = zip(self.lanes, plan.lanes, strict=True)
        return [row for lane, own in each if own.masked for row in lane.masked_rows(own)]

    def admitted(self, plan: StepPlan | LanesPlan) -> list[Admitted]:
        assert isinstance(plan, LanesPlan)
        each = enumerate(zip(self.lanes, plan.lanes, strict=True))
        return [
            replace(one, slot=at * self.padding + one.slot)
            for at, (lane, own) in each
            for one in lane.admitted(own)
        ]

    def complete(self, result: StepResult) -> StepOutput:
        """Process the result of the oldest step in flight. Implements planner.Planner."""
        assert isinstance(result, LanesResult)
        each = zip(self.lanes, result.lanes, self._in_flight.popleft(), strict=True)
        outputs = []
        for lane, own, has_result in each:
            if has_result:
                outputs.append(lane.complete(own))
                lane.measure(own.step, 0.0)  # see measure()
        return joined(outputs)

    def measure(self, step: int, period_s: float) -> None:
        """Do nothing: a period depends on the drafts of all lanes, and is no lane's price.

        For the lanes, no step has been measured.
        """

    def check(self) -> None:
        for lane in self.lanes:
            lane.check()


def planner_of(
    make: Callable[[KVMemory], Scheduler],
    memory: Callable[[], KVMemory],
    num_lanes: int,
    parallel: Parallel,
) -> Planner:
    """Return a Scheduler, or Lanes if there are several. Each lane gets its own `memory()`."""
    lanes = [make(memory()) for _ in range(num_lanes)]
    return lanes[0] if num_lanes == 1 else Lanes(lanes, parallel)


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
