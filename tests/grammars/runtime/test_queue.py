"""Sharing, order, cancellation, limits and caching of grammar compilations."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.grammars.runtime import queue as grammar_queue, trials as trials_module
from nanovllm.grammars.runtime.queue import WORKERS, CompileOutcome, Failure, GrammarQueue
from nanovllm.grammars.runtime.trials import Trial, Trials
from nanovllm.wire import RefusalKind
from tests.grammars.runtime.fake_trials import FakeBuilder, fake_trials, logged, wait_gone

INVALID, FAILED, BUSY = RefusalKind.INVALID, RefusalKind.FAILED, RefusalKind.BUSY


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = fake_trials()
    assert made.begin().result("fine", 30) == ""
    yield made
    made.close()


class Asking:
    """A queue with a record of its outcomes."""

    def __init__(self, trials: Trials, compile_s: float = 30.0, num_bytes: int = 100) -> None:
        self.builder = FakeBuilder(num_bytes)
        self.queue = GrammarQueue(trials, self.builder, compile_s)
        self.told: queue.SimpleQueue[tuple[int, CompileOutcome]] = queue.SimpleQueue()

    def ask(self, request_id: int, tag: str) -> None:
        self.queue.submit(request_id, tag, lambda outcome: self.told.put((request_id, outcome)))

    def hear(self, count: int = 1) -> dict[int, object]:
        """Wait for `count` outcomes. Return the tag of each grammar or its failure, by request."""
        found = {}
        for _ in range(count):
            request_id, outcome = self.told.get(timeout=30)
            assert request_id not in found, "told twice"
            found[request_id] = outcome if isinstance(outcome, Failure) else outcome.tag
        return found

    def check_empty(self) -> None:
        """Assert that the queue has no entry of any request."""
        made = self.queue
        assert not (made._jobs or made._queued or made._job_of)
        assert made.num_kept_bytes == sum(kept.num_bytes for kept in made._kept.values())
        assert self.told.empty()


def test_prepared_before_anyone_asks(monkeypatch) -> None:
    trials, prepared = fake_trials(), []
    asking = Asking(trials)
    monkeypatch.setattr(asking.builder, "prepare", lambda: prepared.append(trials._process))
    asking.queue.prepare()
    process = trials._process
    assert prepared == [process] and process is not None and process.is_alive()
    assert len(asking.builder.built) == 1  # the slow first compilation is done
    asking.ask(1, "fine")
    assert asking.hear() == {1: "fine"} and trials._process is process
    trials.close()


def test_requests_for_one_grammar_share_its_compilation(trials, tmp_path) -> None:
    asking, log = Asking(trials), tmp_path / "log"
    tag = f"log {log} #{'x' * 300_000}"
    for request_id in range(5):
        asking.ask(request_id, tag)
    assert asking.hear(5) == dict.fromkeys(range(5), tag)
    asking.ask(5, tag)
    assert asking.hear() == {5: tag}
    assert asking.builder.built == [tag] and len(logged(log, 1)) == 1
    asking.check_empty()


def held(asking, tmp_path) -> None:
    """Keep both workers busy until the requests -1 and -2 leave."""
    for request_id in range(-WORKERS, 0):
        asking.ask(request_id, f"hang {tmp_path / 'held'} #{request_id}")
    logged(tmp_path / "held", WORKERS)


def release(asking, tmp_path) -> None:
    for request_id in range(-WORKERS, 0):
        asking.queue.leave(request_id)
    wait_gone([pid for pid, _ in logged(tmp_path / "held", WORKERS)])


def test_the_smallest_is_next(trials, tmp_path) -> None:
    asking, log = Asking(trials), tmp_path / "log"
    held(asking, tmp_path)
    tags = [f"log {log} #{'x' * size}" for size in (9000, 10, 90_000, 1000)]
    for request_id, tag in enumerate(tags):
        asking.ask(request_id, tag)
    asking.queue.leave(-1)  # one worker becomes free
    assert list(asking.hear(4)) == [1, 3, 0, 2]
    assert [text for _, text in logged(log, 4)] == sorted(tags, key=len)
    release(asking, tmp_path)
    asking.check_empty()


def test_a_large_one_does_not_wait_for_ever(trials, tmp_path, monkeypatch) -> None:
    asking = Asking(trials)
    held(asking, tmp_path)
    monkeypatch.setattr(grammar_queue, "AGEING_BYTES", 1_000_000)
    asking.ask(0, "fine #" + "x" * 100_000)
    time.sleep(0.2)  # worth 200,000 bytes
    for request_id in range(1, 4):
        asking.ask(request_id, f"fine #{request_id}")
    asking.queue.leave(-1)
    assert list(asking.hear(4)) == [0, 1, 2, 3]
    release(asking, tmp_path)


def test_who_left_is_not_compiled_for(trials, tmp_path) -> None:
    """12 heavy grammars whose requests have left do not delay a trivial one."""
    asking, log = Asking(trials), tmp_path / "log"
    heavy = [f"hang {log} #{i}" for i in range(12)]
    for request_id, tag in enumerate(heavy):
        asking.ask(request_id, tag)
    running = logged(log, WORKERS)
    asking.ask(50, heavy[5])  # another request waits for one of them
    begun_with = {heavy.index(tag) for _, tag in running}
    waiting = [request_id for request_id in range(12) if request_id not in begun_with]
    # Queued ones leave first, since a free worker starts the next queued one.
    for request_id in (*waiting, *begun_with):
        asking.queue.leave(request_id)
    asking.queue.leave(12)  # an id without a request
    begun = time.monotonic()
    asking.ask(99, "fine")
    assert asking.hear() == {99: "fine"}
    assert time.monotonic() - begun < 20
    wait_gone([pid for pid, _ in running])
    assert [text for _, text in logged(log, 3)[2:]] == [heavy[5]]
    asking.queue.leave(50)
    assert asking.builder.built == ["fine"]
    asking.check_empty()


def test_waiting_grammars_take_bounded_memory(trials, tmp_path, monkeypatch) -> None:
    asking = Asking(trials)
    held(asking, tmp_path)
    monkeypatch.setattr(grammar_queue, "QUEUE_BYTES", 100_000)
    tags = [f"fine #{i}{'x' * 45_000}" for i in range(3)]
    for request_id, tag in enumerate(tags):
        asking.ask(request_id, tag)
    full = Failure(RefusalKind.QUEUE_FULL, "100000 bytes of grammars are waiting already")
    assert asking.hear() == {2: full}
    asking.ask(3, tags[0])  # shares a queued compilation
    release(asking, tmp_path)
    assert asking.hear(3) == {0: tags[0], 1: tags[1], 3: tags[0]}
    asking.ask(4, tags[2])
    assert asking.hear() == {4: tags[2]}
    asking.check_empty()


def test_asked_again_after_all_had_left_it_begins_anew(trials, tmp_path) -> None:
    asking, go_on = Asking(trials), tmp_path / "log"
    tag = f"hang {go_on}"
    asking.ask(1, tag)
    logged(go_on, 1)
    asking.queue.leave(1)
    asking.ask(2, tag)
    pids = [pid for pid, _ in logged(go_on, 2)]
    assert len(set(pids)) == 2
    asking.queue.leave(2)
    wait_gone(pids)


def test_200_grammars_start_two_threads(trials) -> None:
    before = threading.active_count()
    asking = Asking(trials)
    for request_id in range(200):
        asking.ask(request_id, f"fine #{request_id}")
    assert threading.active_count() == before + WORKERS
    assert len(asking.hear(200)) == 200
    asking.check_empty()
    asking.queue.close()
    for worker in asking.queue._workers:
        worker.join(20)
    assert threading.active_count() == before


def test_what_fails_and_how_long_that_is_kept(trials, monkeypatch) -> None:
    monkeypatch.setattr(grammar_queue, "TIMEOUT_KEPT_S", 3.0)
    monkeypatch.setattr(trials_module, "WALL_FACTOR", 100.0)  # the machine may be busy
    asking = Asking(trials, compile_s=0.3)
    tags = ["bad nothing matches it", "spin 20", "crash", "fine unbuildable"]
    for request_id, tag in enumerate(tags):
        asking.ask(request_id, tag)
    reason = "the grammar takes more than 0.3 s of CPU time to compile"
    too_long = Failure(INVALID, reason, 3.0)
    assert asking.hear(4) == {
        0: Failure(INVALID, "nothing matches it", inf),
        1: too_long,
        2: Failure(FAILED, "the grammar's compiler has died", 0.0),
        3: Failure(FAILED, "the grammar could not be compiled", 0.0),
    }
    assert asking.queue.failures == {"invalid": 1, "timeout": 1, "died": 1}
    asking.ask(5, tags[1])
    assert asking.hear() == {5: too_long}
    assert asking.queue.failures["timeout"] == 1  # the second refusal used no worker
    time.sleep(3.0)
    asking.ask(6, tags[1])
    assert asking.hear() == {6: too_long}
    assert asking.queue.failures["timeout"] == 2
    asking.ask(7, tags[2])
    asking.hear()
    assert asking.queue.failures["died"] == 2
    asking.check_empty()


def test_a_busy_machine_refuses_for_now_and_keeps_nothing(trials) -> None:
    """`sleep` uses only wall-clock time, as if other processes had the processor."""
    asking = Asking(trials, compile_s=0.2)
    asking.ask(0, "sleep 0.5")
    assert asking.hear() == {0: "sleep 0.5"}
    tag = "sleep 2"
    busy = Failure(BUSY, "the grammar was not compiled within 1.2 s: the machine is busy", 0.0)
    for request_id in (1, 2):
        asking.ask(request_id, tag)
        assert asking.hear() == {request_id: busy}
    assert asking.queue.failures == {"invalid": 0, "timeout": 0, "died": 0, "busy": 2}
    asking.queue._compile_s = 10.0
    asking.ask(3, tag)  # the machine is idle now
    assert asking.hear() == {3: tag}
    asking.check_empty()


def test_a_process_that_dies_once_is_replaced_once(trials, tmp_path) -> None:
    asking = Asking(trials)
    asking.ask(0, tag := f"crash once {tmp_path / 'flag'}")
    assert asking.hear() == {0: tag}
    assert asking.queue.failures["died"] == 0
    asking.ask(1, "crash")
    assert asking.hear() == {1: Failure(FAILED, "the grammar's compiler has died", 0.0)}
    assert asking.queue.failures["died"] == 1


def test_a_trial_that_cannot_start_is_begun_once_more(trials, monkeypatch) -> None:
    asking, plain_begin = Asking(trials), trials.begin
    errors: list[OSError] = [OSError("no descriptors are left")]

    def begin() -> Trial:
        if errors:
            raise errors.pop()
        return plain_begin()

    monkeypatch.setattr(trials, "begin", begin)
    asking.ask(0, "fine")
    assert asking.hear() == {0: "fine"}
    errors += [OSError("none"), OSError("none")]
    asking.ask(1, "fine #1")
    assert asking.hear() == {1: Failure(FAILED, "the grammar's compiler has died", 0.0)}


def test_the_cache_counts_keys_outcomes_and_itself(trials, monkeypatch) -> None:
    monkeypatch.setattr(grammar_queue, "CACHE_BYTES", 200_000)
    asking = Asking(trials, num_bytes=5000)
    for request_id in range(10):  # failures also count with the size of their key
        asking.ask(request_id, f"bad as it is #{request_id}{'x' * 64_000}")
        asking.hear()
    assert len(asking.queue._kept) == 3
    for request_id in range(60):
        asking.ask(request_id, f"fine #{request_id}")
        asking.ask(1000 + request_id, "fine #0")  # used repeatedly
        asking.hear(2)
    assert len(asking.queue._kept) == 200_000 // 6008
    assert "fine #0" in asking.queue._kept and "fine #1" not in asking.queue._kept
    assert asking.builder.built.count("fine #0") == 1
    asking.check_empty()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from([0, 0, 0.004])),
        max_size=30,
    )
)
def test_everyone_who_stays_is_told_once(trials, steps) -> None:
    """Requests for a few grammars arrive and leave while others are being compiled."""
    asking = Asking(trials)
    tags = ["fine", "bad luck", "sleep 0.01", "crash"]
    there: dict[int, str] = {}
    for request_id, (who, which, pause_s) in enumerate(steps):
        if who == 0 and there:
            gone = min(there)
            asking.queue.leave(gone)
            del there[gone]
        else:
            there[request_id] = tags[which]
            asking.ask(request_id, tags[which])
        time.sleep(pause_s)
    deadline = time.monotonic() + 30
    while asking.queue._jobs:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.002)  # the last outcomes are published shortly afterwards
    answers: dict[int, object] = {}
    while set(there) - set(answers) or not asking.told.empty():
        request_id, outcome = asking.told.get(timeout=30)  # also from requests that have left
        assert request_id not in answers, "told twice"
        answers[request_id] = outcome
    for request_id, tag in there.items():
        outcome = answers[request_id]
        expected = {"bad luck": INVALID, "crash": FAILED}.get(tag)
        assert getattr(outcome, "kind", None) == expected
        if expected is None:
            assert isinstance(outcome, SimpleNamespace) and outcome.tag == tag
    asking.check_empty()
    asking.queue.close()
