"""Cost of the engine's host side per step, with 256 running requests and no device.

Costs are CPU times of this thread, so that other programs on a shared core add little. The cheapest
of several trials counts, and a cost is compared with one measured at the same time.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.paper import PaperExecutor
from nanovllm.ipc.channel import frame
from nanovllm.kv.memory import KVMemory
from nanovllm.plan import StepPlan, StepResult
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Generate, Sampling, StepOutput
from tests.engine.no_grammars import NoGrammars

NUM_REQUESTS = 256
NUM_STEPS = 200
PAGE = 128


class Engine:
    """Decoding requests with `num_context` tokens each. Counts published bytes."""

    def __init__(self, num_context: int, num_requests: int = NUM_REQUESTS) -> None:
        pages = KVMemory(num_requests * (-(-num_context // PAGE) + 8), PAGE)
        self.scheduler = Scheduler(
            pages,
            num_slots=num_requests,
            step_tokens=8192,
            max_model_tokens=num_context + 4096,
        )
        executor = PaperExecutor([7, 8, 9], num_requests, step_s=0.0)
        self.loop = EngineLoop(self.scheduler, executor, self.publish, NoGrammars(), depth=1)
        self.encoder = msgspec.msgpack.Encoder()
        self.num_bytes = 0
        self.said: list[list[int]] = []
        for request_id in range(num_requests):
            # All lengths occur, so in each step some rows fill a page.
            prompt = array("i", [request_id] * (num_context + request_id % PAGE)).tobytes()
            self.loop.handle(Generate(request_id, prompt, 1000, [1], Sampling()))
        while not self.said or len(self.said[-1]) < num_requests:
            self.loop.step()

    def publish(self, output: StepOutput) -> None:
        self.num_bytes += len(frame(self.encoder, output))
        self.said.append(np.frombuffer(output.tokens, np.int32).tolist())

    def step_us(self) -> float:
        begin = time.thread_time()
        self.loop.step()
        return 1e6 * (time.thread_time() - begin)


def test_a_steady_step_of_256_requests_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(num_context=300)
    engine.said.clear()
    engine.num_bytes = 0
    costs = [engine.step_us() for _ in range(NUM_STEPS)]
    low, median, high = np.percentile(costs, (5, 50, 95))
    with capsys.disabled():
        line = f"\nhost: {median:.0f} us a step of {NUM_REQUESTS} ({low:.0f} .. {high:.0f})\n"
        sys.stdout.write(line)
    assert [len(tokens) for tokens in engine.said] == [NUM_REQUESTS] * NUM_STEPS
    assert engine.said[0] != engine.said[1]  # the paper model's sentence continues
    assert engine.num_bytes < NUM_STEPS * NUM_REQUESTS * 13  # 12 bytes per token and little else
    assert median < 1500.0  # about 200 on an idle core


def test_no_step_costs_more_in_a_longer_context() -> None:
    short, long = Engine(num_context=100), Engine(num_context=4000)
    pairs = [(short.step_us(), long.step_us()) for _ in range(NUM_STEPS)]
    # Other programs on a shared core only add time, so the cheap steps are compared.
    cheap, dear = np.percentile(pairs, 20, axis=0)
    assert dear < 1.4 * cheap, f"{cheap:.0f} us with 100 tokens, {dear:.0f} us with 4000"


def test_sixteen_times_the_requests_cost_a_step_little_more() -> None:
    """More requests cost a few array operations, and extra work for rows that fill a page."""
    few, many = Engine(num_context=300, num_requests=16), Engine(num_context=300)
    pairs = [(few.step_us(), many.step_us()) for _ in range(NUM_STEPS)]
    cheap, dear = np.percentile(pairs, 20, axis=0)
    assert dear < 2.5 * cheap, f"{cheap:.0f} us with 16 requests, {dear:.0f} us with 256"


STOP = 1


def result(plan: StepPlan, token: int = 7) -> StepResult:
    num_rows = plan.num_decodes + sum(chunk.samples for chunk in plan.chunks)
    return StepResult(plan.step, np.full((num_rows, 1), token, np.int32))


def scheduler_of(num_requests: int, page_tokens: int = PAGE, num_slots: int = 0) -> Scheduler:
    """Return a scheduler with waiting requests, all of which the next step admits."""
    memory = KVMemory(200_000 * 16 // page_tokens, page_tokens)
    num_slots = num_slots or num_requests
    scheduler = Scheduler(
        memory, num_slots=num_slots, step_tokens=1 << 20, max_model_tokens=1 << 20
    )
    for i in range(num_requests):
        prompt = array("i", [i] * (300 + i % PAGE)).tobytes()
        scheduler.add(Generate(i, prompt, 1000, [STOP], Sampling()), float(i))
    return scheduler


def begin(num_requests: int) -> tuple[Scheduler, StepPlan]:
    """Return a scheduler with decoding requests, and the plan in flight."""
    scheduler = scheduler_of(num_requests)
    plan = scheduler.plan()
    for _ in range(5):
        following = scheduler.plan()
        scheduler.complete(result(plan))
        plan = following
    return scheduler, plan


def cost_ms(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - start)


@pytest.fixture
def frozen() -> None:
    """Freeze objects of other tests, so that garbage collection does not scan them repeatedly."""
    gc.collect()
    gc.freeze()


def cost_once_ms(work: Callable[[], object]) -> float:
    """Measure without garbage of other tests. An engine also freezes its objects when it starts."""
    gc.collect()
    gc.freeze()
    return cost_ms(work)


def all_admitted(num_requests: int) -> float:
    scheduler = scheduler_of(num_requests)
    cost = cost_once_ms(scheduler.plan)
    assert scheduler.stats().num_running == num_requests
    return cost


def all_ended(num_requests: int) -> float:
    """Return the cost of the end of all requests by a stop token in one step.

    Their surplus rows end with the next step.
    """
    scheduler, plan = begin(num_requests)
    following = scheduler.plan()
    last, surplus = result(plan, STOP), result(following)

    def work() -> None:
        assert len(scheduler.complete(last).finished) == num_requests
        scheduler.complete(surplus)
        assert scheduler.plan() is None

    cost = cost_once_ms(work)
    assert scheduler.memory.usage == 0
    return cost


def all_aborted(num_requests: int) -> float:
    scheduler, _ = begin(num_requests)

    def work() -> None:
        for i in range(num_requests):
            scheduler.abort(i)
        assert scheduler.plan() is None

    cost = cost_once_ms(work)
    assert not scheduler.has_work
    return cost


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("measure", [all_admitted, all_ended, all_aborted])
def test_what_happens_to_256_requests_at_once_costs_each_as_much_as_one(
    measure: Callable[[int], float], capsys: pytest.CaptureFixture[str]
) -> None:
    """The cost is under 5 ms on an idle core. Per request it does not grow with their number."""
    pairs = [(measure(32), measure(256)) for _ in range(9)]
    few, many = np.min(pairs, axis=0)
    with capsys.disabled():
        sys.stdout.write(f"\nhost: {measure.__name__}: {many:.1f} ms for 256\n")
    assert many < 10 * few, f"{few:.2f} ms for 32 requests, {many:.2f} ms for 256"
    assert many < 40


def plan_ms(scheduler: Scheduler) -> float:
    """Return the cost of planning a step, then complete it."""
    plans: list[StepPlan | None] = []
    cost = cost_ms(lambda: plans.append(scheduler.plan()))
    assert plans[0] is not None
    scheduler.complete(result(plans[0]))
    return cost


@pytest.mark.parametrize("num_known", [0, 20_000])
@pytest.mark.parametrize("page_tokens", [16, 128])
def test_a_long_prompt_that_waits_for_pages_costs_a_step_little(page_tokens, num_known) -> None:
    """A prompt of 60,000 tokens, some of them cached, costs less than 50 us per step."""
    stem = array("i", range(num_known))
    sizes = {"page_tokens": page_tokens, "num_slots": 256}
    quiet, waiting = scheduler_of(128, **sizes), scheduler_of(128, **sizes)
    for scheduler in (quiet, waiting):
        holder = (stem + array("i", [1, 2])).tobytes()
        scheduler.add(Generate(500, holder, 1000, [], Sampling()), 0.0)
        scheduler.complete(result(scheduler.plan()))
        pool = scheduler.memory.pool
        pool.take(pool.num_free - 25_000 // page_tokens)  # used by other requests
    prompt = (stem + array("i", range(5, 60_005 - num_known))).tobytes()
    waiting.add(Generate(501, prompt, 4, [], Sampling()), 1e6)
    pairs = []
    for _ in range(60):
        pairs.append([plan_ms(scheduler) for scheduler in (quiet, waiting)])
    assert waiting.stats().num_waiting == 1 and waiting.stats().num_running == 129
    less, more = 1e3 * np.percentile(pairs[1:], 20, axis=0)
    assert more - less < 150, f"{less:.0f} us a plan, with a long prompt waiting {more:.0f} us"
