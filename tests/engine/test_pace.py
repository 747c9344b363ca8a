"""Decode rows keep their pace next to long prompts: PaceKeeper alone, and with a scheduler."""

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
from nanovllm.engine.pace import (
    STALE_STEPS,
    TARGET,
    UNITS,
    MixedCosts,
    PaceKeeper,
    pace_of,
)
from nanovllm.kv.costs import median
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import StepPlan, StepResult
from nanovllm.sched.policy import prompt_budget
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Generate, Sampling
from tests.engine.no_grammars import NoGrammars
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import PaperGPU, PaperHandle, solo_run

# -- a device whose times follow a formula -------------------------------------------------------


class Step(NamedTuple):
    rows: int
    prompt: int
    quiet_s: float  # time without prompts
    seconds: float


@dataclass
class Handle:
    result: StepResult
    busy_s: float
    gap_s: float = 0.0
    mode: str = ""

    def wait(self) -> StepResult:
        return self.result


@dataclass
class Device:
    """Executor with computed times. `noise` is their uniform relative variation."""

    base_s: float
    row_s: float
    token_s: float  # per prompt token, in an empty context
    launch_s: float  # per step with any prompt
    context: float  # number of context tokens that double token_s
    noise: float = 0.0
    steps: list[Step] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    steps_by_mode: Counter[str] = field(default_factory=Counter)
    padded_tokens: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def vet(self, request: Generate) -> None:
        """Accept all requests."""

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
    """Run 8 streams, then three prompts of 4,000 tokens, until the last prompt is fed."""
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
    # A CPU starts with a low budget.
    settled = load.device.mixed[5:] if name != "cpu" else load.device.mixed
    worst = sorted(step.seconds / step.quiet_s for step in settled)
    assert worst[int(0.99 * (len(worst) - 1))] < 4
    # Prompts do not starve either: they get at least 45 % of the device's time.
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
    """Contexts grow, so the time of a step without prompts must be measured again."""
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


# -- a slow host: each step with a prompt takes longer, even with few tokens --------------------

SLOW = Device(base_s=76e-3, row_s=2e-3, token_s=1e-3, launch_s=150e-3, context=5000)
SLOWER = Device(base_s=76e-3, row_s=2e-3, token_s=1e-3, launch_s=400e-3, context=5000)
SLOWEST = Device(base_s=10e-3, row_s=1e-3, token_s=1e-3, launch_s=400e-3, context=5000)


