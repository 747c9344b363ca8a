"""The record of recent steps: complete, in a ring of fixed size, and without any text."""

from __future__ import annotations

import math
from array import array

import msgspec
import numpy as np

from nanovllm.engine import recent
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.paper import PaperExecutor
from nanovllm.kv.memory import KVMemory
from nanovllm.look import MOST_STEPS, Step
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import Abort, FinishReason
from tests.engine.no_grammars import NoGrammars
from tests.paper.engine import PAGE, PaperEngine, generate


def engine_of(num_pages: int = 64, num_slots: int = 3, **more: int) -> PaperEngine:
    return PaperEngine(num_pages=num_pages, num_slots=num_slots, budget=16, **more)


def steps_of(engine: PaperEngine) -> list[Step]:
    return engine.loop.recent.since(0).steps


def run(engine: PaperEngine) -> list[Step]:
    while not engine.loop.idle:
        engine.loop.publish_events()
        engine.loop.step()
    return steps_of(engine)


def owners(step: Step) -> list[int]:
    return np.frombuffer(step.slots, np.int64).tolist()


def test_every_step_says_who_was_fed_what() -> None:
    engine = engine_of()
    for name in range(5):  # more requests than slots
        engine.loop.handle(generate(name, [name + 9] * (20 + name), max_new=6))
    steps = run(engine)
    stats = engine.scheduler.stats()
    assert [step.step for step in steps] == list(range(1, stats.num_steps + 1))
    fed = sum(tokens for step in steps for _, tokens in step.chunks)
    rows = sum(len(step.decodes) // 4 + step.drafted for step in steps)
    assert fed + rows == stats.step_tokens
    assert sum(step.generated for step in steps) == stats.generated_tokens == 5 * 6
    assert fed == stats.prompt_tokens - stats.cached_tokens == sum(20 + name for name in range(5))
    by_request = dict.fromkeys(range(5), 0)
    for step in steps:
        assert step.budget >= sum(tokens for _, tokens in step.chunks) + len(step.decodes) // 4
        for slot, tokens in step.chunks:
            by_request[owners(step)[slot]] += tokens
        for slot in array("i", step.decodes):
            assert owners(step)[slot] >= 0
    assert by_request == {name: 20 + name for name in range(5)}
    admitted = [one for step in steps for one in step.admitted]
    assert [(one.request, one.prompt, one.cached) for one in admitted] == [
        (name, 20 + name, 0) for name in range(5)
    ]
    assert dict(pair for step in steps for pair in step.finished) == dict.fromkeys(
        range(5), "length"
    )
    assert steps[0].waiting == 3 and steps[0].running == 2 and steps[-1].running == 0
    now = engine.loop.recent.since(steps[-1].step)
    assert (now.steps, now.free, set(array("q", now.slots))) == ([], 64, {-1})
    assert now.cached == steps[-1].cached > 0 and steps[-1].free == 64


def test_cached_prompts_and_the_queue() -> None:
    engine = engine_of(num_slots=1)
    prompt = list(range(1, 18))
    for name in range(3):
        engine.loop.handle(generate(name, prompt, max_new=4))
    engine.loop.step()
    queue = engine.loop.recent.since(0)
    assert queue.waiting == 2 and [one[0] for one in queue.queue] == [1, 2]
    assert not any(preempted for _, _, preempted in queue.queue)
    admitted = [one for step in run(engine) for one in step.admitted]
    assert [one.cached for one in admitted] == [0, 16, 16]
    assert all(one.came_s <= step.begun_s for step in steps_of(engine) for one in step.admitted)


def test_preemption_shows_as_a_lost_slot_and_a_second_admission() -> None:
    engine = engine_of(num_pages=12, num_slots=2)
    for name in range(2):
        engine.loop.handle(generate(name, [name + 3] * (3 * PAGE), max_new=5 * PAGE))
    steps = run(engine)
    assert sum(step.preempted for step in steps) == engine.scheduler.stats().num_preemptions > 0
    at = next(i for i, step in enumerate(steps) if step.preempted)
    assert set(owners(steps[at])) == {0, -1} and set(owners(steps[at - 1])) == {0, 1}
    again = [one for step in steps[at:] for one in step.admitted]
    assert {one.request for one in again} == {1} and all(one.tokens > one.prompt for one in again)
    assert max(step.ended_s - step.begun_s for step in steps) < math.inf


def test_aborts_and_drafts() -> None:
    engine = engine_of(drafts=2, wrong_every=2)
    engine.loop.handle(generate(1, [5] * 6, max_new=40))
    engine.loop.handle(generate(2, [6] * 6, max_new=200))
    for _ in range(8):
        engine.loop.step()
    engine.loop.handle(Abort(2))
    steps = run(engine)
    finished = dict(pair for step in steps for pair in step.finished)
    assert finished == {1: "length", 2: "abort"}
    assert engine.finish[2] is FinishReason.ABORT
    stats = engine.scheduler.stats()
    assert sum(step.accepted for step in steps) >= stats.accepted_tokens > 0
    assert sum(step.drafted for step in steps) >= stats.draft_tokens > 0
    assert sum(step.generated for step in steps) == stats.generated_tokens


def test_a_step_has_the_mode_that_its_executor_counted() -> None:
    scheduler = Scheduler(KVMemory(64, 4), num_slots=4, step_tokens=64, max_model_tokens=64)
    executor = PaperExecutor([7, 8, 9], 4, step_s=0.0)
    loop = EngineLoop(scheduler, executor, lambda output: None, NoGrammars(), depth=1)
    loop.handle(generate(1, [1] * 8, max_new=4))
    loop.step()
    loop.step()
    loop.handle(generate(2, [2] * 8, max_new=2))
    while not loop.idle:
        loop.step()
    modes = [step.mode for step in loop.recent.since(0).steps]
    assert modes == ["PAPER/prefill", "PAPER/decode", "PAPER/mixed", "PAPER/decode"]
    assert executor.steps_by_mode == {"PAPER/prefill": 1, "PAPER/decode": 2, "PAPER/mixed": 1}


def test_the_ring_is_bounded_and_holds_no_text(monkeypatch) -> None:
    monkeypatch.setattr(recent, "KEPT", 8)
    engine = engine_of()
    secret = [123456] * 8
    engine.loop.handle(generate(1, secret, max_new=100))
    run(engine)
    newest = engine.scheduler.stats().num_steps
    ring = engine.loop.recent
    told = ring.since(0)
    assert (told.oldest, told.newest) == (newest - 7, newest)
    assert [step.step for step in told.steps] == list(range(newest - 7, newest + 1))
    assert [step.step for step in ring.since(newest - 2).steps] == [newest - 1, newest]
    assert ring.since(newest).steps == ring.since(newest + 5).steps == []
    said = msgspec.msgpack.encode(told)
    for form in (msgspec.msgpack.encode(123456), array("i", secret[:1]).tobytes()):
        assert form not in said


def test_one_answer_has_so_many_steps() -> None:
    engine = engine_of(num_pages=400)
    engine.loop.handle(generate(1, [4] * 8, max_new=MOST_STEPS + 50))
    run(engine)
    newest = engine.scheduler.stats().num_steps
    steps = steps_of(engine)
    assert len(steps) == MOST_STEPS and steps[-1].step == newest
