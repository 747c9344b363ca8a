"""Steps of the loop in which nothing can run: it waits, unless a request could start."""

from __future__ import annotations

from msgspec.structs import replace

from nanovllm.sched.lending import Lending
from nanovllm.sched.request import State
from tests.paper.engine import PaperEngine, generate
from tests.paper.test_arriving import A, B, engine_of, right, states, tiers
from tests.sched.test_lending import NotedLender


def test_a_transfer_of_one_request_delays_no_other_that_can_start() -> None:
    engine = engine_of(num_pages=20, polls=1000, num_slots=2)
    engine.say(generate(2, [9] * 60, 2))  # evicts A
    engine.finish_all()
    for name, prompt in ((0, A), (1, [7] * 3), (3, [8] * 3)):
        engine.say(generate(name, prompt, 2))
    while 1 not in engine.finish:
        engine.step()
    assert states(engine) == {0: State.ARRIVING, 3: State.WAITING}
    assert not engine.loop.is_blocked  # 3 can have the slot of 1
    engine.step()
    assert states(engine)[3] is State.DECODING


def test_the_loop_is_blocked_while_pages_are_leased() -> None:
    engine, lender = PaperEngine(num_pages=10, num_slots=4, budget=24, depth=1), NotedLender()
    engine.scheduler.queue.lending = Lending(engine.memory, lender)
    engine.say(replace(generate(0, A, 1), lends=True))
    engine.finish_all()
    engine.say(generate(1, B, 9))
    engine.step()
    engine.step()
    assert engine.loop.is_blocked and not engine.loop.idle
    ((_, lent, _),) = lender.lent
    engine.scheduler.take_back(lent.pages)
    engine.finish_all()
    assert right(engine, 1, B, 9)


def test_loaded_tokens_count_once() -> None:
    for checkpoints in (None, 8):
        engine = engine_of(checkpoints=checkpoints, every=4)
        started: list[int] = []
        engine.loop.publish = lambda out, to=started: to.extend(s.num_loaded for s in out.started)
        engine.say(generate(0, A, 3))
        engine.finish_all()
        assert started == [20] == [tiers(engine)["loaded_tokens"]]
