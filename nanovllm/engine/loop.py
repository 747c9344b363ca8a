"""The step loop: the one place where planning, running and publishing meet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from nanovllm.engine.clock import StepClock
from nanovllm.engine.executor import Executor, StepHandle
from nanovllm.plan import Masks
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Abort, Generate, StepOutput, ToEngine


class Masker(Protocol):
    """Which tokens the grammars of running requests allow next."""

    def fill(self, request_ids: list[int]) -> Masks:
        """A mask per request. One that has finished gets any."""
        ...

    def advance(self, output: StepOutput) -> None:
        """Follow the tokens of a step, and forget the requests it finished."""
        ...


class EngineLoop:
    """depth = 1 plans step N+1 while the device runs step N; depth = 0 never overlaps.

    Decision: where rows follow a grammar, step N+1's forward pass is launched as always and only
    its sampling waits until step N's tokens are on the host and the masks are made: the host
    computes masks while the device computes logits.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        publish: Callable[[StepOutput], None],
        masker: Masker,
        depth: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.publish = publish
        self.masker = masker
        self.depth = depth
        self.now = now  # seconds: who came when decides who goes first
        self.clock = StepClock()  # of the host
        self.bubble_s = 0.0  # in all, the device waited for the host while there was work
        self._in_flight: deque[tuple[StepHandle, bool]] = deque()  # True: the first after a rest
        self._rested = True

    @property
    def idle(self) -> bool:
        return not self._in_flight and not self.scheduler.has_work

    def handle(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self.scheduler.add(message, self.now())
            case Abort(request_id):
                self.scheduler.abort(request_id)

    def tell(self) -> None:
        """Publish refusals and the like at once, without waiting for a step."""
        told = self.scheduler.output()
        if told.started or told.finished or told.refused:
            self._publish(told)

    def step(self) -> None:
        self.clock.skip()
        plan = self.scheduler.plan()
        self.clock.lap("plan")
        if plan is not None:
            handle = self.executor.launch(plan)
            self.clock.lap("launch")
            if plan.masked:
                self._complete(0)  # a mask follows from every token before it
                handle.sample(self.masker.fill(self.scheduler.masked_ids(plan)))
                self.clock.lap("mask")
            self._in_flight.append((handle, self._rested))
        self._complete(self.depth if plan is not None else 0)
        self._rested = self.idle
        if plan is not None:
            self.clock.end_step()

    def _complete(self, most_in_flight: int) -> None:
        while len(self._in_flight) > most_in_flight:
            handle, rested = self._in_flight.popleft()
            result = handle.wait()
            self.clock.skip()
            self.bubble_s += 0.0 if rested else handle.gap_s
            self._publish(self.scheduler.complete(result))
            self.clock.lap("complete")

    def _publish(self, output: StepOutput) -> None:
        self.masker.advance(output)
        self.publish(output)
