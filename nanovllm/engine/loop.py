"""The step loop: the one place where planning, running and publishing meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nanovllm.engine.executor import Executor, StepHandle
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Abort, Generate, StepOutput, ToEngine


class EngineLoop:
    """depth = 1 plans step N+1 while the device runs step N; depth = 0 never overlaps."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        publish: Callable[[StepOutput], None],
        depth: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.publish = publish
        self.depth = depth
        self._in_flight: deque[StepHandle] = deque()

    @property
    def idle(self) -> bool:
        return not self._in_flight and not self.scheduler.has_work

    def handle(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self.scheduler.add(message)
            case Abort(request_id):
                self.scheduler.abort(request_id)

    def tell(self) -> None:
        """Publish refusals and the like at once, without waiting for a step."""
        told = self.scheduler.output()
        if told.started or told.finished or told.refused:
            self.publish(told)

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self.executor.launch(plan))
        while len(self._in_flight) > (self.depth if plan is not None else 0):
            self.publish(self.scheduler.complete(self._in_flight.popleft().wait()))
