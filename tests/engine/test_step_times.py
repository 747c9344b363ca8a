"""Times of steps that the loop reports to the scheduler, with a clock that the test moves."""

from __future__ import annotations

from array import array

import pytest

from nanovllm.engine import clock
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.paper import PaperExecutor, PaperHandle
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import StepPlan, StepResult
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Generate, Sampling, StepOutput
from tests.engine.no_grammars import NoGrammars

PLAN_S, COMPLETE_S, WAIT_S = 0.001, 0.002, 0.5
LAUNCH_S = {False: 0.004, True: 0.030}  # by whether the step's number is a multiple of 3
BUSY_S = 0.010


class Clocked(Scheduler):
    """A scheduler that takes a known time, and keeps what it is told of steps' times."""

    now = 0.0

    def plan(self) -> StepPlan | None:
        self.now += PLAN_S
        return super().plan()

    def complete(self, result: StepResult) -> StepOutput:
        self.now += COMPLETE_S
        return super().complete(result)

    def measure(self, step: int, period_s: float) -> None:
        self.measured.append((step, round(period_s, 6)))


class SlowHandle(PaperHandle):
    scheduler: Clocked

    def wait(self) -> StepResult:
        self.scheduler.now += WAIT_S
        return self.result


def test_a_step_takes_the_time_of_the_device_or_of_its_own_host_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dear launch counts for its own step, not for the next one, and waiting counts for none."""
    scheduler = Clocked(KVMemory(64, 128), num_slots=4, step_tokens=64, max_model_tokens=512)
    scheduler.measured = []
    monkeypatch.setattr(clock, "perf_counter", lambda: scheduler.now)
    executor = PaperExecutor([7, 8, 9], 4, step_s=BUSY_S)
    launched = executor.launch

    def launch(plan: StepPlan) -> SlowHandle:
        scheduler.now += LAUNCH_S[plan.step % 3 == 0]
        made = launched(plan)
        handle = SlowHandle(made.result, made.masked, 0.0, gap_s=0.3, busy_s=BUSY_S)
        handle.scheduler = scheduler
        return handle

    monkeypatch.setattr(executor, "launch", launch)
    loop = EngineLoop(scheduler, executor, lambda output: None, NoGrammars(), depth=1)
    loop.handle(Generate(1, array("i", range(100)).tobytes(), 12, [], Sampling()))
    while not loop.idle:
        loop.step()
    # Steps 1 and 2 compute the prompt, so their times are not typical of a row.
    dear = round(PLAN_S + LAUNCH_S[True] + COMPLETE_S, 6)
    steps = [step for step, _ in scheduler.measured]
    assert steps == [*range(steps[0], steps[0] + len(steps))] and len(steps) >= 12
    assert [period for _, period in scheduler.measured[:2]] == [0.0, 0.0]
    for step, period_s in scheduler.measured[2:]:
        assert period_s == (dear if step % 3 == 0 else BUSY_S), step
