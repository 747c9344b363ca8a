"""Clients that do not read are disconnected and do not affect others."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.server.serving import Api, body, eventually, serving

CHAT = "/v1/chat/completions"
READ_S = 1.0


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Iterator[Api]:
    with serving(
        tmp_path_factory.mktemp("slow"),
        "server.max_unread_bytes=100000",
        f"server.body_timeout_s={READ_S}",
    ) as api:
        yield api


@pytest.fixture
def api(limited: Api) -> Api:
    limited.engine.reset()
    return limited


def asking(api: Api, *, room: int = 4096, **more: object) -> socket.socket:
    """Return a connection that has sent a request and has a receive buffer of `room` bytes."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", httpx.URL(api.url).port))
    raw = json.dumps(body("x", ignore_eos=True, n=16, **more)).encode()
    named = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    sock.sendall(f"POST {CHAT} HTTP/1.1\r\n{named}\r\n\r\n".encode() + raw)
    return sock


def num_dropped(api: Api) -> float:
    text = api.http.get("/metrics").text
    found = re.search(r"^nanovllm:dropped_slow_readers_total{.*} (\d+)$", text, re.MULTILINE)
    assert found
    return int(found[1])


def test_a_stream_that_nobody_reads_is_dropped(api) -> None:
    """A stream that is not read is dropped while the engine is still generating."""
    before = num_dropped(api)
    api.engine.step_s = 0.002
    with asking(api, stream=True, logprobs=True, top_logprobs=20) as sock:
        eventually(lambda: len(api.engine.generates) == 16)
        eventually(lambda: num_dropped(api) == before + 1)
        eventually(lambda: api.engine.running == {})
        data = b""
        with pytest.raises(ConnectionResetError):
            while part := sock.recv(65536):
                data += part
        assert data.startswith(b"HTTP/1.1 200") and not data.endswith(b"0\r\n\r\n")
    eventually(lambda: "finish=abort" in api.log())
    assert "dropped a slow reader unread=" in api.log()
    assert api.chat("others go on").status_code == 200


def test_a_request_behind_it_does_not_save_it(api) -> None:
    """A stream is dropped at the limit of unread bytes, even if a request is queued after it."""
    before = num_dropped(api)
    api.engine.step_s = 0.02
    with asking(api, stream=True, logprobs=True, top_logprobs=20) as sock:
        eventually(lambda: len(api.engine.generates) == 16)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: num_dropped(api) == before + 1)
        eventually(lambda: api.engine.running == {})
    assert int(re.findall(r"dropped a slow reader unread=(\d+)", api.log())[-1]) < 700_000


def test_a_stream_that_is_read_now_and_then_is_not(api) -> None:
    """A stream that is read slowly survives, since its unread bytes stay below the limit."""
    before = num_dropped(api)
    api.engine.step_s = 0.002
    with asking(api, stream=True) as sock:
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(20_000)
    assert data.count(b"data: ") > 16 * 400 and len(data) > 1_000_000
    assert num_dropped(api) == before


def test_a_finished_answer_must_be_read_in_time(api) -> None:
    before = num_dropped(api)
    with asking(api, logprobs=True, top_logprobs=20) as sock:
        eventually(lambda: len(api.engine.generates) == 16)
        eventually(lambda: num_dropped(api) == before + 1)
        with pytest.raises(ConnectionResetError):
            while sock.recv(65536):
                pass


def test_a_finished_answer_may_be_large_where_it_is_read(api) -> None:
    before = num_dropped(api)
    with asking(api, room=200_000, logprobs=True, top_logprobs=20) as sock:
        data = b""
        while not data.endswith(b'"chat.completion"}'):
            data += sock.recv(65536)
    assert len(data) > 4_000_000
    assert len(json.loads(data.partition(b"\r\n\r\n")[2])["choices"]) == 16
    assert num_dropped(api) == before
