"""Decode rows keep their pace beside long prompts: the keeper alone, and driving a scheduler."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from nanovllm.config import Schedule
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.pace import STALE_STEPS, TARGET, UNITS, PaceKeeper, pace_of
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import StepPlan, StepResult
from nanovllm.sched.policy import prompt_budget
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Generate, Sampling
from tests.engine.no_grammars import NoGrammars

# -- a device that takes time by a formula -----------------------------------------------------


class Step(NamedTuple):
    rows: int
    prompt: int
    quiet_s: float  # what it would have taken without prompts
    seconds: float


@dataclass
class Handle:
    result: StepResult
    busy_s: float
    gap_s: float = 0.0

    def wait(self) -> StepResult:
        return self.result


@dataclass
class Device:
    """An executor. `noise`: the share by which times vary, evenly."""

    base_s: float
    row_s: float
    token_s: float  # of a prompt, in an empty context
    launch_s: float  # of any prompt
    context: float  # tokens that double token_s
    noise: float = 0.0
    steps: list[Step] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    steps_by_mode: Counter[str] = field(default_factory=Counter)
    padded_tokens: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def vet(self, request: Generate) -> None:
        """It takes any."""

    def launch(self, plan: StepPlan) -> Handle:
        for admit in plan.admits:
            self.lengths[admit.slot] = admit.num_cached
        num_prompt, more_s = 0, 0.0
        for chunk in plan.chunks:
            heavier = 1 + self.lengths[chunk.slot] / self.context
            more_s += self.launch_s + chunk.num_tokens * self.token_s * heavier
            num_prompt += chunk.num_tokens
            self.lengths[chunk.slot] += chunk.num_tokens
        quiet_s = self.base_s + self.row_s * plan.num_decodes
        seconds = (quiet_s + more_s) * self.rng.uniform(1 - self.noise, 1 + self.noise)
        self.steps.append(Step(plan.num_decodes, num_prompt, quiet_s, seconds))
        lines = plan.num_decodes + sum(chunk.samples for chunk in plan.chunks)
        return Handle(StepResult(plan.step, np.ones((lines, 1), np.int32)), seconds)

    @property
    def mixed(self) -> list[Step]:
        return [step for step in self.steps if step.rows and step.prompt]


CPU = Device(base_s=5e-3, row_s=0.3e-3, token_s=0.15e-3, launch_s=1e-3, context=500)
GPU_8B = Device(base_s=4e-3, row_s=0.03e-3, token_s=20e-6, launch_s=1e-3, context=30_000)
GPU_06B = Device(base_s=0.8e-3, row_s=0.02e-3, token_s=2.2e-6, launch_s=0.3e-3, context=20_000)
DEVICES = {"cpu": (CPU, 512), "8b": (GPU_8B, 8448), "0.6b": (GPU_06B, 8192)}


def copy_of(device: Device, noise: float) -> Device:
    times = device.base_s, device.row_s, device.token_s, device.launch_s, device.context
    return Device(*times, noise)


class Load:
    """The real loop and scheduler on a device."""

    def __init__(self, device: Device, step_tokens: int, pace: PaceKeeper | None) -> None:
        self.device = device
        memory = KVMemory(20_000, 16, prefix=False)
        sizes = {"step_tokens": step_tokens, "mixed_step_tokens": step_tokens}
        self.scheduler = Scheduler(memory, num_slots=64, max_model_tokens=1 << 20, **sizes)
        masker = NoGrammars()
        self.loop = EngineLoop(self.scheduler, device, lambda _: None, masker, 1, pace=pace)
        self.num_requests = 0

    def add(self, num_prompt: int, max_new: int) -> None:
        self.num_requests += 1
        prompt = array("i", [self.num_requests] * num_prompt).tobytes()
        self.loop.handle(Generate(self.num_requests, prompt, max_new, [], Sampling()))

    def step(self, until: Callable[[], bool]) -> None:
        while not until():
            self.loop.step()


def streams_and_prompts(name: str, noise: float, depth: int = 1) -> Load:
    """8 streams, then three prompts of 4,000 tokens; until the last of these is fed."""
    device, step_tokens = DEVICES[name]
    schedule = Schedule(step_tokens=step_tokens)
    load = Load(
        copy_of(device, noise), step_tokens, pace_of(schedule, name if name == "cpu" else "cuda")
    )
    load.loop.depth = depth
    for _ in range(8):
        load.add(40, 100_000)
    load.step(lambda: len(load.device.steps) == 30)
    assert not load.device.mixed
    for _ in range(3):
        load.add(4000, 20)
    load.step(lambda: sum(step.prompt for step in load.device.steps) == 8 * 40 + 3 * 4000)
    return load


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize("name", DEVICES)
def test_a_decode_step_beside_long_prompts_stays_below_four_quiet_ones(
    name: str, noise: float, depth: int
) -> None:
    load = streams_and_prompts(name, noise, depth)
    settled = load.device.mixed[5:] if name != "cpu" else load.device.mixed  # a CPU starts low
    worst = sorted(step.seconds / step.quiet_s for step in settled)
    assert worst[int(0.99 * (len(worst) - 1))] < 4
    # Nor do prompts starve: they have the device for 45 % of the time at least.
    beside = [step for step in load.device.steps if step.rows][30:]
    quiet_s, all_s = (sum(getattr(s, k) for s in beside) for k in ("quiet_s", "seconds"))
    assert 0.55 * all_s > quiet_s


def test_without_it_the_same_streams_wait_ten_times_as_long() -> None:
    load = Load(copy_of(CPU, 0.0), 512, None)
    load.add(40, 100_000)
    load.step(lambda: len(load.device.steps) == 5)
    load.add(4000, 20)
    load.step(lambda: len(load.device.mixed) == 5)
    assert all(step.seconds > 10 * step.quiet_s for step in load.device.mixed)
    assert load.scheduler.mixed_step_tokens == 512


def test_prompts_alone_have_whole_steps() -> None:
    load = Load(copy_of(CPU, 0.1), 512, PaceKeeper(512, start=64))
    for _ in range(4):
        load.add(2000, 1)
    load.step(lambda: load.loop.idle)
    assert [step.prompt for step in load.device.steps] == [512] * 15 + [320]


def test_prompts_without_end_leave_a_quiet_step_now_and_then() -> None:
    """Else nobody would know what a quiet one takes, once contexts have grown."""
    load = Load(copy_of(CPU, 0.1), 512, PaceKeeper(512, start=64))
    for _ in range(8):
        load.add(40, 100_000)
    for _ in range(40):
        load.add(4000, 1)
    load.step(lambda: len(load.device.mixed) == 1500)
    beside = [step for step in load.device.steps if step.rows]
    quiet = [at for at, step in enumerate(beside) if not step.prompt]
    assert 1500 / STALE_STEPS - 1 <= len(quiet) < 1500 / STALE_STEPS + 6
    assert max(np.diff(quiet)) <= STALE_STEPS + 2


# -- the keeper alone --------------------------------------------------------------------------


def told(pace: PaceKeeper, rows: int, prompt: int, seconds: float) -> int:
    pace.planned(rows, prompt)
    pace.measured(rows, prompt, seconds)
    return pace.prompt_tokens


def test_it_goes_where_the_times_say() -> None:
    pace = PaceKeeper(512, start=64)
    assert pace.prompt_tokens == 64 and pace.mixed_step_tokens == 64
    assert told(pace, 0, 100, 10e-3) == 64  # of quiet steps nothing is known
    assert told(pace, 8, 0, 10e-3) == 144  # 15 ms at 0.1 ms a token, in whole units
    for _ in range(3):
        assert told(pace, 8, 96, 10e-3 + 96 * 0.2e-3) % 8 == 0
    assert pace.prompt_tokens == int((TARGET - 1) * 10 / 0.2) // 8 * 8 == 72
    assert pace.mixed_step_tokens == 72 + 8
    for _ in range(3):
        told(pace, 8, 96, 10e-3 + 96 * 5e-3)
    assert pace.prompt_tokens == 512 // UNITS == 8  # the least
    for _ in range(3):
        told(pace, 8, 96, 9e-3)  # faster than a quiet one: noise
    assert 96 < pace.prompt_tokens <= 512


def test_one_slow_step_changes_nothing() -> None:
    pace = PaceKeeper(512, start=64)
    for _ in range(5):
        told(pace, 4, 0, 10e-3)
        before = told(pace, 4, 64, 20e-3)
    assert told(pace, 4, 64, 0.5) == before
    assert told(pace, 4, 0, 0.5) == before
    assert told(pace, 4, 2, 20e-3) == before  # two tokens say nothing of one token's cost


def test_rows_that_are_new_are_measured_once_without_prompts() -> None:
    pace = PaceKeeper(512, start=64)
    told(pace, 4, 0, 10e-3)
    assert told(pace, 5, 64, 20e-3) > 0  # 4 to 7 rows count as one number
    assert told(pace, 8, 64, 25e-3) == 0 == pace.mixed_step_tokens
    assert told(pace, 8, 0, 16e-3) > 0
    assert told(pace, 7, 64, 20e-3) > 0


@given(prompt=st.integers(1, 8192), rows=st.integers(1, 512))
def test_the_schedulers_budget_is_what_was_meant(prompt: int, rows: int) -> None:
    pace = PaceKeeper(1 << 20, start=prompt)
    told(pace, rows, 0, 1e-3)
    assert pace.prompt_tokens == prompt
    assert prompt_budget(1 << 20, pace.mixed_step_tokens, rows) == prompt


def test_a_recipes_number_stays() -> None:
    assert pace_of(Schedule(step_tokens=512, mixed_step_tokens=100), "cpu") is None
    on_cpu, on_gpu = (pace_of(Schedule(step_tokens=512), device) for device in ("cpu", "cuda"))
    assert on_cpu is not None and on_gpu is not None
    assert (on_cpu.start, on_gpu.start) == (64, 512)
