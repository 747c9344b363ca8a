"""Who is lost: a rank that ended, or one without a beat, counted in turns of the supervisor."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.watch import LOST_S, TICK_S, WatchedRanks, endings

TURNS = round(LOST_S / TICK_S)  # that a rank may be silent


def process(name: str, exitcode: int | None = None) -> Any:
    return SimpleNamespace(name=name, exitcode=exitcode, pid=None)


class Engine:
    """Ranks that beat when the test says so."""

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
    engine.beat(2)  # alive, and yet it will never end
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


def test_a_rank_that_ended_is_lost_at_once() -> None:
    engine = Engine(2)
    engine.ends[1].close()
    assert engine.ranks.lost() == ""  # it ends, but has not yet
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
