"""What the engine's host side costs a step, with 256 running requests and no device."""

from __future__ import annotations

import sys
import time
from array import array

import msgspec
import numpy as np
import pytest

from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.paper import PaperExecutor
from nanovllm.ipc.channel import frame
from nanovllm.kv.memory import KVMemory
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Generate, Sampling, StepOutput
from tests.no_grammars import NoGrammars

NUM_REQUESTS = 256
NUM_STEPS = 200
PAGE = 128


class Engine:
    """As many decoding requests, each with so many tokens of context; counts what is published."""

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
            # Of all lengths, so that in each step the pages of some become full.
            prompt = array("i", [request_id] * (num_context + request_id % PAGE)).tobytes()
            self.loop.handle(Generate(request_id, prompt, 1000, [1], Sampling()))
        while not self.said or len(self.said[-1]) < num_requests:
            self.loop.step()

    def publish(self, output: StepOutput) -> None:
        self.num_bytes += len(frame(self.encoder, output))
        self.said.append(np.frombuffer(output.tokens, np.int32).tolist())

    def step_us(self) -> float:
        begin = time.perf_counter()
        self.loop.step()
        return 1e6 * (time.perf_counter() - begin)


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
    assert engine.said[0] != engine.said[1]  # the paper's words go on
    assert engine.num_bytes < NUM_STEPS * NUM_REQUESTS * 13  # 12 bytes a token and little else
    assert median < 1500.0  # about 200 on a core of one's own


def test_no_step_costs_more_in_a_longer_context() -> None:
    short, long = Engine(num_context=100), Engine(num_context=4000)
    pairs = [(short.step_us(), long.step_us()) for _ in range(NUM_STEPS)]
    # What other programs do to a shared core only adds: the cheap steps tell.
    cheap, dear = np.percentile(pairs, 20, axis=0)
    assert dear < 1.4 * cheap, f"{cheap:.0f} us with 100 tokens, {dear:.0f} us with 4000"


def test_sixteen_times_the_requests_cost_a_step_little_more() -> None:
    """A few array operations more, and what some rows have to do when a page is full."""
    few, many = Engine(num_context=300, num_requests=16), Engine(num_context=300)
    pairs = [(few.step_us(), many.step_us()) for _ in range(NUM_STEPS)]
    cheap, dear = np.percentile(pairs, 20, axis=0)
    assert dear < 2.5 * cheap, f"{cheap:.0f} us with 16 requests, {dear:.0f} us with 256"
