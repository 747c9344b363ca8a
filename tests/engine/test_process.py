"""engine/process.py without a server. Connections are queues, and grammars are commands."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from nanovllm.config import load_config
from nanovllm.engine import paper, process
from nanovllm.engine.paper import PaperExecutor
from nanovllm.engine.process import Engine, Joined
from nanovllm.grammars.runtime.masks import Grammars
from nanovllm.grammars.runtime.queue import GrammarQueue
from nanovllm.kv.memory import KVMemory
from nanovllm.parallel.places import Place
from nanovllm.plan import Masks
from nanovllm.sched.scheduler import Scheduler
from nanovllm.transfer.leases import Lease
from nanovllm.wire import (
    Abort,
    FinishReason,
    FromEngine,
    Generate,
    RefusalKind,
    Stats,
    StepOutput,
    ToEngine,
)
from tests.grammars.runtime.fake_trials import FakeGrammars, logged, wait_gone
from tests.paper.engine import generate

SENTENCE = [5, 6, 7, 8, 9]


class FakeConnection:
    """Two queues. The message None ends it."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()

    def recv(self) -> ToEngine | None:
        return self.inbox.get()

    def send(self, message: FromEngine) -> None:
        self.sent.put(message)


class Running:
    """An engine in a thread, and all its messages."""

    def __init__(self, max_queue: int = 100, step_s: float = 0.001) -> None:
        self.connection = FakeConnection()
        self.grammars = FakeGrammars()
        scheduler = Scheduler(
            KVMemory(64, page_tokens=4),
            num_slots=2,
            step_tokens=32,
            max_model_tokens=64,
        )
        executor = PaperExecutor(SENTENCE, 2, step_s)
        self.engine = Engine(
            scheduler,
            executor,
            self.grammars,
            depth=1,
            pace=None,
            max_queue=max_queue,
        )
        self.engine.join(Joined(0, self.connection))
        self.thread = threading.Thread(target=self.engine.run)
        self.thread.start()
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.refused: dict[int, tuple[RefusalKind, str]] = {}
        self.stats = Stats()

    def say(self, *messages: Generate | Abort | None) -> None:
        for message in messages:
            self.connection.inbox.put(message)

    def hear(self, *request_ids: int) -> None:
        """Receive messages until each of the requests has ended."""
        while set(request_ids) - set(self.finished) - set(self.refused):
            self._take(self.connection.sent.get(timeout=30))

    def hear_stats(self, **expected: int) -> None:
        while any(getattr(self.stats, name) != value for name, value in expected.items()):
            self._take(self.connection.sent.get(timeout=30))

    def _take(self, message: FromEngine) -> None:
        if not isinstance(message, StepOutput):
            return
        ids, tokens = np.frombuffer(message.ids, np.int64), np.frombuffer(message.tokens, np.int32)
        for request_id, token in zip(ids.tolist(), tokens.tolist(), strict=True):
            self.tokens.setdefault(request_id, []).append(token)
        for finish in message.finished:
            self.finished[finish.request_id] = finish.reason
        for refusal in message.refused:
            assert refusal.request_id not in self.refused, "refused twice"
            self.refused[refusal.request_id] = refusal.kind, refusal.message
        self.stats = message.stats or self.stats

    def stop(self) -> None:
        self.engine.leave()
        self.say(None)
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def running(request) -> Iterator[Running]:
    made = Running(**getattr(request, "param", {}))
    yield made
    made.stop()


def asked(request_id: int, grammar: str = "", max_new: int = 5, prompt: int = 6) -> Generate:
    return generate(request_id, [request_id] * prompt, max_new, grammar=grammar)


def test_requests_with_and_without_grammars(running) -> None:
    running.say(asked(1), asked(2, "fine"), asked(3, "bad nothing matches it"), asked(4, "fine"))
    running.hear(1, 2, 3, 4)
    assert running.tokens == {1: SENTENCE, 2: SENTENCE, 4: SENTENCE}
    assert running.refused == {3: (RefusalKind.INVALID, "nothing matches it")}
    running.hear_stats(num_running=0, num_compiling=0, num_matchers=0, generated_tokens=15)
    assert running.stats.grammar_cache_bytes == running.grammars.queue.num_kept_bytes > 0
    assert running.stats.grammar_failures == {"invalid": 1, "timeout": 0, "died": 0}
    assert running.grammars.num_followed == 0


@pytest.mark.parametrize("running", [{"max_queue": 3}], indirect=True)
def test_who_waits_for_a_grammar_counts_as_waiting(running, tmp_path) -> None:
    log = tmp_path / "log"
    running.say(*(asked(i, f"hang {log} #{i}") for i in (1, 2, 3)))
    logged(log, 2)
    running.hear_stats(num_compiling=3)
    running.say(asked(4, "fine"), asked(5))
    running.hear(4, 5)
    full = RefusalKind.QUEUE_FULL, "3 requests are already waiting"
    assert running.refused == {4: full, 5: full}
    running.say(Abort(2), asked(6), Abort(1), Abort(3), Abort(77))
    running.hear(6)
    assert running.finished == {6: FinishReason.LENGTH}
    running.say(*(asked(i, f"fine #{i}") for i in (7, 8, 9)))
    running.hear(7, 8, 9)
    assert set(running.finished) == {6, 7, 8, 9} and set(running.refused) == {4, 5}
    running.hear_stats(num_compiling=0, num_waiting=0)
    wait_gone([pid for pid, _ in logged(log, 2)])


