"""Detection of lost ranks: processes that ended, or that sent no heartbeat for some turns."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm import watch
from nanovllm.watch import (
    IDLE_S,
    LOST_S,
    STOPPED_S,
    TICK_S,
    StartingChildren,
    WatchedRanks,
    Work,
    endings,
)

TURNS = round(LOST_S / TICK_S)  # turns without a heartbeat that are allowed


def process(name: str, exitcode: int | None = None) -> Any:
    return SimpleNamespace(name=name, exitcode=exitcode, pid=None)


class Engine:
    """Ranks whose heartbeats the test sends."""

    def __init__(self, num_ranks: int) -> None:
        self.processes = [process(f"rank{rank}") for rank in range(num_ranks)]
        pairs = [Pipe() for _ in range(num_ranks)]
        self.ends: list[Connection] = [theirs for _, theirs in pairs]
        words = [ours for ours, _ in pairs]
        self.ranks = WatchedRanks([*zip(self.processes, words, strict=True)])

    def beat(self, *ranks: int) -> None:
        for rank in ranks:
            self.ends[rank].send("alive")


def test_a_silent_rank_is_lost_after_three_seconds_of_turns() -> None:
    engine = Engine(3)
    for _ in range(TURNS):
        engine.beat(0, 1)
        assert engine.ranks.lost() == ""
    engine.beat(0, 1)
    assert engine.ranks.lost() == "rank2 has been silent for 3 s"


def test_ranks_may_end_a_moment_after_the_one_they_follow() -> None:
    engine = Engine(3)
    engine.processes[0].exitcode = 0
    assert engine.ranks.lost() == ""
    engine.processes[1].exitcode = 0
    for _ in range(TURNS - 1):
        assert engine.ranks.lost() == ""
    engine.beat(2)  # it is alive, and yet it will never end
    assert engine.ranks.lost().startswith("rank0 ended with exit code 0")


@pytest.mark.parametrize(("code", "said"), [(0, "rank0 ended with exit code 0"), (1, "1")])
def test_an_engine_that_ended_is_lost_at_once(code: int, said: str) -> None:
    engine = Engine(2)
    engine.processes[0].exitcode = code
    engine.processes[1].exitcode = None if code else 0
    assert said in engine.ranks.lost()


def test_beats_of_a_long_stop_are_heard_at_once() -> None:
    engine = Engine(2)
    for _ in range(100):
        engine.beat(0, 1)
    for _ in range(TURNS + 1):
        assert engine.ranks.lost() == ""
    assert engine.ranks.lost() == "rank0 has been silent for 3 s, rank1 has been silent for 3 s"


def test_a_rank_that_computes_is_alive() -> None:
    engine = Engine(2)
    engine.processes[1].pid = os.getpid()
    for _ in range(TURNS + 1):
        begin = time.process_time()
        while time.process_time() - begin < 0.02:
            pass
        engine.beat(0)
        assert engine.ranks.lost() == ""


def test_a_rank_without_others_may_be_silent() -> None:
    engine = Engine(1)
    assert [engine.ranks.lost() for _ in range(10 * TURNS)] == [""] * 10 * TURNS
    engine.processes[0].exitcode = 3
    assert engine.ranks.lost() == "rank0 ended with exit code 3"


def test_a_rank_alone_may_be_silent_for_as_long_as_is_asked() -> None:
    ours, theirs = Pipe()
    ranks = WatchedRanks([(process("engine"), ours)], alone_s=10.0)
    for _ in range(round(10 / TICK_S)):
        assert ranks.lost() == ""
    theirs.send("alive")
    for _ in range(round(10 / TICK_S) + 1):
        assert ranks.lost() == ""
    assert ranks.lost() == "engine has been silent for 10 s"


def test_a_rank_that_reports_a_stuck_step_is_lost() -> None:
    """A driver may spin: the heartbeat thread runs, and the process uses CPU time."""
    engine = Engine(1)
    engine.ends[0].send("alive")
    assert engine.ranks.lost() == ""
    engine.ends[0].send("stuck: its step takes 61 s longer than any before")
    engine.ends[0].send("alive")  # the step has ended meanwhile
    assert engine.ranks.lost() == ""
    engine.ends[0].send("stuck: its step takes 62 s longer than any before")
    said = "rank0 is stuck: its step takes 62 s longer than any before"
    assert engine.ranks.lost() == said


class Loading:
    """Simulated loading processes: their work, and turns of the supervisor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.work = {name: Work() for name in names}
        self.now = 0.0
        self.ends: dict[str, Connection] = {}
        children = []
        for name in names:
            ours, self.ends[name] = Pipe()
            children.append((SimpleNamespace(name=name, exitcode=None, pid=name), ours))
        monkeypatch.setattr(watch, "work_of", lambda pid: self.work[pid])
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.children = StartingChildren(children)  # type: ignore[arg-type]

    def turns(self, seconds: float, *beating: str, **done: Work) -> str:
        """Return the result after `seconds` of turns."""
        said = ""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for name in beating:
                self.ends[name].send("alive")
            for name, more in done.items():
                self.work[name] = Work(*map(sum, zip(self.work[name], more, strict=True)))
            assert self.children.outcomes() == []
            said = self.children.trouble()
        return said


