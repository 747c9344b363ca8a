"""Each caller gets a result or an error, even if the process is killed or crashes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.grammars.runtime import trials as trials_module
from nanovllm.grammars.runtime.trials import (
    WALL_FACTOR,
    Attempt,
    CpuTimeError,
    TrialDiedError,
    Trials,
)
from tests.grammars.runtime.fake_trials import attempt, fake_trials, logged, wait_gone

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = fake_trials()
    yield made
    made.close()


def ask(trials, text, limit_s=20.0) -> str:
    return trials.begin().result(text, limit_s)


def server_of(trials) -> int:
    return trials._process.pid


def test_answers(trials) -> None:
    assert ask(trials, "fine") == ""
    assert ask(trials, "bad because of \u00e4\u4e2d") == "because of \u00e4\u4e2d"
    long = "length #" + "x" * 3_000_000  # more than a socket buffers
    assert ask(trials, long) == str(len(long))


def test_one_that_takes_too_long_is_ended(trials, tmp_path) -> None:
    assert ask(trials, "fine") == ""
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(trials, f"hang {tmp_path / 'pids'}", 0.3)
    assert 0.3 * WALL_FACTOR <= time.monotonic() - begun < 20
    wait_gone([pid for pid, _ in logged(tmp_path / "pids", 1)])
    assert ask(trials, "fine") == ""


def test_cpu_time_is_counted_and_ends_an_attempt(trials, monkeypatch) -> None:
    assert ask(trials, "sleep 1", 0.5) == ""  # sleeping uses no CPU time
    monkeypatch.setattr(trials_module, "WALL_FACTOR", 100.0)  # the machine may be busy
    with pytest.raises(CpuTimeError):
        ask(trials, "spin 20", 0.5)
    assert ask(trials, "spin 0.1", 5.0) == ""


def test_one_that_is_cancelled_is_ended_at_once(trials, tmp_path) -> None:
    trial = trials.begin()
    ended: list[type] = []

    def wait() -> None:
        with pytest.raises(TrialDiedError) as error:
            trial.result(f"hang {tmp_path / 'pids'}", 60)
        ended.append(error.type)

    waiting = threading.Thread(target=wait)
    waiting.start()
    pids = [pid for pid, _ in logged(tmp_path / "pids", 1)]
    trial.cancel()
    waiting.join(20)
    assert ended == [TrialDiedError]
    wait_gone(pids)
    trial.cancel()  # a second call has no effect
    early = trials.begin()
    early.cancel()
    with pytest.raises(TrialDiedError):
        early.result("fine", 60)


def test_a_crash_and_too_much_memory_are_that_trial_s_alone(trials) -> None:
    ask(trials, "fine")
    server = server_of(trials)
    other = trials.begin()
    with pytest.raises(TrialDiedError, match="ended without an answer"):
        ask(trials, "crash")
    assert ask(trials, f"memory {(trials_module.MEMORY_BYTES >> 20) + 64}") == "too much"
    assert ask(trials, f"memory {(trials_module.MEMORY_BYTES >> 20) - 64}") == ""
    assert other.result("fine", 20) == ""
    assert server_of(trials) == server


def test_a_killed_server_is_replaced_and_its_forks_still_answer(trials, tmp_path) -> None:
    ask(trials, "fine")
    server, running = server_of(trials), trials.begin()
    told: list[str] = []
    waiting = threading.Thread(target=lambda: told.append(running.result("sleep 0.5", 20)))
    waiting.start()
    time.sleep(0.2)
    os.kill(server, signal.SIGKILL)
    trials._process.join()
    assert ask(trials, "fine") == ""
    waiting.join(20)
    assert told == [""]
    assert server_of(trials) != server
    wait_gone([server])  # not even as a zombie


def test_interrupts_are_ignored_and_there_are_no_zombies(trials) -> None:
    for i in range(5):
        assert ask(trials, f"bad {i}") == str(i)
    server = server_of(trials)
    os.kill(server, signal.SIGINT)
    assert ask(trials, "fine") == ""
    assert server_of(trials) == server
    children = Path(f"/proc/{server}/task/{server}/children")
    deadline = time.monotonic() + 30
    while children.read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_cannot_start_is_an_error_each_time() -> None:
    broken = Trials(broken_prepare)
    for _ in range(2):
        with pytest.raises(TrialDiedError):
            ask(broken, "fine")
    broken.close()


def test_limits_of_the_system_may_be_lower_than_ours() -> None:
    low = Trials(prepare_with_little)
    assert ask(low, "fine") == ""
    assert ask(low, "memory 300") == "too much"
    low.close()


def prepare_with_little() -> Attempt:
    for kind, most in ((resource.RLIMIT_STACK, 1 << 20), (resource.RLIMIT_DATA, 200 << 20)):
        resource.setrlimit(kind, (most, most))
    return attempt


def broken_prepare():
    os._exit(3)


OWNER = """
import sys, threading
from tests.grammars.runtime.fake_trials import fake_trials

if __name__ == "__main__":
    trials = fake_trials()
    running = [trials.begin() for _ in range(2)]
    for trial in running:
        threading.Thread(target=trial.result, args=("hang " + sys.argv[1], 60)).start()
    print(trials._process.pid, flush=True)
    threading.Event().wait()
"""


def test_none_outlives_an_owner_that_was_killed(tmp_path) -> None:
    script, pids = tmp_path / "owner.py", tmp_path / "pids"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(pids)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    server = int(owner.stdout.readline())
    all_of_them = [server, *(pid for pid, _ in logged(pids, 2))]
    owner.kill()
    owner.wait()
    wait_gone(all_of_them)


def test_closed_the_server_is_gone() -> None:
    trials = fake_trials()
    assert ask(trials, "fine") == ""
    server = server_of(trials)
    trials.close()
    wait_gone([server])
