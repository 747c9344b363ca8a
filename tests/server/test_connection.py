"""Limits of a connection on bytes and time, and its removal afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.serving import Api, body, content, eventually, parsed_events, serving
from tests.times import least

CHAT = "/v1/chat/completions"
HEADER_S, BODY_S = 0.8, 1.2
DATA = json.dumps(body("hello")).encode()


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Iterator[Api]:
    with serving(
        tmp_path_factory.mktemp("limited"),
        f"server.header_timeout_s={HEADER_S}",
        f"server.body_timeout_s={BODY_S}",
        "server.api_key=sesame",
        "server.max_body_bytes=200000",
        "server.shutdown_s=1",
    ) as api:
        api.http.headers["Authorization"] = "Bearer sesame"
        yield api


@contextlib.contextmanager
def connected(api: Api) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port), timeout=30) as sock:
        yield sock


def post(length: object = len(DATA), more: str = "") -> bytes:
    framing = f"Content-Length: {length}" if length is not None else "Transfer-Encoding: chunked"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n"
    return f"{head}Content-Type: application/json\r\n{more}{framing}\r\n\r\n".encode()


def received(sock: socket.socket) -> bytes:
    """Return all bytes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def answers(sock: socket.socket, count: int = 1) -> bytes:
    """Return the bytes of `count` responses, which must have a content length."""
    data, end = b"", 0
    for _ in range(count):
        while not (head := re.match(rb".*?\r\n\r\n", data[end:], re.DOTALL)):
            data += some(sock)
        length = re.search(rb"content-length: (\d+)", head[0])
        assert length, data
        end += len(head[0]) + int(length[1])
        while len(data) < end:
            data += some(sock)
    assert len(data) == end
    return data


def some(sock: socket.socket) -> bytes:
    data = sock.recv(65536)
    assert data, "the server closed too early"
    return data


def statuses(data: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def code(data: bytes) -> str:
    return json.loads(data.rpartition(b"\r\n\r\n")[2])["error"]["code"]


def get(more: bytes) -> bytes:
    return b"GET /health HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n"


def test_headers_up_to_the_limits_are_taken_and_not_beyond(limited) -> None:
    many = b"".join(b"h%d: v\r\n" % i for i in range(98))
    for raw, status in (
        (get(many), 200),
        (get(many + b"one: more\r\n"), 200),
        (get(many + b"one: more\r\nand: another\r\n"), 431),
        (get(b"big: " + b"x" * 65_000 + b"\r\n"), 200),
        (get(b"big: " + b"x" * 65_600 + b"\r\n"), 431),
        (get(b"".join(b"h%d: %b\r\n" % (i, b"x" * 7000) for i in range(12))), 431),
        (b"GET /" + b"x" * 65_600 + b" HTTP/1.1\r\n\r\n", 431),
    ):
        with connected(limited) as sock:
            sock.sendall(raw)
            data = answers(sock)
            assert statuses(data) == [status], raw[:50]
            if status == 431:
                assert code(data) == "headers_too_large" and b"connection: close" in data
                assert received(sock) == b""


@pytest.mark.parametrize("kind", ["one header", "many headers", "a line", "a name"])
def test_endless_headers_are_cut_off_at_once_without_a_key(limited, kind) -> None:
    beginning, part = {
        "one header": (b"GET /v1/models HTTP/1.1\r\nbig: ", b"x" * 50_000),
        "many headers": (b"GET /v1/models HTTP/1.1\r\n", b"a: b\r\n" * 10_000),
        "a line": (b"GET /v1/models?", b"x" * 50_000),
        "a name": (b"GET /v1/models HTTP/1.1\r\n", b"x" * 50_000),
    }[kind]
    begun, num_sent = time.monotonic(), 0
    with connected(limited) as sock:
        sock.sendall(beginning)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while num_sent < 32 << 20:
                sock.sendall(part)
                num_sent += len(part)
        data = received(sock)
    assert statuses(data) == [431]
    assert time.monotonic() - begun < 20
    assert limited.http.get("/health").elapsed.total_seconds() < 5


@pytest.mark.parametrize(
    ("beginning", "seconds"),
    [
        (b"", HEADER_S),
        (b"\r\n", HEADER_S),
        (b"GET /health HTTP/1.1\r\nHost", HEADER_S),
        (get(b"")[:-2], HEADER_S),
        (post() + DATA[:5], BODY_S),
        (post(None) + b"5\r\n", BODY_S),
        (post(None) + b"0000000000", BODY_S),
    ],
)
def test_what_is_not_finished_in_time_gets_a_408(limited, beginning, seconds) -> None:
    def wait_s() -> float:
        begun = time.monotonic()
        with connected(limited) as sock:
            sock.sendall(beginning)
            data = received(sock)
        assert statuses(data) == [408] and code(data) == "request_timeout"
        return time.monotonic() - begun

    assert seconds - 0.1 < least(wait_s, seconds + 1) < seconds + 1


def test_drops_of_data_do_not_extend_the_time(limited) -> None:
    def wait_s(first: bytes, drops: bytes) -> float:
        with connected(limited) as sock:
            sock.settimeout(0.05)
            begun, data = time.monotonic(), b""
            sock.sendall(first)
            for byte in drops:
                sock.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    data = sock.recv(10_000)
                if data:
                    break
            assert statuses(data) == [408]
            return time.monotonic() - begun

    head = get(b"a: b\r\n" * 50)
    assert least(lambda: wait_s(head[:1], head[1:]), HEADER_S + 1) < HEADER_S + 1
    assert least(lambda: wait_s(post(500), b" " * 400), BODY_S + 1) < BODY_S + 1


def test_half_open_connections_leave_nothing_behind(limited) -> None:
    pid = limited.process.pid
    limited.http.get("/health")
    before = len(os.listdir(f"/proc/{pid}/fd"))
    memory = resident(pid)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(limited)) for _ in range(500)]
        for at, sock in enumerate(socks):
            sock.sendall((get(b""), post() + DATA)[at % 2][:-3])
        assert limited.chat("beside them").status_code == 200
        eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) >= before + 500)
        assert limited.http.get("/health").elapsed.total_seconds() < 5
        for at, sock in enumerate(socks):
            assert statuses(received(sock)) == [408], at
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before)
    assert resident(pid) - memory < 40 << 20
    assert limited.chat("after them").status_code == 200
    assert limited.engine.running == {}


