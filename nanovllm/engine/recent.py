"""The newest steps of an engine, for whoever looks: a ring of fixed size.

The loop's thread only notes what the plan and the result have at hand; what a look costs is paid
by the thread that asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

from nanovllm.engine.executor import Executor, StepHandle
from nanovllm.look import MOST_STEPS, Admitted, Step, Steps
from nanovllm.plan import Admit, StepPlan
from nanovllm.sched.lanes import Planner
from nanovllm.sched.policy import prompt_budget
from nanovllm.sched.request import Request
from nanovllm.wire import StepOutput

KEPT = 4096  # steps
Noted = tuple[Any, ...]
MOST_WAITING = 256  # requests of the queue that an answer names


class Recent:
    """What the loop notes is raw: all that can be worked out later is worked out by who asks."""

    def __init__(self, scheduler: Planner, executor: Executor, now: Callable[[], float]) -> None:
        self._scheduler, self._queue = scheduler, scheduler.queue
        self._executor, self._now = executor, now
        self._ring: list[Noted | None] = [None] * KEPT
        self._in_flight: deque[Noted] = deque()
        self._finished: list[tuple[int, str]] = []
        self._modes: dict[str, int] = {}
        self._mode = ""
        self._decodes = self._slots = b""
        self._newest = 0

    def planned(self, plan: StepPlan) -> None:
        """A plan was launched."""
        queue, counts = self._queue, self._executor.steps_by_mode
        if counts.get(self._mode) == self._modes.get(self._mode):  # else it was the same mode
            self._mode = next((m for m in counts if counts[m] != self._modes.get(m)), "")
        self._modes[self._mode] = counts[self._mode]
        if plan.decodes is not None:
            self._decodes = plan.decodes
        slots = queue.decoding.owner.tobytes()
        if slots != self._slots:  # else both steps have the same bytes
            self._slots = slots
        admitted = [self._admitted(admit) for admit in plan.admits] if plan.admits else []
        planned = plan.step, self._now(), self._mode, self._slots, self._decodes
        limits = plan.drafts, self._scheduler.mixed_step_tokens, queue.num_preemptions
        self._in_flight.append((*planned, *limits, len(plan.masked), plan.chunks, admitted))

    def _admitted(self, admit: Admit) -> Admitted:
        request = self._queue.by_id[int(self._queue.decoding.owner[admit.slot])]
        known = request.num_prompt, request.prefill_until, admit.num_cached
        return Admitted(admit.slot, request.id, *known, self._came_s(request))

    def told(self, output: StepOutput) -> None:
        """Something was published: a step's tokens, or what happened besides."""
        if output.finished:
            self._finished += [(end.request_id, end.reason.name.lower()) for end in output.finished]

    def completed(
        self, handle: StepHandle, bubble_s: float, output: StepOutput, host_s: float
    ) -> None:
        """The oldest step in flight has ended; `host_s` is the host's time since the start."""
        planned, queue = self._in_flight.popleft(), self._queue
        pool = queue.memory.pool
        self.told(output)
        finished, self._finished = self._finished, []
        times = self._now(), host_s, handle.busy_s, bubble_s
        counts = len(queue.running), len(queue.waiting), pool.num_free, len(pool.cached)
        num_tokens = len(output.tokens) // 4
        gained = num_tokens, num_tokens - len(output.ids) // 8
        self._ring[planned[0] % KEPT] = planned, times, gained, finished, counts
        self._newest = planned[0]

    def since(self, number: int) -> Steps:
        """What a Look is told. Any thread may ask."""
        newest, queue, pool = self._newest, self._queue, self._queue.memory.pool
        oldest = max(min(1, newest), newest - KEPT + 1)
        first = max(number + 1, newest - MOST_STEPS + 1, oldest)
        kept = [self._ring[at % KEPT] for at in range(first - 1, newest + 1)]
        steps = [self._step(one, two) for one, two in pairwise(kept) if two is not None]
        line = islice(queue.waiting, MOST_WAITING)
        waiting = [(request.id, self._came_s(request), request.was_started) for request in line]
        slots = queue.decoding.owner.tobytes()
        counts = len(queue.waiting), pool.num_free, len(pool.cached)
        return Steps(self._now(), oldest, newest, steps, slots, waiting, *counts)

    def _step(self, before: Noted | None, noted: Noted) -> Step:
        """`before`: what was noted of the step before it, or of any other, or nothing."""
        planned, (ended_s, host_s, *device), gained, finished, counts = noted
        *head, drafts, mixed, preempted, masked, chunks, admitted = planned
        old_host_s, old_preempted = host_s, preempted
        if before is not None and before[0][0] == planned[0] - 1:
            old_host_s, old_preempted = before[1][1], before[0][7]
        drafted, budget = sum(memoryview(drafts).cast("i")), self._scheduler.step_tokens
        if decoded := len(planned[4]) // 4 + drafted:
            budget = decoded + prompt_budget(budget, mixed, decoded)
        fed = [(chunk.slot, chunk.num_tokens) for chunk in chunks]
        first = *head, budget, drafted, masked, fed, admitted, preempted - old_preempted
        last = ended_s, host_s - old_host_s, *device, *gained, finished, *counts
        whole: Noted = (*first, *last)
        return Step(*whole)

    def _came_s(self, request: Request) -> float:
        return request.urgency[0] - request.spec.priority * self._queue.ageing_s