def prompt_with_rows(device: Device, step_tokens: int, depth: int) -> list[Step]:
    """Return the steps of a prompt of 2,000 tokens, with 12 decode rows."""
    load = Load(device, step_tokens, PaceKeeper(step_tokens, start=step_tokens // 8))
    load.loop.depth = depth
    for _ in range(12):
        load.add(40, 100_000)
    load.step(lambda: sum(step.prompt for step in device.steps) == 12 * 40)
    begun = len(device.steps) + 20
    load.step(lambda: len(device.steps) == begun)
    load.add(2000, 20)
    load.step(lambda: sum(step.prompt for step in device.steps) == 12 * 40 + 2000)
    return device.steps[begun:]


def seconds_alone(device: Device, step_tokens: int) -> float:
    load = Load(device, step_tokens, None)
    load.add(2000, 1)
    load.step(lambda: load.loop.idle)
    return sum(step.seconds for step in device.steps)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("noise", [0.0, 0.15, 0.3])
@pytest.mark.parametrize("step_tokens", [64, 512])
@pytest.mark.parametrize("device", [SLOW, SLOWER, SLOWEST], ids=["slow", "slower", "slowest"])
def test_a_prompt_on_a_slow_host_takes_a_few_times_as_long_as_alone(
    device: Device, step_tokens: int, noise: float, depth: int
) -> None:
    """The time is at most four times that of the prompt alone, plus steps for measuring.

    Before, it was 12 to 57 times, since each step had 1 to 24 prompt tokens.
    """
    steps = prompt_with_rows(copy_of(device, noise), step_tokens, depth)
    assert sum(step.seconds for step in steps) < 6.5 * seconds_alone(
        copy_of(device, 0), step_tokens
    )


@pytest.mark.parametrize("device", [SLOW, SLOWER, SLOWEST], ids=["slow", "slower", "slowest"])
def test_once_the_cost_is_known_prompts_keep_a_quarter_of_their_pace(device: Device) -> None:
    """Steps are no longer than needed: on average a third longer than without prompt tokens."""
    mixed = [s for s in prompt_with_rows(copy_of(device, 0), 512, 1) if s.prompt]
    settled = mixed[-1 - len(mixed) // 4 * 2 : -1]  # an even number, since sizes alternate
    tokens, seconds = (sum(getattr(s, k) for s in settled) for k in ("prompt", "seconds"))
    own_s = seconds - sum(s.quiet_s + device.launch_s for s in settled)  # time of the tokens alone
    assert tokens > 1000 and 0.22 < own_s / seconds < 0.3


def test_where_tokens_themselves_are_slow_steps_stay_as_short_as_before() -> None:
    """Without a fixed part, prompts have 60 % of the time. The minimum is 8 tokens."""
    device = Device(base_s=76e-3, row_s=2e-3, token_s=7e-3, launch_s=0.0, context=1e9)
    mixed = [s for s in prompt_with_rows(device, 512, 1) if s.prompt]
    assert {step.prompt for step in mixed[:-1]} == {16}
    assert max(step.seconds / step.quiet_s for step in mixed) < 2.6


class SlowPaperGPU(PaperGPU):
    """A simulated GPU on a host with the times of SLOW."""

    def launch(self, plan: StepPlan) -> PaperHandle:
        handle = super().launch(plan)
        num_rows, num_prompt = self.fed[-1]
        handle.busy_s = SLOW.base_s + SLOW.row_s * num_rows
        if num_prompt:
            handle.busy_s += SLOW.launch_s + SLOW.token_s * num_prompt
        self.seconds = [*getattr(self, "seconds", []), handle.busy_s]
        return handle


@pytest.mark.parametrize("depth", [0, 1])
def test_on_a_slow_paper_gpu_a_long_prompt_is_not_starved_and_texts_stay(depth: int) -> None:
    """Before, its steps had fewer and fewer tokens, down to 2. The first token came after 70 s."""
    engine = PaperEngine(num_pages=400, num_slots=16, budget=128, mixed=128, depth=depth)
    engine.gpu = SlowPaperGPU(16, 400, 4, None)
    engine.mixed = 10**9  # the budget changes in each step
    engine.loop.pace = PaceKeeper(128, start=16)
    prompts = {name: [name, *range(5)] for name in range(12)} | {99: [*range(40)] * 12}
    for name in range(12):
        engine.say(generate(name, prompts[name], 250))
    while engine.gpu.steps < 30:
        engine.step()
    engine.say(generate(99, prompts[99], 3))
    while 99 not in engine.text:
        engine.step()
    fed = [num for _, num in engine.gpu.fed[30:] if num]
    first_s = sum(engine.gpu.seconds[30:])
    engine.finish_all()
    for name, prompt in prompts.items():
        most = 3 if name == 99 else 250
        assert engine.text[name] == solo_run(prompt, most, [], recurrent=False)
    alone_s = 4 * (0.076 + 0.15) + 480 * SLOW.token_s
    assert first_s < 5 * alone_s and max(fed[5:]) >= 60


# -- the keeper alone ----------------------------------------------------------------------------


def told(pace: PaceKeeper, rows: int, prompt: int, seconds: float) -> int:
    pace.planned(rows, prompt)
    pace.measured(rows, prompt, seconds)
    return pace.prompt_tokens


def test_it_goes_where_the_times_say() -> None:
    pace = PaceKeeper(512, start=64)
    assert pace.prompt_tokens == 64 and pace.mixed_step_tokens == 64
    assert told(pace, 0, 100, 10e-3) == 64  # no step without prompts has been measured
    assert told(pace, 8, 0, 10e-3) == 144  # 15 ms at 0.1 ms per token, in whole units
    for _ in range(3):
        assert told(pace, 8, 96, 10e-3 + 96 * 0.2e-3) % 8 == 0
    assert pace.prompt_tokens == int((TARGET - 1) * 10 / 0.2) // 8 * 8 == 72
    assert pace.mixed_step_tokens == 72 + 8
    for _ in range(3):
        told(pace, 8, 96, 10e-3 + 96 * 5e-3)
    assert pace.prompt_tokens == 512 // UNITS == 8  # the minimum
    for _ in range(3):
        told(pace, 8, 96, 9e-3)  # faster than a step without prompts: noise
    assert 96 < pace.prompt_tokens <= 512


def test_the_cost_of_one_token_more_is_told_from_steps_of_different_sizes() -> None:
    """Ten tokens take 0.1 s in addition to a fixed 0.9 s; one step took far longer."""
    costs = MixedCosts()
    for num_prompt in (8, 9, 10, 11):  # too similar
        costs.add(num_prompt, 0.9 + 0.01 * num_prompt)
    assert costs.token_s == 0 == costs.lower_bound(0.1)
    for num_prompt in (16, 8, 16, 8):
        costs.add(num_prompt, 0.9 + 0.01 * num_prompt)
    assert costs.token_s == pytest.approx(0.01) and costs.most_tokens == 16
    # (0.9 + 0.1) / 0.01 / 3, but half of SHARE of the average (12 tokens, 1.02 s) costs more.
    average_s = 1.02 / 12
    fixed_s = 0.1 + median(0.9 + (0.01 - average_s / 8) * num for num in (16, 8, 16, 8))
    assert costs.lower_bound(0.1) == pytest.approx(fixed_s / (average_s / 8) / 3)
    before = costs.token_s
    costs.add(16, 30.0)
    assert costs.token_s == pytest.approx(before)
    assert costs.lower_bound(0.0) == 0


def test_one_slow_step_changes_nothing() -> None:
    pace = PaceKeeper(512, start=64)
    for _ in range(5):
        told(pace, 4, 0, 10e-3)
        before = told(pace, 4, 64, 20e-3)
    assert told(pace, 4, 64, 0.5) == before
    assert told(pace, 4, 0, 0.5) == before
    assert told(pace, 4, 2, 20e-3) == before  # two tokens do not show the cost of a token


def test_rows_that_are_new_are_measured_once_without_prompts() -> None:
    pace = PaceKeeper(512, start=64)
    told(pace, 4, 0, 10e-3)
    assert told(pace, 5, 64, 20e-3) > 0  # 4 to 7 rows share an entry
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
