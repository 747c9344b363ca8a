"""Lost engines are restarted after increasing delays. The server ends with its last engine."""

from __future__ import annotations

import errno
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm import fleet
from nanovllm.fleet import Fleet


class Rank:
    """A process of one life, with the supervisor's interface."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = None
        self.exitcode: int | None = None
        self.stays = False  # signals have no effect
        self.word, self.said = Pipe()
        self.was_killed = False

    def kill(self) -> None:
        self.was_killed = True
        if not self.stays and self.exitcode is None:
            self.exitcode = -signal.SIGKILL

    def join(self, timeout: float | None = None) -> None: ...

    def die(self, code: int = 1) -> None:
        self.exitcode = code
        self.said.close()


class Starts:
    """Factory of ranks. `lives` has the ranks of each life of an engine."""

    def __init__(self, name: str, num_ranks: int) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self.lives: list[list[Rank]] = []
        self.fault: Exception | None = None  # raised by each later start

    def __call__(self) -> list[tuple[Any, Connection]]:
        if self.fault is not None:
            raise self.fault
        ranks = [Rank(f"{self.name}{rank}") for rank in range(self.num_ranks)]
        self.lives.append(ranks)
        return [(rank, rank.word) for rank in ranks]


def fleet_of(
    num_engines: int, restarts: int, num_ranks: int = 1, **how: Any
) -> tuple[Fleet, list[Starts]]:
    starts = [Starts(name, num_ranks) for name in "abcd"[:num_engines]]
    found = Fleet(starts, restarts, **how)
    found.start()
    assert len(found.children) == num_engines * num_ranks and not found.lost()
    return found, starts


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def after(clock: SimpleNamespace, seconds: float, found: Fleet) -> str:
    """Advance the clock by `seconds`. Return the supervisor's next result."""
    clock.now += seconds
    return found.lost()


def test_an_engine_that_ended_lives_again_and_others_go_on(clock: SimpleNamespace, caplog) -> None:
    found, (a, b) = fleet_of(2, restarts=3)
    a.lives[0][0].die(-signal.SIGKILL)
    assert found.lost() == "" == after(clock, 0.9, found) and len(a.lives) == 1
    assert after(clock, 0.2, found) == ""
    assert (len(a.lives), len(b.lives)) == (2, 1) and not b.lives[0][0].was_killed
    assert [process for process, _ in found.children] == [a.lives[1][0], b.lives[0][0]]
    assert caplog.messages == [
        "a0 ended by SIGKILL (9); out of memory?; starting it again in 1 s, 2 more left "
        "(parallel.restarts 3)"
    ]
    a.lives[1][0].said.send("ready")
    for _ in range(3):
        assert found.lost() == ""
    assert len(a.lives) == 2


def test_waits_double_up_to_a_minute_and_begin_anew_after_a_steady_life(
    clock: SimpleNamespace,
) -> None:
    found, (a, b) = fleet_of(2, restarts=100)
    begun, waits = clock.now, []
    while len(a.lives) < 12:
        a.lives[-1][0].die()
        died, num = clock.now, len(a.lives)
        while len(a.lives) == num:
            assert found.lost() == ""
            clock.now += 0.25
        waits.append(clock.now - 0.25 - died)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    assert clock.now - begun > 360 and len(b.lives) == 1
    a.lives[-1][0].said.send("ready")
    assert found.lost() == ""
    a.lives[-1][0].die()  # an end shortly after ready does not count as a steady life
    assert found.lost() == "" == after(clock, 59, found) and len(a.lives) == 12
    assert after(clock, 1.1, found) == "" and len(a.lives) == 13
    a.lives[-1][0].said.send("ready")
    assert found.lost() == "" == after(clock, 61, found)
    a.lives[-1][0].die()
    assert found.lost() == "" == after(clock, 1.1, found) and len(a.lives) == 14


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "temporarily unavailable"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "No such file"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
    ],
)
def test_an_exception_of_one_start_is_a_failed_restart(
    fault: Exception, said: str, clock: SimpleNamespace, caplog
) -> None:
    found, (a, b) = fleet_of(2, restarts=100)
    a.lives[0][0].die()
    a.fault = fault
    assert found.lost() == ""
    for wait_s in (1, 2, 4):
        assert after(clock, wait_s + 0.1, found) == ""
        line = caplog.messages[-1]
        assert line.startswith("a0 cannot be started: ") and said in line
        assert f"starting it again in {2 * wait_s} s" in line
    assert len(caplog.messages) == 4 and len(a.lives) == 1
    assert not b.lives[0][0].was_killed
    a.fault = None
    assert after(clock, 8.1, found) == "" and len(a.lives) == 2


