"""Requests that follow an open answer on the same connection, with raw sockets.

Answers and errors come in the order of the requests, and an error is the last one.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from tests.server.serving import Api, body, eventually, serving
from tests.server.test_connection import (
    DATA,
    answers,
    code,
    connected,
    get,
    post,
    received,
    some,
    statuses,
)
from tests.times import least

HEADER_S, BODY_S = 0.8, 1.2
CLOSE = b"connection: close"
STREAM = json.dumps(body("some words of text", stream=True)).encode()
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA)
UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Iterator[Api]:
    with serving(
        tmp_path_factory.mktemp("pipelining"),
        f"server.header_timeout_s={HEADER_S}",
        f"server.body_timeout_s={BODY_S}",
        "server.api_key=sesame",
    ) as api:
        yield api


@pytest.fixture
def api(limited: Api) -> Iterator[Api]:
    limited.engine.reset()
    limited.engine.step_s = 0.1  # an answer of "hello" takes some 0.2 s
    yield limited
    limited.engine.reset()
    assert "Traceback" not in limited.log()


def begin(api: Api, sock: socket.socket, raw: bytes = b"") -> None:
    """Send a request, by default one for "hello", and wait until its answer is being generated."""
    num_before = len(api.engine.generates)
    sock.sendall(raw or post() + DATA)
    eventually(lambda: len(api.engine.generates) > num_before)


def parts(data: bytes) -> list[bytes]:
    """Return responses without chunks, split."""
    return [b"HTTP/1.1 " + part for part in data.split(b"HTTP/1.1 ")[1:]]


BROKEN = {
    "rubbish": (b"\x16\x03\x01 this is no HTTP\r\n\r\n", 400, "invalid_http"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    "no version": (b"GET /health\r\n", 400, "invalid_http"),
    "another version": (b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 505, "invalid_http"),
    "a folded header": (get(b"a: b\r\n c\r\n"), 400, "invalid_http"),
    "an expectation": (get(b"Expect: x\r\n"), 417, "expectation_failed"),
    "an upgrade with a body": (post(more=UPGRADE.decode()) + DATA, 400, "invalid_http"),
    "many headers": (get(b"a: b\r\n" * 200), 431, "headers_too_large"),
    "a large header": (get(b"big: " + b"x" * 70_000 + b"\r\n"), 431, "headers_too_large"),
    "an endless header": (get(b"big: " + b"x" * 500_000)[:-4], 431, "headers_too_large"),
    "a broken body": (post(None) + b"zz\r\n" + DATA, 400, "invalid_http"),
    "a body that breaks later": (post(None) + b"5\r\nhello!!!", 400, "invalid_http"),
    "large trailers": (post(None) + b"0\r\n" + b"t: v\r\n" * 200, 431, "headers_too_large"),
    "two lengths": (post("4\r\nContent-Length: 5") + DATA, 400, "invalid_http"),
}  # fmt: skip


@pytest.mark.parametrize("is_one_read", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_request_gets_its_error_after_the_open_answer(api, name, is_one_read) -> None:
    raw, status, error = BROKEN[name]
    with connected(api) as sock:
        if is_one_read:
            sock.sendall(post() + DATA + raw + get(b""))
        else:
            begin(api, sock)
            sock.sendall(raw + get(b""))
        data = received(sock)
    assert statuses(data) == [200, status], data
    first, second = parts(data)
    assert b'"content":"hello"' in first and CLOSE not in first
    assert CLOSE in second and code(second) == error


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("name", ["rubbish", "a broken body", "no host"])
def test_all_requests_before_a_broken_one_are_answered(api, name, number) -> None:
    raw, status, _ = BROKEN[name]
    with connected(api) as sock:
        sock.sendall((post() + DATA) * number + get(b"") + raw + get(b""))
        data = received(sock)
    assert statuses(data) == [200] * (number + 1) + [status]
    assert data.count(b'"content":"hello"') == number and data.count(CLOSE) == 1
    assert len(api.engine.generates) == number


def test_a_stream_ends_before_the_error(api) -> None:
    with connected(api) as sock:
        begin(api, sock, post(len(STREAM)) + STREAM)
        data = some(sock)
        sock.sendall(b"rubbish\r\n\r\n")
        data += received(sock)
    head, _, rest = data.partition(b"\r\n\r\n")
    stream, end, error = rest.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert CLOSE not in head and end and stream.count(b"data: ") >= 4
    assert error.startswith(b"HTTP/1.1 400 ") and CLOSE in error


@pytest.mark.parametrize("cut", range(18))
def test_an_unknown_method_is_named_however_its_line_is_cut(api, cut) -> None:
    """The error waits for the answer, so it must not be decided before the line is complete."""
    line = b"FOO /x HTTP/1.1\r\n"
    with connected(api) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin(api, sock)
        sock.sendall(line[:cut])
        time.sleep(0.01)
        sock.sendall(line[cut:])
        data = received(sock)
    assert statuses(data) == [200, 501] and b"the method FOO is not supported" in data


def test_an_unknown_method_in_the_read_of_another_request(api) -> None:
    for before in (get(b""), post() + DATA, post(None) + CHUNKS, (get(b"") + post() + DATA) * 3):
        with connected(api) as sock:
            sock.sendall(before + b"FOO /x HTTP/1.1\r\n")
            data = received(sock)
        assert statuses(data) == [200] * before.count(b" HTTP/1.1\r\n") + [501]
        assert code(data) == "method_not_allowed" and b"the method FOO is not supported" in data


def test_no_error_follows_the_last_answer_of_a_connection(api) -> None:
    """Nothing may follow an answer with `Connection: close`."""
    expects = post(more="Expect: 100-continue\r\n") + DATA
    for first in (post(more="Connection: close\r\n") + DATA, get(b"Connection: close\r\n")):
        with connected(api) as sock:
            sock.sendall(first + b"rubbish\r\n\r\n")
            data = received(sock)
        assert statuses(data) == [200] and CLOSE in data
    with connected(api) as sock:
        begin(api, sock, expects)
        sock.sendall(b"rubbish\r\n\r\n")
        data = received(sock)
    assert statuses(data) == [100, 200] and data.count(CLOSE) == 1
    with connected(api) as sock:
        begin(api, sock, (post() + DATA).replace(b" HTTP/1.1", b" HTTP/1.0", 1))
        sock.sendall(b"rubbish\r\n\r\n")
        assert statuses(received(sock)) == [200]


def test_a_head_that_stays_incomplete_gets_a_408_after_the_answer(api) -> None:
    api.engine.step_s = 0.5
    for rest in (b"GET /health HTTP/1.1\r\nHost", b"FOO /x"):
        with connected(api) as sock:
            begin(api, sock)
            sock.sendall(rest)
            begun = time.monotonic()
            data = received(sock)
        assert statuses(data) == [200, 408] and code(data) == "request_timeout"
        assert time.monotonic() - begun < 15
        assert b"server.header_timeout_s" in data


def test_a_body_that_stays_incomplete_gets_a_408_in_time(api) -> None:
    """Its time begins anew after the answer, since the server did not read meanwhile."""
    api.engine.step_s = 0.5  # an answer of "hello" takes 1 s

    def wait_s() -> float:
        with connected(api) as sock:
            begun = time.monotonic()
            begin(api, sock)
            sock.sendall(post(500) + DATA)
            assert statuses(answers(sock)) == [200]
            answered = time.monotonic()
            data = received(sock)
        assert statuses(data) == [408] and b"server.body_timeout_s" in data
        assert time.monotonic() - begun > BODY_S + 0.8
        return time.monotonic() - answered

    assert least(wait_s, BODY_S + 1) < BODY_S + 1


def test_an_empty_line_is_no_request(api) -> None:
    """Some clients send one after a body. It ends the connection, but not with an error."""
    api.engine.step_s = 0.5
    with connected(api) as sock:
        begin(api, sock)
        sock.sendall(b"\r\n")
        data = received(sock)
    assert statuses(data) == [200] and CLOSE in data
    api.engine.step_s = 0.0
    with connected(api) as sock:
        for _ in range(3):
            sock.sendall(post() + DATA + b"\r\n")
            assert statuses(answers(sock)) == [200]


def test_a_broken_body_after_the_answer_ends_the_connection(api) -> None:
    """An answered request gets no second answer."""
    raw = post(None).replace(b"/v1/chat/completions", b"/v1/nothing", 1)
    with connected(api) as sock:
        sock.sendall(raw)
        assert statuses(answers(sock)) == [404]
        sock.sendall(b"zz\r\n")
        assert received(sock) == b""


def test_a_slow_body_of_an_answered_request_is_dropped(api) -> None:
    """Its rest may come in parts, and then another request."""
    raw = post(20).replace(b"/v1/chat/completions", b"/v1/nothing", 1)
    with connected(api) as sock:
        sock.sendall(raw)
        assert statuses(answers(sock)) == [404]
        for _ in range(4):
            time.sleep(0.1)
            sock.sendall(b"12345")
        sock.sendall(get(b""))
        assert statuses(answers(sock)) == [200]


def test_an_upgrade_among_others_is_the_last_request(api) -> None:
    with connected(api) as sock:
        begin(api, sock)
        sock.sendall(get(b"") + get(UPGRADE) + b"rubbish\r\n\r\n" + get(b""))
        data = received(sock)
    assert statuses(data) == [200, 200, 200] and data.count(CLOSE) == 1


def test_a_connection_goes_on_after_pipelined_requests(api) -> None:
    with connected(api) as sock:
        for _ in range(2):
            sock.sendall((post() + DATA + get(b"") + post(None) + CHUNKS) * 2)
            data = answers(sock, 6)
            assert statuses(data) == [200] * 6 and data.count(b'"content":"hello"') == 4
            assert CLOSE not in data
            time.sleep(HEADER_S + 0.2)


def test_expectations_of_pipelined_requests(api) -> None:
    """The word comes only after the earlier answer, and the connection closes after it."""
    with connected(api) as sock:
        begin(api, sock)
        sock.sendall(post(more="Expect: 100-continue\r\n"))
        data = b""
        while not data.endswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            data += some(sock)
        assert statuses(data) == [200, 100] and CLOSE not in data
        sock.sendall(DATA)
        data = received(sock)
    assert statuses(data) == [200] and CLOSE in data


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("name", ["rubbish", "a broken body"])
def test_a_client_that_leaves_before_its_error_ends_its_request(api, name, is_half) -> None:
    api.engine.is_stuck = True
    with connected(api) as sock:
        begin(api, sock)
        sock.sendall(BROKEN[name][0])
        time.sleep(0.2)
        if is_half:
            sock.shutdown(socket.SHUT_WR)
            assert received(sock) == b""
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(lambda: len(api.engine.aborts) == 1)


def test_input_after_a_broken_request_is_ignored(api) -> None:
    """It may be more than the limits of a request, and it leaves the open answer as it is."""
    api.engine.step_s = 0.3
    with connected(api) as sock:
        begin(api, sock)
        sock.sendall(b"rubbish\r\n\r\n")
        for _ in range(100):
            sock.sendall(b"x" * 65_536)
        sock.sendall(get(b""))
        data = received(sock)
    assert statuses(data) == [200, 400] and b'"content":"hello"' in data


def test_statuses_of_broken_requests_are_counted_and_logged(api) -> None:
    def counted() -> int:
        text = api.http.get("/metrics", headers={"authorization": "Bearer sesame"}).text
        found = [line for line in text.splitlines() if 'path="other",status="417"' in line]
        return int(found[0].split()[-1]) if found else 0

    before = counted()
    with connected(api) as sock:
        sock.sendall(post() + DATA + get(b"Expect: x\r\n"))
        assert statuses(received(sock)) == [200, 417]
    assert counted() == before + 1
    eventually(lambda: "status=417 error=expectation_failed" in api.log())


def test_shutdown_closes_idle_connections_and_answers_open_ones(tmp_path) -> None:
    with serving(tmp_path, "server.shutdown_s=1") as api:
        api.engine.is_stuck = True
        plain = b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(DATA)
        raw = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost" + plain + DATA
        with (
            connected(api) as fresh,
            connected(api) as idle,
            connected(api) as partial,
            connected(api) as busy,
            connected(api) as broken,
        ):
            idle.sendall(get(b"").replace(b"Host: x", b"Host: localhost"))
            assert statuses(answers(idle)) == [200]
            partial.sendall(b"GET /health HTTP/1.1\r\nHost")
            begin(api, busy, raw)
            busy.sendall(b"GET /health HTTP/1.1\r\nHost")
            begin(api, broken, raw)
            broken.sendall(b"rubbish\r\n\r\n")
            time.sleep(0.2)
            api.process.terminate()
            assert received(fresh) == received(idle) == b""
            assert statuses(received(partial)) == [503]
            for sock in (busy, broken):  # the answer of 503 is the last one
                data = received(sock)
                assert statuses(data) == [503] and CLOSE in data
        api.process.join(5)
        assert api.process.exitcode == 0 and "Traceback" not in api.log()
