"""The step loop: plan a step, launch it on the device, publish the results of an earlier step.

Theory of operation, one step() with depth = 1:

    0. scheduler.moved()      end transfers between tiers that the device reports
    1. scheduler.plan()       step N+1, while the device runs step N; then start transfers
    2. executor.launch()      enqueue step N+1 after step N
    3. recent.planned()       note the plan for /debug/steps
    4. handle.wait()          the only wait: until the tokens of step N are on the host
    5. scheduler.complete()   append tokens, finish requests
    6. recent.completed()     note times and counts
    7. masker.advance()       advance grammars; end the requests whose grammar failed
    8. publish()              send each API process its tokens

    host     | plan N+1, launch | wait N  | complete N, publish | plan N+2, launch | wait N+1 ...
    device   | step N                     | step N+1                               | step N+2 ...

A step with masked rows has 4 to 8 of step N between 3 and its own sampling, since masks depend on
all earlier tokens. Without a plan, all steps in flight are completed. If nothing was left to
complete either, is_blocked is True until a message comes or a transfer ends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from nanovllm.engine.clock import StepClock
from nanovllm.engine.executor import Executor, StepHandle
from nanovllm.engine.pace import PaceKeeper
from nanovllm.engine.progress import StepProgress
from nanovllm.engine.recent import Recent
from nanovllm.plan import Masks
from nanovllm.sched.planner import Planner
from nanovllm.wire import Abort, FinishReason, Generate, Refusal, RefusalKind, StepOutput, ToEngine

log = logging.getLogger("engine")
FAILED = "the engine failed to admit this request; see its log"


class Masker(Protocol):
    """Grammar masks: the tokens that running requests may sample next."""

    def fill(self, rows: list[tuple[int, list[int]]]) -> Masks:
        """Return the masks of rows, each given as (request id, draft tokens of the row).

        A row has 1 + len(drafts) masks: one for the first token, then one after each draft. Masks
        of a finished request, and masks after a draft that the grammar rejects, are arbitrary.
        """
        ...

    def advance(self, output: StepOutput) -> Collection[int]:
        """Advance the grammars by a step's tokens, and drop the requests that it finished.

        Return the ids of failed requests, whose tokens their grammars do not allow.
        """
        ...


@dataclass(frozen=True, slots=True)
class InFlight:
    handle: StepHandle
    was_idle: bool  # first step after the engine was idle
    num_decoded: int  # tokens of decode rows
    num_prompt: int  # prompt tokens
    host_s: float  # host time of its plan and launch


class EngineLoop:
    """The step loop. With depth = 1 it plans step N+1 while the device runs step N.

    With depth = 0, planning and running never overlap.

    Decision: if rows follow a grammar, the forward pass of step N+1 is launched as usual. Only its
    sampling waits for step N's tokens and the masks. The host thus computes masks while the device
    computes logits.

    `pace` adjusts scheduler.mixed_step_tokens before each plan; with None it is constant.
    `max_queue` limits the waiting requests, see has_room_for().
    """

    def __init__(
        self,
        scheduler: Planner,
        executor: Executor,
        publish: Callable[[StepOutput], None],
        masker: Masker,
        depth: int = 1,
        pace: PaceKeeper | None = None,
        max_queue: int = 1 << 30,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.publish = publish
        self.masker = masker
        self.depth = depth
        self.pace = pace
        self.max_queue = max_queue
        self.now = now  # seconds; arrival times order the queue
        self.measures = True  # step times go to the scheduler; False: it plans without a clock
        self.clock = StepClock()  # host time per part of a step
        self.progress = StepProgress()
        self.recent = Recent(scheduler, now)
        self.bubble_s = 0.0  # total time that the device waited for the host despite work
        self._in_flight: deque[InFlight] = deque()
        self._has_run = False  # whether the latest step planned, completed or moved anything
        self._was_idle = True

    @property
    def idle(self) -> bool:
        return not self._in_flight and not self.scheduler.has_work

    @property
    def is_blocked(self) -> bool:
        """Return True if nothing can run before a message comes or a transfer ends."""
        if self._in_flight or self._has_run:
            return False
        return self.scheduler.num_moving > 0 or bool(self.scheduler.request_ids())

    def handle(self, message: ToEngine) -> None:
        """Process a message. An exception while admitting a request fails only that request."""
        match message:
            case Generate():
                try:
                    self.executor.vet(message)
                    self.scheduler.add(message, self.now())
                except Exception:
                    self.fail(message.request_id)
            case Abort(request_id):
                self.scheduler.abort(request_id)

    def has_room_for(self, request: Generate, num_compiling: int = 0) -> bool:
        """Return True if the queue has room for a new request; otherwise refuse the request.

        `num_compiling` requests wait for their grammar. They count as waiting.
        """
        if self.scheduler.num_waiting + num_compiling < self.max_queue:
            return True
        reason = f"{self.max_queue} requests are already waiting"
        self.refuse(request.request_id, RefusalKind.QUEUE_FULL, reason)
        return False

    def fail(self, request_id: int) -> None:
        """Refuse a request because of the exception being handled."""
        log.exception("request %d cannot be admitted", request_id)
        self.refuse(request_id, RefusalKind.FAILED, FAILED)

    def refuse(self, request_id: int, kind: RefusalKind, reason: str) -> None:
        self._publish(StepOutput(refused=[Refusal(request_id, kind, reason)]))

    def publish_events(self) -> None:
        """Publish refusals and finishes immediately, outside a step."""
        if (events := self.scheduler.output()) != StepOutput():
            self.recent.note_finished(events)
            self._publish(events)

    def step(self) -> None:
        self.clock.skip()
        spent_s = self.clock.spent_s
        if self.pace is not None:
            self.scheduler.mixed_step_tokens = self.pace.mixed_step_tokens
        self._has_run = bool(self._in_flight)
        if self.scheduler.has_tiers and self.scheduler.num_moving:
            for moved in self.executor.moved():
                self.scheduler.moved(moved)
                self._has_run = True
        plan = self.scheduler.plan()
        self._has_run |= plan is not None
        moves = self.scheduler.moves() if self.scheduler.has_tiers else None
        if moves is not None:
            self.executor.move(moves)
        self.clock.lap("plan")
        if plan is not None:
            num_decoded, num_prompt = plan.num_decoded, plan.num_prompt
            self.progress.begin(num_decoded + num_prompt)
            handle = self.executor.launch(plan)
            self.recent.planned(plan, handle.mode)
            self.clock.lap("launch")
            host_s = self.clock.spent_s - spent_s
            if plan.masked:
                self._complete(0)  # a mask depends on all tokens before it
                handle.sample(self.masker.fill(self.scheduler.masked_rows(plan)))
                self.clock.lap("mask")
            self._in_flight.append(
                InFlight(
                    handle=handle,
                    was_idle=self._was_idle,
                    num_decoded=num_decoded,
                    num_prompt=num_prompt,
                    host_s=host_s,
                )
            )
            if self.pace is not None:
                self.pace.planned(num_decoded, num_prompt)
        if moves is not None and moves.loads:
            self.recent.note_arrivals()
        self._complete(self.depth if plan is not None else 0)
        self._was_idle = self.idle
        if plan is not None:
            self.clock.end_step()

    def _complete(self, most_in_flight: int) -> None:
        while len(self._in_flight) > most_in_flight:
            step = self._in_flight.popleft()
            result = step.handle.wait()
            self.progress.end()
            self.clock.skip()
            bubble_s = 0.0 if step.was_idle else step.handle.gap_s
            self.bubble_s += bubble_s
            if self.pace is not None:
                self.pace.measured(step.num_decoded, step.num_prompt, step.handle.busy_s)
            if self.scheduler.has_tiers and not step.num_decoded:
                self.scheduler.computed(step.num_prompt, step.handle.busy_s)
            spent_s = self.clock.spent_s
            output = self.scheduler.complete(result)
            self.recent.completed(step.handle, bubble_s, output, spent_s)
            self._publish(output)
            self.clock.lap("complete")
            busy_s, host_s = step.handle.busy_s, step.host_s + self.clock.spent_s - spent_s
            is_typical = self.measures and not (step.was_idle or step.num_prompt)
            has_clock = busy_s > 0  # a simulated device has none
            period_s = max(busy_s, host_s) if is_typical and has_clock else 0.0
            self.scheduler.measure(result.step, period_s)

    def _publish(self, output: StepOutput) -> None:
        """Publish an output. Only the requests whose grammar failed end with an error."""
        if failed := self.masker.advance(output):
            for request_id in failed:
                self.scheduler.abort(request_id, FinishReason.FAILED)
            finished = [
                replace(one, reason=FinishReason.FAILED) if one.request_id in failed else one
                for one in output.finished
            ]
            output = replace(output, finished=finished)
        self.publish(output)