def test_a_start_that_fails_for_ever_is_given_up(clock: SimpleNamespace) -> None:
    found, (a, b) = fleet_of(2, restarts=2)
    for one in (a, b):
        one.lives[0][0].die()
        one.fault = MemoryError()
    assert found.lost() == "" == after(clock, 1.1, found)
    why = "a0 cannot be started: MemoryError, b0 cannot be started: MemoryError"
    assert after(clock, 2.1, found) == why


def test_nobody_says_that_an_engine_starts_again_while_all_are_being_ended(caplog) -> None:
    """If all end normally, the first of them used to log an error."""
    found, (a, b) = fleet_of(2, restarts=3)
    a.lives[0][0].die(0)
    assert found.lost(restarts=False) == ""
    b.lives[0][0].die(0)
    assert found.lost(restarts=False) == "a0 ended with exit code 0, b0 ended with exit code 0"
    assert caplog.messages == [] and (len(a.lives), len(b.lives)) == (1, 1)


def test_who_is_served_hears_of_each_loss_once(clock: SimpleNamespace) -> None:
    found, (_, b) = fleet_of(2, restarts=3, num_ranks=2)
    heard: list[tuple[int, bool]] = []
    found.on_lost = lambda at: heard.append((at, b.lives[0][0].was_killed))
    b.lives[0][1].die()
    for _ in range(3):
        after(clock, 1, found)
    assert heard == [(1, True)]


def test_all_ranks_of_an_engine_die_together_and_are_waited_for(clock: SimpleNamespace) -> None:
    found, (a, _) = fleet_of(2, restarts=3, num_ranks=3)
    a.lives[0][2].stays = True
    a.lives[0][1].die()
    for _ in range(4):
        assert after(clock, 2, found) == ""
    assert all(rank.was_killed for rank in a.lives[0]) and len(a.lives) == 1
    a.lives[0][2].exitcode = -9
    assert found.lost() == "" and len(a.lives) == 2
    for rank in a.lives[1][:2]:
        rank.said.send("ready")
    found.lost()
    a.lives[1][2].said.send("ready")
    for _ in range(2):
        assert found.lost() == ""
    a.lives[1][0].die()
    for _ in range(2):
        after(clock, 2.1, found)
    assert len(a.lives) == 3


def test_processes_that_survive_their_kill_are_not_waited_for_without_end(
    clock: SimpleNamespace,
) -> None:
    found, starts = fleet_of(2, restarts=3)
    for one in starts:
        one.lives[0][0].stays = True
        one.lives[0][0].said.send("stuck: its step takes 61 s longer than any before")
    assert found.lost() == "" == after(clock, 50, found)
    line = " is stuck: its step takes 61 s longer than any before"
    assert after(clock, 20, found) == f"a0{line}, b0{line}"


@pytest.mark.parametrize("says", [True, False])
def test_one_that_does_not_load_counts_as_any_other(says: bool, clock: SimpleNamespace) -> None:
    found, (a, b) = fleet_of(2, restarts=2)
    a.lives[0][0].die()
    found.lost()
    for life in (1, 2):
        assert after(clock, 2.1, found) == ""
        if says:
            a.lives[life][0].said.send("cache.pages is too much")
        else:
            a.lives[life][0].die(3)
        for _ in range(3):
            assert found.lost() == ""
    assert len(a.lives) == 3
    b.lives[0][0].die()
    found.lost()
    for life in (1, 2):
        assert after(clock, 2.1, found) == ""
        b.lives[life][0].die(4)
        said = found.lost()
    why = "cache.pages is too much" if says else "a0 ended with exit code 3"
    assert said == f"{why}, b0 ended with exit code 4"