def resident(pid: int | None) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_idle_connections_are_kept_between_requests(limited) -> None:
    with connected(limited) as sock:
        for _ in range(3):
            sock.sendall(post() + DATA)
            assert b"hello" in answers(sock)
            time.sleep(HEADER_S + 0.3)


@pytest.mark.parametrize("is_half", [False, True])
def test_who_closes_a_side_has_left(limited, is_half: bool) -> None:
    """A client that closes one side of the connection counts as disconnected."""
    limited.engine.reset()
    limited.engine.step_s = 0.1
    with connected(limited) as sock:
        sock.sendall(post() + DATA)
        eventually(lambda: len(limited.engine.running) == 1)
        if is_half:
            sock.shutdown(socket.SHUT_WR)
            assert received(sock) == b""
    eventually(lambda: len(limited.engine.aborts) == 1)
    limited.engine.reset()


def test_a_long_answer_is_not_cut_by_the_limits_of_reading(limited) -> None:
    limited.engine.reset()
    limited.engine.step_s = 0.03
    text = "word " * 40
    assert limited.chat(text).json()["choices"][0]["message"]["content"] == text
    limited.engine.reset()


def test_requests_may_come_byte_by_byte_and_many_at_once(limited) -> None:
    raw = post() + DATA
    with connected(limited) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in raw:
            sock.send(bytes([byte]))
        assert statuses(answers(sock)) == [200]
        chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in DATA)
        sock.sendall(post(None) + chunked + b"0\r\nx-trailer: y\r\n\r\n" + raw * 3 + get(b""))
        data = answers(sock, 5)
    assert statuses(data) == [200] * 5 and data.count(b'"content":"hello"') == 4


def test_pipelined_requests_wait_outside(limited) -> None:
    """While one request runs, at most one read's worth of further ones is taken."""
    limited.engine.reset()
    limited.engine.is_stuck = True
    with connected(limited) as sock:
        sock.sendall(post() + DATA)
        eventually(lambda: len(limited.engine.running) == 1)
        sock.settimeout(0.5)
        num_sent, many = 0, get(b"") * 5000
        with pytest.raises(TimeoutError):
            while num_sent < 64 << 20:
                num_sent += sock.send(many)
        assert resident(limited.process.pid) < 400 << 20
    limited.engine.reset()


def test_who_leaves_amid_pipelined_requests_leaves_nothing(limited) -> None:
    """A disconnect ends the request being answered, not only the last of the pipelined ones."""
    limited.engine.reset()
    limited.engine.step_s = 0.01
    before = tasks(limited)
    stream = json.dumps(body("x", stream=True, ignore_eos=True)).encode()
    with connected(limited) as sock:
        sock.sendall((post(len(stream)) + stream) * 3)
        assert some(sock).startswith(b"HTTP/1.1 200")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(lambda: limited.engine.aborts == [limited.engine.generates[0].request_id])
    eventually(lambda: tasks(limited) == before)
    assert len(limited.engine.generates) == 1 and limited.engine.running == {}
    assert "Traceback" not in limited.log()


