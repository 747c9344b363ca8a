"""Engines that are lost are started again, so often and not more; the last one's end is the end."""

from __future__ import annotations

import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm import fleet
from nanovllm.fleet import Fleet


class Rank:
    """A process of one life, as the supervisor sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = None
        self.exitcode: int | None = None
        self.stays = False  # no signal reaches it
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
    """Spawns ranks; `lives` has those of each life of an engine."""

    def __init__(self, name: str, num_ranks: int) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self.lives: list[list[Rank]] = []

    def __call__(self) -> list[tuple[Any, Connection]]:
        ranks = [Rank(f"{self.name}{rank}") for rank in range(self.num_ranks)]
        self.lives.append(ranks)
        return [(rank, rank.word) for rank in ranks]


def fleet_of(num_engines: int, restarts: int, num_ranks: int = 1) -> tuple[Fleet, list[Starts]]:
    starts = [Starts(name, num_ranks) for name in "abcd"[:num_engines]]
    found = Fleet(starts, restarts)
    found.start()
    assert len(found.children) == num_engines * num_ranks and not found.lost()
    return found, starts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_an_engine_that_ended_lives_again_and_others_go_on(caplog) -> None:
    found, (a, b) = fleet_of(2, restarts=3)
    a.lives[0][0].die(-signal.SIGKILL)
    assert found.lost() == ""
    assert (len(a.lives), len(b.lives)) == (2, 1) and not b.lives[0][0].was_killed
    assert [process for process, _ in found.children] == [a.lives[1][0], b.lives[0][0]]
    assert caplog.messages == [
        "a0 ended by SIGKILL (9); out of memory?; starting it again, 2 more left "
        "(parallel.restarts 3)"
    ]
    a.lives[1][0].said.send("ready")
    for _ in range(3):
        assert found.lost() == ""
    assert len(a.lives) == 2


def test_nobody_says_that_an_engine_starts_again_while_all_are_being_ended(caplog) -> None:
    """Where all end well, the first of them was an error in the log."""
    found, (a, b) = fleet_of(2, restarts=3)
    a.lives[0][0].die(0)
    assert found.lost(restarts=False) == ""
    b.lives[0][0].die(0)
    assert found.lost(restarts=False) == "a0 ended with exit code 0, b0 ended with exit code 0"
    assert caplog.messages == [] and (len(a.lives), len(b.lives)) == (1, 1)


def test_who_is_served_hears_of_each_loss_once() -> None:
    found, (_, b) = fleet_of(2, restarts=3, num_ranks=2)
    heard: list[tuple[int, bool]] = []
    found.on_lost = lambda at: heard.append((at, b.lives[0][0].was_killed))
    b.lives[0][1].die()
    for _ in range(3):
        found.lost()
    assert heard == [(1, True)]


def test_all_ranks_of_an_engine_die_together_and_are_waited_for() -> None:
    found, (a, _) = fleet_of(2, restarts=3, num_ranks=3)
    a.lives[0][2].stays = True
    a.lives[0][1].die()
    for _ in range(4):
        assert found.lost() == ""
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
    found.lost()
    assert len(a.lives) == 3


@pytest.mark.parametrize("says", [True, False])
def test_one_that_does_not_load_counts_as_any_other(says: bool) -> None:
    found, (a, b) = fleet_of(2, restarts=2)
    a.lives[0][0].die()
    found.lost()
    for life in (1, 2):
        if says:
            a.lives[life][0].said.send("cache.pages is too much")
        else:
            a.lives[life][0].die(3)
        for _ in range(3):
            assert found.lost() == ""
    assert len(a.lives) == 3
    b.lives[0][0].die()
    found.lost()
    b.lives[1][0].die(4)
    found.lost()
    b.lives[2][0].die(4)
    why = "cache.pages is too much" if says else "a0 ended with exit code 3"
    assert found.lost() == f"{why}, b0 ended with exit code 4"


def test_a_rank_that_ends_while_others_load_ends_them() -> None:
    """It had said that it is ready, so nobody waits for its word any more."""
    found, (a, _) = fleet_of(2, restarts=3, num_ranks=2)
    a.lives[0][0].die()
    found.lost()
    a.lives[1][1].said.send("ready")
    assert found.lost() == "" and len(a.lives) == 2
    a.lives[1][1].die(-9)
    for _ in range(2):
        assert found.lost() == ""
    assert a.lives[1][0].was_killed and len(a.lives) == 3


def test_restarts_are_those_of_an_hour(clock: SimpleNamespace, caplog) -> None:
    found, (a, _) = fleet_of(2, restarts=2)
    for life in range(3):
        clock.now += 60
        a.lives[life][0].die()
        for _ in range(2):
            assert found.lost() == ""
    assert len(a.lives) == 3
    assert caplog.messages[-1].endswith("; no restarts left for it (parallel.restarts 2)")
    clock.now += 3600 - 121
    assert found.lost() == "" and len(a.lives) == 3
    clock.now += 2
    assert found.lost() == "" and len(a.lives) == 4


def test_one_engine_is_not_started_again() -> None:
    found, (a,) = fleet_of(1, restarts=3, num_ranks=2)
    a.lives[0][1].die(7)
    assert found.lost() == "a1 ended with exit code 7" and len(a.lives) == 1
    assert a.lives[0][0].was_killed


def test_while_a_server_ends_nobody_is_started() -> None:
    found, (a, _) = fleet_of(2, restarts=3, num_ranks=2)
    a.lives[0][0].die()
    for _ in range(2):
        assert found.lost(restarts=False) == ""
    assert a.lives[0][1].was_killed and len(a.lives) == 1