def test_a_rank_that_ends_while_others_load_ends_them(clock: SimpleNamespace) -> None:
    """The rank has reported ready, so its messages are no longer awaited."""
    found, (a, _) = fleet_of(2, restarts=3, num_ranks=2)
    a.lives[0][0].die()
    found.lost()
    assert after(clock, 1.1, found) == ""
    a.lives[1][1].said.send("ready")
    assert found.lost() == "" and len(a.lives) == 2
    a.lives[1][1].die(-9)
    for _ in range(2):
        assert after(clock, 2.1, found) == ""
    assert a.lives[1][0].was_killed and len(a.lives) == 3


def test_heartbeats_while_loading_are_no_outcome(clock: SimpleNamespace) -> None:
    found, (a, _) = fleet_of(2, restarts=3)
    a.lives[0][0].die()
    found.lost()
    after(clock, 1.1, found)
    for said in ("alive", "alive", "ready", "alive"):
        a.lives[1][0].said.send(said)
    for _ in range(3):
        assert found.lost() == ""
    assert len(a.lives) == 2 and not a.lives[1][0].was_killed


def test_restarts_are_those_of_an_hour(clock: SimpleNamespace, caplog) -> None:
    found, (a, _) = fleet_of(2, restarts=2)
    for life in range(3):
        clock.now += 60
        a.lives[life][0].die()
        assert found.lost() == "" == after(clock, 2.1, found)
    assert len(a.lives) == 3
    assert caplog.messages[-1].endswith("; no restarts left for it (parallel.restarts 2)")
    clock.now = 1000 + 60 + 2.1 + 3599  # the first restart is almost an hour old
    assert found.lost() == "" and len(a.lives) == 3
    assert after(clock, 2, found) == "" and len(a.lives) == 4


def test_one_engine_is_not_started_again() -> None:
    found, (a,) = fleet_of(1, restarts=3, num_ranks=2)
    a.lives[0][1].die(7)
    assert found.lost() == "a1 ended with exit code 7" and len(a.lives) == 1
    assert a.lives[0][0].was_killed


def test_one_api_process_is_started_again(clock: SimpleNamespace) -> None:
    found, (a,) = fleet_of(1, restarts=3, even_one=True)
    a.lives[0][0].die(7)
    assert found.lost() == "" == after(clock, 1.1, found) and len(a.lives) == 2


@pytest.mark.parametrize(("num_engines", "is_lost"), [(1, False), (2, True)])
def test_a_silent_engine_of_several_is_replaced(
    num_engines: int, is_lost: bool, clock: SimpleNamespace, caplog
) -> None:
    found, (a, *others) = fleet_of(num_engines, restarts=3, alone_s=2.0)
    for _ in range(25):
        for one in others:
            one.lives[0][0].said.send("alive")
        assert found.lost() == ""
    assert a.lives[0][0].was_killed == is_lost
    assert not any(one.lives[0][0].was_killed for one in others)
    assert [line.partition(";")[0] for line in caplog.messages] == ["a0 has been silent for 2 s"][
        :is_lost
    ]
    assert after(clock, 1.1, found) == "" and len(a.lives) == 1 + is_lost


def test_while_a_server_ends_nobody_is_started(clock: SimpleNamespace) -> None:
    found, (a, _) = fleet_of(2, restarts=3, num_ranks=2)
    a.lives[0][0].die()
    for _ in range(2):
        clock.now += 5
        assert found.lost(restarts=False) == ""
    assert a.lives[0][1].was_killed and len(a.lives) == 1
