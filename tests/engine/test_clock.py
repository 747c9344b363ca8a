"""Device gaps, the host's share of a step, and the modes by which steps are counted."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from nanovllm.engine import clock
from nanovllm.engine.clock import StepClock
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.paper import PaperExecutor
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import Chunk, Masks, StepPlan, mode_key
from nanovllm.runner.batch import RowBuilder
from nanovllm.runner.results import DeviceClock, Handle, StepCopy
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Generate, Sampling
from tests.engine.no_grammars import NoGrammars

CPU = torch.device("cpu")
ROW = RowBuilder(1, 0, 1, CPU).padded(1, 1, 1)

# -- the device ------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the simulated time in seconds, which only a test advances."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def handle_of(device: DeviceClock, now: list[float], work_s: float) -> Handle:
    """Return the handle of a step whose sampling takes `work_s` seconds."""

    def finish(masks: Masks | None) -> StepCopy:
        now[0] += work_s
        return StepCopy(torch.tensor([[7]], dtype=torch.int32), None, None, ROW)

    return Handle(1, device, device.begin(), finish, mode="NONE/decode")


def test_a_gap_is_what_passes_between_the_work_of_two_steps(now: list[float]) -> None:
    device = DeviceClock(CPU)
    first = handle_of(device, now, 0.03)
    first.sample(None)
    now[0] += 0.02
    second = handle_of(device, now, 0.03)
    second.sample(None)
    assert second.wait().tokens.tolist() == [[7]] and first.wait().step == 1
    assert second.gap_s == pytest.approx(0.02) and first.gap_s == 0.0
    assert first.busy_s == second.busy_s == pytest.approx(0.03)


def test_waiting_for_masks_is_a_gap_too(now: list[float]) -> None:
    device = DeviceClock(CPU)
    masked = handle_of(device, now, 0.0)
    device.end()
    now[0] += 0.02
    masked.sample(np.zeros((1, 1), np.int32))
    masked.wait()
    assert masked.gap_s == pytest.approx(0.02) and masked.busy_s == 0.0


class Tick:
    """An event whose time is the number of events recorded before it."""

    made = recorded = 0

    def __init__(self) -> None:
        Tick.made += 1

    def record(self) -> None:
        self.at = Tick.recorded
        Tick.recorded += 1

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Tick) -> float:
        return 1e3 * (end.at - self.at)


def test_events_are_used_again_but_not_while_a_step_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tick, "made", 0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Tick())
    device = DeviceClock(torch.device("cuda"))
    in_flight: list[Handle] = []
    for _ in range(50):
        handle = handle_of(device, [0.0], 0.0)
        handle.sample(None)
        in_flight.append(handle)
        if len(in_flight) > 2:
            in_flight.pop(0).wait()
            assert handle.gap_s == 0.0
            last = in_flight[0]
    last.wait()
    assert last.gap_s == 1.0  # the first event after the end of the previous step
    assert last.busy_s == 1.0  # from that event to the step's own end
    assert Tick.made <= 2 * 3 + 2


# -- the loop --------------------------------------------------------------------------------


class Slow:
    """Executor whose steps begin one second after the end of the previous step."""

    def __init__(self) -> None:
        self.paper = PaperExecutor([5], 4, 0.0)
        self.steps_by_mode: Counter[str] = self.paper.steps_by_mode
        self.padded_tokens = 0
        self.vet = self.paper.vet

    def launch(self, plan: StepPlan) -> object:
        handle = self.paper.launch(plan)
        handle.gap_s = 1.0
        time.sleep(0.002)
        return handle


@pytest.mark.parametrize("depth", [0, 1])
def test_the_loop_counts_gaps_but_not_rests(depth: int) -> None:
    scheduler = Scheduler(KVMemory(64, 4), num_slots=4, step_tokens=32, max_model_tokens=64)
    executor = Slow()
    loop = EngineLoop(scheduler, executor, lambda output: None, NoGrammars(), depth)
    for name, count in enumerate((5, 3)):  # the engine is idle before each request
        loop.handle(Generate(name, array("i", [name] * 6).tobytes(), count, [], Sampling()))
        while not loop.idle:
            loop.step()
    steps = sum(executor.steps_by_mode.values())
    assert loop.bubble_s == steps - 2
    assert executor.steps_by_mode["PAPER/prefill"] == 2
    assert executor.steps_by_mode["PAPER/decode"] == steps - 2 >= 6
    assert set(loop.clock.total_s) == {"plan", "launch", "complete"}
    assert 0.002 * steps <= loop.clock.total_s["launch"] < 0.5 * steps
    assert 0.002 <= loop.clock.step_p50_s() < 0.5


def test_what_the_host_waited_for_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])
    host = StepClock()
    assert host.step_p50_s() == 0.0
    for spent in (1.0, 2.0, 9.0):
        now[0] += 100.0
        host.skip()
        now[0] += spent
        host.lap("plan")
        now[0] += spent
        host.lap("launch")
        host.end_step()
    assert dict(host.total_s) == {"plan": 12.0, "launch": 12.0}
    assert host.step_p50_s() == 4.0


# -- kinds of steps --------------------------------------------------------------------------


def test_steps_are_counted_by_how_they_ran_and_for_whom() -> None:
    plan = partial(StepPlan, 1, [], [], max_length=9)
    chunk = [Chunk(0, 5, True)]
    decodes = partial(plan, num_decodes=2, decodes=None)
    assert mode_key("FULL", decodes(chunks=[], masked=[])) == "FULL/decode"
    assert mode_key("NONE", decodes(chunks=chunk, masked=[])) == "NONE/mixed"
    assert mode_key("FULL", decodes(chunks=[], masked=[1])) == "FULL/structured"
    prefill = plan(num_decodes=0, decodes=b"", chunks=chunk, masked=[])
    assert mode_key("PIECEWISE", prefill) == "PIECEWISE/prefill"