def tasks(api: Api) -> int:
    """Return the number of tasks in the API process's event loop, including this request's."""
    found = re.search(r"^nanovllm:asyncio_tasks\S* (\d+)$", api.http.get("/metrics").text, re.M)
    assert found
    return int(found[1])


def test_bodies_that_lie(limited) -> None:
    short = len(DATA) - 4
    for raw, expected in (
        (post(short) + DATA[:short], [400]),  # the JSON is cut off
        (post(short) + DATA + get(b""), [400, 400]),  # not followed by a request
        (post("12x") + DATA, [400]),
        (post(-5) + DATA, [400]),
        (post(None) + b"zz\r\n" + DATA, [400]),
        (post(None) + b"5\r\nhello!!!", [400]),
        (post(None, "Content-Length: 4\r\n") + DATA, [400]),
        (post(None) + b"0\r\n" + b"t: v\r\n" * 200, [431]),
        (post(None) + b"0\r\nt: " + b"v" * 400_000, [431]),
        (post(None) + b"1;" + b"x" * 400_000, [431]),
    ):
        with connected(limited) as sock:
            sock.sendall(raw)
            data = answers(sock, len(expected))
        assert statuses(data) == expected, (raw[:200], data)
    with connected(limited) as sock:  # the client leaves before its body is complete
        sock.sendall(post(5000) + DATA)
    assert limited.chat("all is well").status_code == 200
    assert "Traceback" not in limited.log()


def test_an_endless_chunked_body_is_refused_and_ended(limited) -> None:
    begun = time.monotonic()
    with connected(limited) as sock:
        sock.sendall(post(None))
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while time.monotonic() - begun < 30:
                sock.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert time.monotonic() - begun < 20
    assert resident(limited.process.pid) < 400 << 20


def test_what_was_asked_before_rubbish_is_answered(limited) -> None:
    with connected(limited) as sock:
        sock.sendall(post() + DATA)
        limited.engine.step_s = 0.05
        sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        data = received(sock)
    limited.engine.reset()
    assert statuses(data) == [200, 400] and b'"content":"hello"' in data


def test_an_offer_to_speak_otherwise_is_not_taken(limited) -> None:
    """An upgrade is refused if a body follows, which the parser would skip, and else ignored."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAA\r\n"
    for more in (offer, offer.replace("h2c", "websocket")):
        with connected(limited) as sock:
            sock.sendall(post(more=more) + DATA + b"anything else")
            data = received(sock)
        assert statuses(data) == [400] and b"leave out the header Upgrade" in data
        with connected(limited) as sock:
            sock.sendall(get(more.encode()) + b"anything else")
            assert statuses(received(sock)) == [200]
    with connected(limited) as sock:
        sock.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 1000)
        assert statuses(received(sock)) == [400]


def old(limited: Api, request: bytes) -> tuple[int, bytes, bytes]:
    """Return status, headers and body of a response to HTTP/1.0, which ends with the connection."""
    with connected(limited) as sock:
        sock.sendall(request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1))
        data = received(sock)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    return statuses(head)[0], head, rest


@pytest.mark.parametrize("more", ["", "Connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks(limited, more) -> None:
    """HTTP/1.0 clients, such as ab and nginx towards its upstreams, get no chunks."""
    asked = json.dumps(body("hello there", stream=True, n=2)).encode()
    status, _, rest = old(limited, post(len(asked), more) + asked)
    events = parsed_events(rest.decode())
    assert status == 200 and events[-1] == "[DONE]"
    assert [content(events, index) for index in (0, 1)] == ["hello there"] * 2
    for request, wanted in (
        (post(more=more) + DATA, 200),
        (post(2, more) + b"{}", 400),
        (get(more.encode()), 200),
        (get(b"").replace(b"/health", b"/nothing"), 401),
    ):
        status, head, rest = old(limited, request)
        assert status == wanted and json.loads(rest)
        assert f"content-length: {len(rest)}\r\n".encode() in head + b"\r\n"
    status, _, rest = old(limited, get(more.encode()).replace(b"GET", b"HEAD"))
    assert (status, rest) == (200, b"")
    eventually(lambda: limited.engine.running == {})


def test_connections_that_come_and_go_at_once(limited) -> None:
    pid = limited.process.pid
    before = len(os.listdir(f"/proc/{pid}/fd"))

    def rush() -> None:
        for at in range(100):
            with connected(limited) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sock.sendall((post() + DATA)[: at * 3])

    threads = [threading.Thread(target=rush) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before + 1)
    eventually(lambda: limited.engine.running == {})
    assert "Traceback" not in limited.log()


def test_statuses_are_counted(limited) -> None:
    text = limited.http.get("/metrics").text
    for path, status in (("other", 431), ("other", 408), (CHAT, 200), ("/health", 200)):
        assert f'path="{path}",status="{status}"}}' in text
