"""Detection of late steps, as opposed to long ones."""

from __future__ import annotations

import pytest

from nanovllm.engine import progress
from nanovllm.engine.progress import FIRST_STEP_S, StepProgress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "monotonic", clock)
    return clock


def run(steps: StepProgress, clock: Clock, num_tokens: int, seconds: float) -> None:
    steps.begin(num_tokens)
    clock.now += seconds
    steps.end()


def test_idle_is_neither_old_nor_late(clock: Clock) -> None:
    steps = StepProgress()
    run(steps, clock, 4, 0.1)
    clock.now += 1e6
    assert (steps.age_s(), steps.late_s()) == (0.0, 0.0)


def test_the_first_step_may_take_minutes(clock: Clock) -> None:
    steps = StepProgress()
    steps.begin(512)
    clock.now += 500
    assert steps.age_s() == 500 and steps.late_s() == 500 - FIRST_STEP_S


def test_a_step_may_take_as_long_as_the_longest(clock: Clock) -> None:
    steps = StepProgress()
    run(steps, clock, 100, 3.0)
    run(steps, clock, 1, 0.02)
    steps.begin(1)
    clock.now += 15
    assert steps.late_s() == pytest.approx(12.0)


def test_the_first_long_prompt_is_no_alarm(clock: Clock) -> None:
    steps = StepProgress()
    run(steps, clock, 2, 0.1)  # 50 ms per token
    steps.begin(512)
    clock.now += 25
    assert steps.late_s() < 0
    clock.now += 10
    assert steps.late_s() == pytest.approx(35 - 25.6)


def test_steps_in_flight_are_measured_from_the_last_that_ended(clock: Clock) -> None:
    steps = StepProgress()
    steps.begin(1)
    clock.now += 1
    steps.begin(1)
    clock.now += 1
    steps.end()  # took 2 s
    clock.now += 1.5
    assert steps.age_s() == 1.5
    steps.end()
    steps.begin(1)
    clock.now += 3
    assert steps.late_s() == pytest.approx(1.0)
