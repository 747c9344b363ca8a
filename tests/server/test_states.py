"""States of a connection, one step after another, with a transport and an application in memory."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from nanovllm.config import load_config
from nanovllm.server.connection import (
    BODY,
    HEAD,
    IDLE,
    LAST,
    LINGER,
    METHOD,
    NEXT,
    REST,
    Connection,
    ConnectionState,
)
from nanovllm.server.metrics import HttpCounts
from nanovllm.server.refusals import RefusalLog

GET = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
CHUNKED = b"POST /%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CLOSING = b"POST /%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 4\r\n\r\n"
UPGRADE = b"GET /%d HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.end = ""  # "eof" of the writing side, "close" or "abort"

    def write(self, data: Any) -> None:
        self.sent += data

    def write_eof(self) -> None:
        self.end = "eof"

    def close(self) -> None:
        self.end = "close"

    def abort(self) -> None:
        self.end = "abort"

    def is_closing(self) -> bool:
        return self.end in ("close", "abort")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Recorded(Connection):
    """Connection that keeps its states. Each request is answered when `answer` is called."""

    def __init__(self) -> None:
        self.answering: dict[str, asyncio.Event] = {}
        config = uvicorn.Config(
            cast(Any, self.respond), interface="asgi3", ws="none", lifespan="off", log_config=None
        )
        config.load()
        options = {"config": config, "server_state": ServerState(), "app_state": {}}
        recipe = load_config(None).recipe
        super().__init__(recipe.server, HttpCounts(), RefusalLog(), **options)
        self.states = [IDLE]
        self.wire = Transport()
        self.connection_made(self.wire)

    def _enter(self, state: ConnectionState, deadline: float | None = None) -> None:
        super()._enter(state, deadline)
        self.states.append(state)

    async def respond(self, scope: Any, receive: Any, send: Any) -> None:
        event = self.answering.setdefault(scope["path"], asyncio.Event())
        head = {"status": 200, "headers": [(b"content-length", b"2")]}
        if is_early := scope["query_string"] == b"early":
            await send({"type": "http.response.start", **head})
        await event.wait()
        if not is_early:
            await send({"type": "http.response.start", **head})
        await send({"type": "http.response.body", "body": b"ok"})
        if scope["query_string"] == b"fails":
            raise ValueError

    async def answer(self, number: int) -> None:
        self.answering.setdefault(f"/{number}", asyncio.Event()).set()
        for _ in range(5):
            await asyncio.sleep(0)


Step = bytes | int | Callable[[Recorded], object]


def late(connection: Recorded) -> None:
    connection.enforce_limits(time.monotonic() + 1000)


A, B, C = GET % 1, GET % 2, GET % 3
CASES: dict[str, tuple[list[Step], list[ConnectionState], list[int], str]] = {
    "a request without a body": ([A, 1], [HEAD, BODY, IDLE], [200], ""),
    "a body that comes later": ([POST % 1, b"abcd", 1], [HEAD, BODY, IDLE], [200], ""),
    "an answer before the body": (
        [POST % 1, 1, b"ab", b"cd", B, 2],
        [HEAD, BODY, REST, IDLE, HEAD, BODY, IDLE], [200, 200], "",
    ),
    "the last answer before the body": (
        [CLOSING % 1, 1, b"ab", b"cd"], [HEAD, BODY, LINGER], [200], "eof",
    ),
    "a failure after an early answer": (
        [POST.replace(b"%d", b"1?fails"), 1], [HEAD, BODY, REST, LINGER], [200], "eof",
    ),
    "a failure after the last answer": (
        [CLOSING.replace(b"%d", b"1?fails"), 1], [HEAD, BODY, LINGER], [200], "eof",
    ),
    "a broken body after the begin of its answer": (
        [CHUNKED.replace(b"%d", b"1?early"), b"zz\r\n"], [HEAD, BODY], [200], "abort",
    ),
    "an early answer, and no rest": ([POST % 1, 1, late], [HEAD, BODY, REST], [200], "abort"),
    "a broken rest": (
        [CHUNKED % 1, 1, b"zz\r\n"], [HEAD, BODY, REST], [200], "abort",
    ),
    "nothing": ([late], [LINGER], [408], "eof"),
    "half a head": ([A[:9], late], [HEAD, LINGER], [408], "eof"),
    "half a body": ([POST % 1, b"ab", late], [HEAD, BODY, LINGER], [408], "eof"),
    "a broken body": ([CHUNKED % 1, b"zz\r\n"], [HEAD, BODY, LINGER], [400], "eof"),
    "an unknown method": ([b"FOO /", b"x HTTP/1.1\r\n"], [HEAD, METHOD, LINGER], [501], "eof"),
    "the end of an idle connection": (
        [A, 1, Recorded.shutdown], [HEAD, BODY, IDLE], [200], "close",
    ),
    "the end of half a head": ([A[:9], Recorded.shutdown], [HEAD, LINGER], [503], "eof"),
    "the end of an open answer": (
        [A, Recorded.shutdown, 1], [HEAD, BODY, IDLE], [200], "close",
    ),
    "an upgrade": ([UPGRADE % 1, b"xyz", 1], [HEAD, BODY, IDLE, LAST, LINGER], [200], "eof"),
    "two, and a broken one": (
        [A, B + b"\x16", C, 1, 2],
        [HEAD, BODY, IDLE, HEAD, BODY, IDLE, HEAD, LAST, LINGER], [200, 200, 400], "eof",
    ),
    "a broken body after an open answer": (
        [A, CHUNKED % 2, b"zz\r\n", C, 1],
        [HEAD, BODY, IDLE, HEAD, BODY, LAST, LINGER], [200, 400], "eof",
    ),
    "an unknown method after an open answer": (
        [A, b"FOO /x", b" HTTP/1.1\r\n", 1],
        [HEAD, BODY, IDLE, HEAD, METHOD, LAST, LINGER], [200, 501], "eof",
    ),
    "half a head after an open answer": (
        [A, B[:9], late, 1], [HEAD, BODY, IDLE, HEAD, LAST, LINGER], [200, 408], "eof",
    ),
    "an empty line after an open answer": (
        [A, b"\r\n", late, 1], [HEAD, BODY, IDLE, LAST, LINGER], [200], "eof",
    ),
    "the end of half a head after an open answer": (
        [A, B[:9], Recorded.shutdown, Recorded.shutdown, 1],
        [HEAD, BODY, IDLE, HEAD, LAST, LINGER], [200, 503], "eof",
    ),
    "bytes after the end": ([b"\x16", b"x" * 99, A, late], [HEAD, LINGER], [400], "abort"),
}  # fmt: skip


def run(steps: list[Step]) -> Recorded:
    async def play() -> Recorded:
        connection = Recorded()
        for step in steps:
            if isinstance(step, bytes):
                connection.data_received(step)
            elif isinstance(step, int):
                await connection.answer(step)
            else:
                step(connection)
            await asyncio.sleep(0)
        return connection

    return asyncio.run(play())


def seen_statuses(connection: Recorded) -> list[int]:
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d+)", connection.wire.sent)]


@pytest.mark.parametrize("name", CASES)
def test_states_answers_and_end(name) -> None:
    steps, states, statuses, end = CASES[name]
    connection = run(steps)
    assert connection.states[1:] == states
    assert seen_statuses(connection) == statuses
    assert connection.wire.end == end


def test_an_unknown_method_after_other_requests_gets_one_status_however_it_is_cut() -> None:
    body = b"4\r\nabcd\r\n0\r\n\r\n"
    raw = A + CHUNKED % 2 + body + POST % 3 + b"FOO " + b"FOO /x HTTP/1.1\r\n"
    for cut in range(1, len(raw)):
        assert seen_statuses(run([raw[:cut], raw[cut:], 1, 2, 3])) == [200, 200, 200, 501], cut
    for size in (1, 2, 3, 7, 50):
        reads = [raw[at : at + size] for at in range(0, len(raw), size)]
        assert seen_statuses(run([*reads, 1, 2, 3])) == [200, 200, 200, 501], size


def test_few_bytes_are_kept_to_find_an_unknown_method() -> None:
    """A request after them gets 400, since the place where it begins is not known."""
    connection = run([CHUNKED % 1, *[b"4000\r\n" + b"x" * 0x4000 + b"\r\n"] * 9])
    assert connection._begin == b""
    for number, status in ((1, 501), (9, 400)):
        body = [b"4000\r\n" + b"x" * 0x4000 + b"\r\n"] * number
        assert seen_statuses(run([CHUNKED % 1, *body, b"0\r\n\r\nFOO / HTTP/1.1\r\n", 1])) == [
            200,
            status,
        ]
    assert run([A, POST % 2 + b"ab"])._begin == run([A + B])._begin == b""


def test_every_legal_transition_occurs() -> None:
    seen = {
        pair for _, states, _, _ in CASES.values() for pair in itertools.pairwise([IDLE, *states])
    }
    assert seen == {(state, after) for state, others in NEXT.items() for after in others}


def test_other_transitions_are_errors() -> None:
    connection = run([A])
    for state in (IDLE, METHOD, BODY, REST):
        with pytest.raises(AssertionError):
            connection._enter(state)
