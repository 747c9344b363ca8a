"""Shutdown: all requests are answered, and a second signal ends the server at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nanovllm.server.main import SAME_SIGNAL_S
from tests.server.serving import Api, body, eventually, parsed_events, serving

CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def asking(api: Api, raw: bytes, length: int | None = None) -> Iterator[socket.socket]:
    """Yield a connection that has sent a head and the part `raw` of its body."""
    length = length or len(raw)
    named = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}"
    head = f"POST {CHAT} HTTP/1.1\r\n{named}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port), timeout=30) as sock:
        sock.sendall(head.encode() + raw)
        yield sock


def answer(sock: socket.socket) -> tuple[int, bytes]:
    """Return status and body of the bytes until the server closes."""
    data = b""
    while part := sock.recv(65536):
        data += part
    head, _, content = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


def drained(api: Api) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{api.url}/ready", trust_env=False).status_code == 503
    return True


def test_a_body_that_is_still_read_is_answered(tmp_path) -> None:
    with serving(tmp_path, "server.shutdown_s=20") as api:
        raw = json.dumps(body("late words")).encode()
        with asking(api, raw[:20], len(raw)) as sock:
            assert api.chat("first").status_code == 200
            api.process.terminate()
            eventually(lambda: drained(api))
            sock.sendall(raw[20:])
            status, content = answer(sock)
        assert status == 200 and b'"content":"late words"' in content
        api.process.join(20)
        assert api.process.exitcode == 0


def test_a_large_prompt_that_is_still_tokenised_is_answered(tmp_path) -> None:
    """The subprocess for large bodies starts with this request, which takes about a second."""
    with serving(tmp_path, "server.shutdown_s=20") as api:
        raw = json.dumps(body("large words", padding="x" * 200_000)).encode()
        with asking(api, raw) as sock:
            eventually(lambda: "nanovllm-large" in names(api))
            assert api.engine.generates == []
            api.process.terminate()
            status, content = answer(sock)
        assert status == 200 and b'"content":"large words"' in content


def names(api: Api) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = path.read_text().rpartition(") ")
            if int(tail.split()[1]) == api.process.pid:
                found.append(head.partition("(")[2])
    return found


def test_what_is_not_read_in_time_is_told_so(tmp_path) -> None:
    with serving(tmp_path, "server.shutdown_s=0.4") as api:
        raw = json.dumps(body()).encode()
        large = json.dumps(body("x" * 200_000)).encode()
        with (
            asking(api, raw[:20], len(raw)) as sock,
            asking(api, large[:150_000], len(large)) as other,
            socket.create_connection(("127.0.0.1", httpx.URL(api.url).port), timeout=30) as half,
        ):
            half.sendall(f"POST {CHAT} HTTP/1.1\r\nHost".encode())
            assert api.chat("first").status_code == 200
            api.process.terminate()
            for one in (sock, other, half):
                status, content = answer(one)
                assert (status, json.loads(content)["error"]["code"]) == (503, "shutting_down")
        api.process.join(20)
        assert api.process.exitcode == 0
        assert "Traceback" not in api.log()


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Handle SIGINT here: children inherit a parent's ignored signals, as background jobs do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tmp_path, kind) -> None:
    with serving(tmp_path, "server.shutdown_s=60") as api:
        api.engine.is_stuck = True
        with (
            asking(api, json.dumps(body("x", stream=True)).encode()) as running,
            asking(api, b'{"mess', 500) as sock,
        ):
            eventually(lambda: len(api.engine.running) == 1)
            os.kill(api.process.pid or 0, signal.SIGTERM)
            eventually(lambda: drained(api))  # a busy machine handles it late
            time.sleep(SAME_SIGNAL_S + 0.1)
            assert api.process.is_alive()
            begun = time.monotonic()
            os.kill(api.process.pid or 0, kind)
            for one in (running, sock):
                status, content = answer(one)
                assert (status, json.loads(content)["error"]["code"]) == (503, "shutting_down")
            api.process.join(20)
        assert api.process.exitcode == 0
        assert time.monotonic() - begun < 30


def test_the_same_signal_from_two_sides_is_one(tmp_path) -> None:
    """A signal forwarded by the supervisor does not count as a second one."""
    with serving(tmp_path, "server.shutdown_s=20") as api:
        api.engine.step_s = 0.02
        with api.http.stream("POST", CHAT, json=body("word " * 30, stream=True)) as response:
            lines = response.iter_lines()
            first = next(lines)
            for _ in range(3):
                api.process.terminate()
            text = "\n".join([first, *lines, ""])
        assert parsed_events(text)[-2]["choices"][0]["finish_reason"] == "stop"
