"""The newest steps of an engine, for whoever looks: a ring of fixed size.

The loop's thread only notes what the plan and the result have at hand; what a look costs is paid
by the thread that asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from nanovllm.engine.executor import Executor, StepHandle
from nanovllm.look import MOST_STEPS, Admitted, Step, Steps
from nanovllm.plan import StepPlan
from nanovllm.sched.policy import prompt_budget
from nanovllm.sched.request import Request
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import StepOutput

KEPT = 4096  # steps
MOST_WAITING = 256  # requests of the queue that an answer names


class Recent:
    def __init__(self, scheduler: Scheduler, executor: Executor, now: Callable[[], float]) -> None:
        self._scheduler, self._queue = scheduler, scheduler.queue
        self._executor, self._now = executor, now
        self._ring: list[Step | None] = [None] * KEPT
        self._in_flight: deque[Step] = deque()
        self._finished: list[tuple[int, str]] = []
        self._modes: dict[str, int] = {}
        self._decodes = self._slots = b""
        self._newest = self._num_preempted = 0
        self._host_s = 0.0

    def planned(self, plan: StepPlan) -> None:
        """A plan was launched."""
        queue = self._queue
        if plan.decodes is not None:
            self._decodes = plan.decodes
        slots = queue.decoding.owner.tobytes()
        if slots != self._slots:  # else both steps have the same bytes
            self._slots = slots
        step = Step(
            plan.step,
            self._now(),
            self._mode(),
            self._slots,
            self._decodes,
            self._budget(plan.num_decoded),
            plan.num_decoded - plan.num_decodes,
            len(plan.masked),
            [(chunk.slot, chunk.num_tokens) for chunk in plan.chunks],
            [],
            queue.num_preemptions - self._num_preempted,
        )
        self._num_preempted = queue.num_preemptions
        for admit in plan.admits:
            request = queue.by_id[int(queue.decoding.owner[admit.slot])]
            known = request.num_prompt, request.prefill_until, admit.num_cached
            step.admitted.append(Admitted(admit.slot, request.id, *known, self._came_s(request)))
        self._in_flight.append(step)

    def told(self, output: StepOutput) -> None:
        """Something was published: a step's tokens, or what happened besides."""
        self._finished += [(end.request_id, end.reason.name.lower()) for end in output.finished]

    def completed(
        self, handle: StepHandle, bubble_s: float, output: StepOutput, host_s: float
    ) -> None:
        """The oldest step in flight has ended; `host_s` is the host's time since the start."""
        step, queue = self._in_flight.popleft(), self._queue
        self.told(output)
        step.ended_s = self._now()
        step.host_s, self._host_s = host_s - self._host_s, host_s
        step.device_s, step.bubble_s = handle.busy_s, bubble_s
        step.generated = len(output.tokens) // 4
        step.accepted = step.generated - len(output.ids) // 8
        step.finished, self._finished = self._finished, []
        step.running, step.waiting = len(queue.running), len(queue.waiting)
        step.free, step.cached = queue.memory.pool.num_free, len(queue.memory.pool.cached)
        self._ring[step.step % KEPT] = step
        self._newest = step.step

    def since(self, number: int) -> Steps:
        """What a Look is told. Any thread may ask."""
        newest, queue, pool = self._newest, self._queue, self._queue.memory.pool
        oldest = max(min(1, newest), newest - KEPT + 1)
        numbers = range(max(number + 1, newest - MOST_STEPS + 1, oldest), newest + 1)
        steps = [step for at in numbers if (step := self._ring[at % KEPT]) is not None]
        first = islice(queue.waiting, MOST_WAITING)
        waiting = [(request.id, self._came_s(request), request.was_started) for request in first]
        slots = queue.decoding.owner.tobytes()
        counts = len(queue.waiting), pool.num_free, len(pool.cached)
        return Steps(self._now(), oldest, steps, slots, waiting, *counts)

    def _budget(self, num_decoded: int) -> int:
        most, mixed = self._scheduler.step_tokens, self._scheduler.mixed_step_tokens
        return num_decoded + prompt_budget(most, mixed, num_decoded) if num_decoded else most

    def _came_s(self, request: Request) -> float:
        return request.urgency[0] - request.spec.priority * self._queue.ageing_s

    def _mode(self) -> str:
        """What the newest launch was counted as."""
        for mode, count in self._executor.steps_by_mode.items():
            if count != self._modes.get(mode, 0):
                self._modes[mode] = count
                return mode
        return ""