def test_a_rank_that_stops_while_loading_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Loading(monkeypatch, "engine", "rank1", "rank2")
    beats = "engine", "rank2"
    assert loading.turns(10, "rank1", *beats, engine=Work(cpu_ticks=1)) == ""
    assert loading.turns(STOPPED_S, *beats, engine=Work(cpu_ticks=1)) == ""
    said = f"rank1 stopped while loading: silent for {STOPPED_S:.0f} s"
    assert loading.turns(2 * TICK_S, *beats, engine=Work(cpu_ticks=1)) == said


@pytest.mark.parametrize("more", [Work(cpu_ticks=1), Work(page_faults=3)])
def test_a_rank_that_loads_without_heartbeats_is_alive(
    more: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may be read from a slow disk through mapped pages, with the GIL held."""
    loading = Loading(monkeypatch, "engine", "rank1")
    assert loading.turns(4 * STOPPED_S, "engine", rank1=more) == ""


def test_ranks_that_all_wait_for_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Loading(monkeypatch, "engine", "rank1")
    beats = "engine", "rank1"
    assert loading.turns(IDLE_S, *beats) == ""
    assert loading.turns(TICK_S, *beats, rank1=Work(0, 0, 4096)) == ""  # it has read data
    assert loading.turns(IDLE_S, *beats) == ""
    said = f"engine, rank1 hung while loading: idle for {IDLE_S:.0f} s"
    assert loading.turns(2 * TICK_S, *beats) == said


def test_one_that_waits_for_a_rank_that_loads_is_no_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading = Loading(monkeypatch, "engine", "rank1")
    assert loading.turns(2 * IDLE_S, "engine", "rank1", rank1=Work(cpu_ticks=1)) == ""


def test_a_supervisor_that_paused_has_stopped_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Loading(monkeypatch, "engine")
    loading.now += 10 * STOPPED_S
    assert loading.turns(STOPPED_S / 2) == ""


def test_a_rank_that_ended_is_lost_at_once() -> None:
    engine = Engine(2)
    engine.ends[1].close()
    assert engine.ranks.lost() == ""  # the pipe is closed, but the process has not ended yet
    engine.processes[1].exitcode = -signal.SIGKILL
    assert engine.ranks.lost() == "rank1 ended by SIGKILL (9); out of memory?"


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ([None, None], ""),
        ([0, None], "a ended with exit code 0"),
        ([0, 1], "b ended with exit code 1"),
        ([1, -11], "b ended by SIGSEGV (11), a ended with exit code 1"),
        ([-40, None], "a ended by signal (-40)"),
    ],
)
def test_signals_are_named_first(codes: list[int | None], said: str) -> None:
    assert endings(map(process, "ab", codes)).replace("(40)", "(-40)") == said
