"""Latest steps of an engine, for /debug/steps: a ring of fixed size.

The loop's thread notes the values at hand. The thread that answers a request computes the rest, so
the loop's cost does not depend on observers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec.structs import replace

from nanovllm.engine.executor import StepHandle
from nanovllm.look import MOST_STEPS, Admitted, Step, Steps
from nanovllm.plan import Chunk, LanesPlan, StepPlan
from nanovllm.sched.planner import Planner
from nanovllm.sched.policy import prompt_budget
from nanovllm.wire import StepOutput

KEPT = 4096  # steps
MOST_WAITING = 256  # requests of the queue in an answer


@dataclass(slots=True)
class NotedStep:
    """A step as the loop stores it. The fields from `ended_s` on are set at its completion.

    It keeps a few fields of the plan instead of the plan, whose admissions hold whole prompts.
    """

    number: int
    drafts: bytes
    num_masked: int
    chunks: Sequence[Chunk]
    begun_s: float
    mode: str
    slots: bytes
    decodes: bytes
    mixed_step_tokens: int
    num_preemptions: int  # since the start
    admitted: list[Admitted]
    ended_s: float = 0.0
    host_s: float = 0.0  # since the start
    device_s: float = 0.0
    bubble_s: float = 0.0
    generated: int = 0
    accepted: int = 0
    finished: list[tuple[int, str]] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    free: int = 0
    cached: int = 0


class Recent:
    """Ring of noted steps, and their conversion to messages."""

    def __init__(self, scheduler: Planner, now: Callable[[], float]) -> None:
        self._scheduler, self._now = scheduler, now
        self._ring: list[NotedStep | None] = [None] * KEPT
        self._in_flight: deque[NotedStep] = deque()
        self._finished: list[tuple[int, str]] = []
        self._decodes = self._slots = b""
        self._newest = 0
        self._arriving: dict[int, float] = {}  # requests whose pages arrive, and since when

    def planned(self, plan: StepPlan | LanesPlan, mode: str) -> None:
        """Note a plan that was launched. `mode` is that of its handle."""
        snapshot = self._scheduler.snapshot()
        if (decodes := plan.decodes) is not None:
            self._decodes = decodes
        if snapshot.slots != self._slots:  # else both steps share the bytes
            self._slots = snapshot.slots
        step = NotedStep(
            number=plan.step,
            drafts=plan.drafts,
            num_masked=len(plan.masked),
            chunks=plan.chunks,
            begun_s=self._now(),
            mode=mode,
            slots=self._slots,
            decodes=self._decodes,
            mixed_step_tokens=self._scheduler.mixed_step_tokens,
            num_preemptions=snapshot.num_preemptions,
            admitted=[self._with_arrival(one) for one in self._scheduler.admitted(plan)],
        )
        self._in_flight.append(step)

    def _with_arrival(self, admitted: Admitted) -> Admitted:
        """Return an admission with the time from which its pages arrived, if they did."""
        if not admitted.loaded:
            return admitted
        return replace(admitted, arriving_s=self._arriving.get(admitted.request, 0.0))

    def note_arrivals(self) -> None:
        """Note the loads that have started, after the latest plan was noted."""
        now, before = self._now(), self._arriving
        arriving = self._scheduler.snapshot().arriving
        self._arriving = {one: before.get(one, now) for one in arriving}

    def note_finished(self, output: StepOutput) -> None:
        """Note the finished requests of an output."""
        if output.finished:
            self._finished += [(end.request_id, end.reason.name.lower()) for end in output.finished]

    def completed(
        self, handle: StepHandle, bubble_s: float, output: StepOutput, host_s: float
    ) -> None:
        """Note the end of the oldest step in flight. `host_s`: the host's time since the start."""
        step, snapshot = self._in_flight.popleft(), self._scheduler.snapshot()
        self.note_finished(output)
        step.finished, self._finished = self._finished, []
        step.ended_s, step.host_s = self._now(), host_s
        step.device_s, step.bubble_s = handle.busy_s, bubble_s
        step.generated = len(output.tokens) // 4
        step.accepted = step.generated - len(output.ids) // 8
        step.running, step.waiting = snapshot.num_running, snapshot.num_waiting
        step.free, step.cached = snapshot.free, snapshot.cached
        self._ring[step.number % KEPT] = step
        self._newest = step.number

    def since(self, number: int) -> Steps:
        """Return the answer to a Look. Any thread may call it."""
        newest, snapshot = self._newest, self._scheduler.snapshot(MOST_WAITING)
        arriving = self._arriving
        oldest = max(min(1, newest), newest - KEPT + 1)
        first = max(number + 1, newest - MOST_STEPS + 1, oldest)
        steps = [self._ring[at % KEPT] for at in range(first - 1, newest + 1)]
        return Steps(
            now_s=self._now(),
            oldest=oldest,
            newest=newest,
            steps=[self._step(before, step) for before, step in pairwise(steps) if step],
            slots=snapshot.slots,
            queue=snapshot.queue,
            waiting=snapshot.num_waiting,
            free=snapshot.free,
            cached=snapshot.cached,
            arriving=[(one, arriving[one]) for one in snapshot.arriving if one in arriving],
        )

    def _step(self, before: NotedStep | None, step: NotedStep) -> Step:
        """Return the message of a step. `before` is the entry before it, of any step or none."""
        if before is None or before.number != step.number - 1:
            before = step  # differences to an unknown step are 0
        drafted, budget = sum(memoryview(step.drafts).cast("i")), self._scheduler.step_tokens
        if decoded := len(step.decodes) // 4 + drafted:
            budget = decoded + prompt_budget(budget, step.mixed_step_tokens, decoded)
        return Step(
            step=step.number,
            begun_s=step.begun_s,
            mode=step.mode,
            slots=step.slots,
            decodes=step.decodes,
            budget=budget,
            drafted=drafted,
            masked=step.num_masked,
            chunks=[(chunk.slot, chunk.num_tokens) for chunk in step.chunks],
            admitted=step.admitted,
            preempted=step.num_preemptions - before.num_preemptions,
            ended_s=step.ended_s,
            host_s=step.host_s - before.host_s,
            device_s=step.device_s,
            bubble_s=step.bubble_s,
            generated=step.generated,
            accepted=step.accepted,
            finished=step.finished,
            running=step.running,
            waiting=step.waiting,
            free=step.free,
            cached=step.cached,
        )
