"""Refusals sent before a large body was read, to clients that read them only after sending it."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from nanovllm.server.connection import LINGER_S, MOST_LINGER_BYTES, MOST_LINGER_S
from tests.server.serving import Api, serving
from tests.times import least

CHAT = "/v1/chat/completions"
LARGE = 24 << 20  # more than the sockets of both sides hold
PART = b" " * 65536


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[Api]:
    settings = "server.api_key=sesame", "server.max_body_bytes=1000000"
    with serving(tmp_path_factory.mktemp("small"), *settings) as api:
        yield api


@contextlib.contextmanager
def connected(api: Api) -> Iterator[socket.socket]:
    address = ("127.0.0.1", httpx.URL(api.url).port)
    with socket.create_connection(address, timeout=20) as sock:
        yield sock


HEADERS = {
    "host": "localhost", "authorization": "Bearer sesame", "content-type": "application/json",
    "content-length": str(LARGE), "connection": "close",
}  # fmt: skip


def head(path: str = CHAT, method: str = "POST", **more: str | None) -> bytes:
    headers = HEADERS | {name.replace("_", "-"): value for name, value in more.items()}
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


def received(sock: socket.socket) -> bytes:
    """Return all bytes until the server closes; a reset is an error."""
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


EARLY = {
    "a wrong key": (head(authorization="Bearer wrong"), 401),
    "a foreign page": (head(origin="https://evil.test"), 403),
    "no such route": (head("/nothing"), 404),
    "no such method": (head("/v1/models"), 405),
    "too large": (head(), 413),
    "too large, of a client that would stay": (head(connection=None), 413),
    "no JSON": (head(content_type="text/plain"), 415),
    "compressed": (head(content_encoding="gzip"), 400),
    "an expectation": (head(expect="x"), 417),
    "no host": (head(host=None), 400),
    "many headers": (head(**{f"x{at}": "y" for at in range(200)}), 431),
    "an answer": (head("/health", "GET"), 200),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_client_that_sends_all_before_it_reads_gets_its_answer(small, name) -> None:
    raw, status = EARLY[name]
    with connected(small) as sock:
        sock.sendall(raw)
        for _ in range(LARGE // len(PART)):
            sock.sendall(PART)
        time.sleep(0.2)
        answer = received(sock)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in answer and answer.count(b"HTTP/1.1 ") == 1
    length = re.search(rb"content-length: (\d+)", answer)
    assert length and len(answer.partition(b"\r\n\r\n")[2]) == int(length[1])


def test_chunks_as_well(small) -> None:
    with connected(small) as sock:
        sock.sendall(head(content_length=None, transfer_encoding="chunked"))
        for _ in range(LARGE // len(PART)):
            sock.sendall(b"10000\r\n" + PART + b"\r\n")
        sock.sendall(b"0\r\n\r\n")
        assert received(sock).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_stays_may_go_on_after_its_body(small) -> None:
    raw = head("/nothing", connection=None)
    with connected(small) as sock:
        for _ in range(2):
            sock.sendall(raw)
            for _ in range(LARGE // len(PART)):
                sock.sendall(PART)
            answer = sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 404 ") and b"connection: close" not in answer
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert received(sock).startswith(b"HTTP/1.1 200 ")


def test_the_answer_comes_before_the_body_and_the_connection_ends_soon_after_it(small) -> None:
    def answer_s(sock: socket.socket) -> float:
        begun = time.monotonic()
        sock.sendall(head(content_type="text/plain") + PART)
        assert received(sock).startswith(b"HTTP/1.1 415 ")  # the writing side is closed
        return time.monotonic() - begun

    def another_s() -> float:
        with connected(small) as sock:
            return answer_s(sock)

    assert least(another_s, LINGER_S / 2) < LINGER_S / 2
    with connected(small) as sock:
        answer_s(sock)
        for _ in range(3):  # the reading side is still open
            sock.sendall(PART)
            time.sleep(LINGER_S / 4)
        time.sleep(LINGER_S + 0.5)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(20):
                sock.send(b" ")
                time.sleep(0.05)


def test_clients_that_send_on_and_on_are_cut_off(small) -> None:
    """Clients that keep sending slowly are disconnected after MOST_LINGER_S."""
    begun = time.monotonic()
    with connected(small) as closing, connected(small) as keeping:
        closing.sendall(head("/nothing", connection="close"))
        keeping.sendall(head("/nothing"))
        sending, lasted_s = {closing, keeping}, []
        while sending and time.monotonic() - begun < 3 * MOST_LINGER_S:
            for sock in [*sending]:
                try:
                    sock.sendall(b" " * 100)
                except (ConnectionResetError, BrokenPipeError):
                    sending.remove(sock)
                    lasted_s.append(time.monotonic() - begun)
            time.sleep(0.25)
    assert len(lasted_s) == 2
    assert all(MOST_LINGER_S - 0.5 < one < MOST_LINGER_S + 8 for one in lasted_s), lasted_s


def test_so_is_one_that_sends_fast(small) -> None:
    num_sent = 0
    with connected(small) as sock:
        sock.sendall(head(content_length=str(1 << 40)))
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while num_sent < 2 * MOST_LINGER_BYTES:
                num_sent += sock.send(PART)
    assert num_sent > 100 << 20
    assert small.http.get("/health").status_code == 200


def test_httpx_gets_the_refusal(small) -> None:
    sent = {"authorization": "Bearer sesame", "connection": "close"}
    body = {"messages": [{"role": "user", "content": "x" * LARGE}]}
    answer = small.http.post(CHAT, json=body, headers=sent)
    assert answer.status_code == 413 and "server.max_body_bytes" in answer.text
    assert small.http.get("/health").status_code == 200
