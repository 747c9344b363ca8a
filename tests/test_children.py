"""The pipe between a child and its supervisor: early heartbeats, and messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread

import pytest

from nanovllm import children, launch
from nanovllm.children import LEAVE, SupervisorLink
from nanovllm.config import load_config


class Left(BaseException):
    """Raised in place of the end of a process."""


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection, SupervisorLink, Thread]]:
    """Yield the supervisor's end of a pipe, and a child with a thread at the other end."""

    def leave(code: int) -> None:
        raise Left

    monkeypatch.setattr(children.os, "_exit", leave)
    monkeypatch.setattr(children, "BEAT_EVERY_S", 0.01)
    ours, theirs = Pipe()
    link = SupervisorLink(theirs)

    def live() -> None:
        with contextlib.suppress(Left):
            link.leave_with_supervisor()

    thread = Thread(target=live, daemon=True)
    thread.start()
    yield ours, link, thread
    ours.close()
    thread.join(30)
    assert not thread.is_alive()


def received(pipe: Connection, text: str) -> str:
    """Return the first message that begins with `text`, after heartbeats."""
    while True:
        assert pipe.poll(30)
        if (said := pipe.recv()).startswith(text):
            return said
        assert said == "alive"


def test_heartbeats_begin_before_the_child_is_ready(pipe) -> None:
    ours, link, _ = pipe
    assert ours.poll(30) and ours.recv() == "alive" and not link.is_ready
    link.ready()
    assert received(ours, "ready") == "ready" and link.is_ready
    assert received(ours, "alive") == "alive"


def test_a_step_that_is_far_too_late_is_reported(pipe) -> None:
    ours, link, _ = pipe
    late_s = 59.0
    link.watch_steps(lambda: late_s)
    received(ours, "alive")
    link.most_late_s = 60.0
    received(ours, "alive")
    late_s = 61.2
    said = "stuck: its step takes 61 s longer than any before"
    assert received(ours, "stuck") == said
    late_s = 0.0
    while ours.recv() != "alive":
        pass


def test_an_engine_is_told_once_that_no_api_process_follows(pipe) -> None:
    ours, link, _ = pipe
    left: list[int] = []
    link.on_leave(lambda: left.append(1))
    ours.send(LEAVE)
    deadline = time.monotonic() + 30
    while not left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == [1]
    link.on_leave(lambda: left.append(2))  # it has happened already, so the callback runs at once
    assert left == [1, 2]


def test_only_an_engine_of_several_or_of_ranks_may_end_by_a_stuck_step(monkeypatch) -> None:
    found: list[float] = []
    monkeypatch.setattr("nanovllm.ipc.channel.Listener", lambda path: path)
    monkeypatch.setattr("nanovllm.engine.process.main", lambda *args, **kwargs: None)
    one, two, ranks = "parallel.dp=1", "parallel.dp=2", "parallel.tp=2"
    for overrides in ([one], [two], [two, "server.stall_s=2"], ["engine=model", ranks]):
        config = load_config("paper", overrides)
        place, *_ = launch.places_of(config, "")
        children.run_engine(link := SupervisorLink(Pipe()[1]), config, place, "path")
        found.append(link.most_late_s)
    assert found == [float("inf"), 60.0, 12.0, 60.0]
