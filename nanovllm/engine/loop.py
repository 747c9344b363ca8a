"""The step loop: the one place where planning, running and publishing meet."""

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
from nanovllm.sched.lanes import Planner
from nanovllm.wire import Abort, FinishReason, Generate, Refusal, RefusalKind, StepOutput, ToEngine

log = logging.getLogger("engine")
FAILED = "the engine failed to admit this request; its log says why"


class Masker(Protocol):
    """Which tokens the grammars of running requests allow next."""

    def fill(self, rows: list[tuple[int, list[int]]]) -> Masks:
        """Masks for rows: a request's id, and the drafts that its row feeds.

        1 + len(drafts) each: the first, then one behind each draft. A request that has finished
        gets any, as does what is behind a draft that its grammar refuses.
        """
        ...

    def advance(self, output: StepOutput) -> Collection[int]:
        """Follow the tokens of a step, and forget the requests it finished.

        Return the ids of requests that failed: their tokens are not what their grammars allow.
        """
        ...


@dataclass(frozen=True, slots=True)
class InFlight:
    handle: StepHandle
    rested: bool  # the first step after a rest
    num_decoded: int  # tokens of decode rows
    num_prompt: int  # prompt tokens


class EngineLoop:
    """With depth = 1 it plans step N+1 while the device runs step N; depth = 0 never overlaps.

    Decision: where rows follow a grammar, step N+1's forward pass is launched as always and only
    its sampling waits until step N's tokens are on the host and the masks are made: the host
    computes masks while the device computes logits.

    `pace`: keeps scheduler.mixed_step_tokens fitting; None: it stays as it is.
    """

    def __init__(
        self,
        scheduler: Planner,
        executor: Executor,
        publish: Callable[[StepOutput], None],
        masker: Masker,
        depth: int = 1,
        pace: PaceKeeper | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.publish = publish
        self.masker = masker
        self.depth = depth
        self.pace = pace
        self.now = now  # seconds: who came when decides who goes first
        self.clock = StepClock()  # of the host
        self.progress = StepProgress()
        self.recent = Recent(scheduler, executor, now)
        self.bubble_s = 0.0  # in all, the device waited for the host while there was work
        self._in_flight: deque[InFlight] = deque()
        self._rested = True

    @property
    def idle(self) -> bool:
        return not self._in_flight and not self.scheduler.has_work

    def handle(self, message: ToEngine) -> None:
        """An exception of one request's admission is that request's end, and nobody else's."""
        match message:
            case Generate():
                try:
                    self.executor.vet(message)
                    self.scheduler.add(message, self.now())
                except Exception:
                    self.fail(message.request_id)
            case Abort(request_id):
                self.scheduler.abort(request_id)

    def fail(self, request_id: int) -> None:
        """Refuse a request because of the exception that is being handled."""
        log.exception("request %d cannot be admitted", request_id)
        self.refuse(request_id, RefusalKind.FAILED, FAILED)

    def refuse(self, request_id: int, kind: RefusalKind, reason: str) -> None:
        self._publish(StepOutput(refused=[Refusal(request_id, kind, reason)]))

    def tell(self) -> None:
        """Publish refusals and the like at once, without waiting for a step."""
        if (told := self.scheduler.output()) != StepOutput():
            self.recent.told(told)
            self._publish(told)

    def step(self) -> None:
        self.clock.skip()
        if self.pace is not None:
            self.scheduler.mixed_step_tokens = self.pace.mixed_step_tokens
        plan = self.scheduler.plan()
        self.clock.lap("plan")
        if plan is not None:
            num_decoded, num_prompt = plan.num_decoded, plan.num_prompt
            self.progress.begin(num_decoded + num_prompt)
            handle = self.executor.launch(plan)
            self.recent.planned(plan)
            self.clock.lap("launch")
            if plan.masked:
                self._complete(0)  # a mask follows from every token before it
                handle.sample(self.masker.fill(self.scheduler.masked_rows(plan)))
                self.clock.lap("mask")
            self._in_flight.append(InFlight(handle, self._rested, num_decoded, num_prompt))
            if self.pace is not None:
                self.pace.planned(num_decoded, num_prompt)
        self._complete(self.depth if plan is not None else 0)
        self._rested = self.idle
        if plan is not None:
            self.clock.end_step()

    def _complete(self, most_in_flight: int) -> None:
        while len(self._in_flight) > most_in_flight:
            step = self._in_flight.popleft()
            result = step.handle.wait()
            self.progress.end()
            self.clock.skip()
            self.bubble_s += (bubble_s := 0.0 if step.rested else step.handle.gap_s)
            if self.pace is not None:
                self.pace.measured(step.num_decoded, step.num_prompt, step.handle.busy_s)
            output = self.scheduler.complete(result)
            self.recent.completed(step.handle, bubble_s, output, self.clock.spent_s)
            self._publish(output)
            self.clock.lap("complete")

    def _publish(self, output: StepOutput) -> None:
        """Publish what happened. A request that its masker gives up ends with an error, alone."""
        if failed := self.masker.advance(output):
            for request_id in failed:
                self.scheduler.abort(request_id, FinishReason.FAILED)
            finished = [
                replace(one, reason=FinishReason.FAILED) if one.request_id in failed else one
                for one in output.finished
            ]
            output = replace(output, finished=finished)
        self.publish(output)