def test_aborted_while_its_grammar_is_compiled(running, tmp_path) -> None:
    log = tmp_path / "log"
    running.say(asked(1, f"hang {log}"))
    pids = [pid for pid, _ in logged(log, 1)]
    running.say(Abort(1), asked(2, "sleep 0.3"), asked(3, "sleep 0.3"), Abort(2))
    running.hear(3)
    wait_gone(pids)
    running.hear_stats(num_compiling=0, num_running=0)
    assert set(running.tokens) == {3} and not running.refused
    assert running.grammars.num_followed == 0


def test_refused_after_its_grammar_came_it_is_forgotten(running) -> None:
    running.say(asked(1, "fine", prompt=70), asked(2, "fine", max_new=0), asked(3, "fine"))
    running.hear(1, 2, 3)
    kinds = {request_id: kind for request_id, (kind, _) in running.refused.items()}
    assert kinds == {1: RefusalKind.TOO_LONG, 2: RefusalKind.INVALID}
    running.hear_stats(num_running=0, num_compiling=0)
    assert running.grammars.num_followed == 0


@pytest.mark.parametrize("running", [{"step_s": 0.01}], indirect=True)
def test_aborted_while_it_follows_its_grammar(running) -> None:
    running.say(asked(1, "fine", max_new=50))
    while 1 not in running.tokens:
        running._take(running.connection.sent.get(timeout=30))
    running.hear_stats(num_matchers=1)
    running.say(Abort(1))
    running.hear(1)
    running.hear_stats(num_matchers=0)
    assert running.finished == {1: FinishReason.ABORT}
    assert running.grammars.num_followed == 0


def test_an_exception_of_one_admission_is_its_own(running, monkeypatch) -> None:
    add = running.engine.scheduler.add

    def sometimes(request: Generate, *more: float) -> None:
        if request.request_id in (1, 4):
            raise OverflowError("of this request")
        add(request, *more)

    monkeypatch.setattr(running.engine.scheduler, "add", sometimes)
    running.say(asked(1), asked(2), asked(3, "fine unfollowable"), asked(4, "fine"), asked(5))
    running.hear(1, 2, 3, 4, 5)
    kinds = {request_id: kind for request_id, (kind, _) in running.refused.items()}
    assert kinds == dict.fromkeys((1, 3, 4), RefusalKind.FAILED)
    assert running.tokens == {2: SENTENCE, 5: SENTENCE}
    assert running.grammars.num_followed == 0


def test_a_killed_compiler_is_one_refused_request(running, tmp_path) -> None:
    log = tmp_path / "log"
    running.say(asked(1, "crash"), asked(2, "fine"))
    running.hear(1, 2)
    assert running.refused == {1: (RefusalKind.FAILED, "the grammar's compiler has died")}
    server = running.grammars._trials._process
    server.kill()
    server.join()
    running.say(asked(3, f"log {log}"))
    running.hear(3)
    assert running.finished == dict.fromkeys((2, 3), FinishReason.LENGTH)


def test_an_engine_that_waits_for_leased_pages_does_not_spin(running) -> None:
    """The lease's thread wakes it, and the request starts."""
    pages = running.engine.scheduler.memory.pool.take(63)
    real, steps = running.engine.loop.step, list[float]()
    running.engine.loop.step = lambda: (steps.append(time.monotonic()), real())
    running.say(asked(1))
    while not steps or time.monotonic() - steps[-1] < 0.3:  # never true of a loop that spins
        assert len(steps) < 20
        time.sleep(0.01)
    running.engine.lease_ended(
        Lease(
            generation=1, request="1", pages=tuple(pages), expires=0.0, last_end=0.0, num_ready=63
        )
    )
    running.hear(1)
    assert running.tokens == {1: SENTENCE}


def test_nothing_stays_when_the_engine_stops(tmp_path) -> None:
    running, log = Running(), tmp_path / "log"
    running.say(asked(1, f"hang {log} #1"), asked(2, f"hang {log} #2"), asked(3, "fine"))
    pids = [pid for pid, _ in logged(log, 2)]
    server = running.grammars._trials._process.pid
    running.stop()
    wait_gone([server])
    for request_id in (1, 2):
        running.grammars.queue.leave(request_id)
    wait_gone(pids)
    deadline = time.monotonic() + 30
    while any(worker.is_alive() for worker in running.grammars.queue._workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu", "auto"])
def test_the_compiler_of_grammars_is_made_before_the_engine_is_ready(
    device: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the compiler cannot be built, requests without grammars are still served."""
    executor, recipe, *others = paper.build(config := load_config("paper"))
    recipe = msgspec.structs.replace(recipe, device=device, engine="model")
    told: list[str] = []

    def prepare(_: GrammarQueue) -> None:
        told.append("prepared")
        if fails:
            raise RuntimeError("a vocabulary of no use")

    monkeypatch.setattr(process, "build", lambda *_: (executor, recipe, *others))
    monkeypatch.setattr(GrammarQueue, "prepare", prepare)
    listener = SimpleNamespace(accept=queue.SimpleQueue().get)  # no API process connects
    supervisor = SimpleNamespace(watch_steps=lambda _: None, on_leave=lambda leave: leave())
    process.main(
        config,
        Place(0, 1, 0, "", None),
        listener,
        ready=lambda: told.append("ready"),
        supervisor=supervisor,
    )
    gc.unfreeze()
    assert told == ["prepared", "ready"]


def test_the_fake_drops_matchers_as_the_real_one_does() -> None:
    assert FakeGrammars.advance is Grammars.advance
    masks: Masks = FakeGrammars().fill([(1, []), (2, [7])])
    assert masks.tolist() == [[-1], [-1], [-1]]
