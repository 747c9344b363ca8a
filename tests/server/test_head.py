"""Heads that RFC 9112 and RFC 9110 require to be refused, as bytes, and valid ones."""

from __future__ import annotations

import json
import re
import socket
import time

import httpx
import pytest

from nanovllm.server.errors import ApiError
from nanovllm.server.head import (
    after_complete_requests,
    check_head,
    expects_continue,
    host_of_target,
)
from tests.server.serving import Api, body

CHAT = "/v1/chat/completions"
DATA = json.dumps(body("hello", max_tokens=2)).encode()
HOST = "Host: localhost"
TYPE = "Content-Type: application/json"
LENGTH = f"Content-Length: {len(DATA)}"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA)


def sent(api: Api, *parts_of_raw: bytes) -> bytes:
    """Return all bytes until the server closes. The last request must cause it to.

    Parts are sent in segments of their own.
    """
    with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port), timeout=30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for nth, part in enumerate(parts_of_raw):
            time.sleep(0.01 * (nth > 0))
            sock.sendall(part)
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def post(*lines: str, version: str = "1.1", data: bytes = DATA) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"POST {CHAT} HTTP/{version}", TYPE, *lines))
    return head.encode() + b"\r\n" + data


def get(*lines: str, first: str = "GET /health HTTP/1.1") -> bytes:
    return "".join(f"{line}\r\n" for line in (first, *lines, "")).encode()


CLOSE = "Connection: close"
CHUNKED = "Transfer-Encoding: chunked"
REFUSED = {
    "no host": (get(), 400),
    "no host, but a body": (post(LENGTH), 400),
    "two hosts": (get(HOST, HOST), 400),
    "two hosts in two ways": (get(HOST, "hOsT: evil.test"), 400),
    "two hosts of HTTP/1.0": (get(HOST, HOST, first="GET /health HTTP/1.0"), 400),
    "a list of hosts": (get("Host: localhost, evil.test"), 400),
    "a host with a space": (get("Host: local host"), 400),
    "a host with a path": (get("Host: localhost/x"), 400),
    "a host with a user": (get("Host: user@localhost"), 400),
    "a host with a port that is none": (get("Host: localhost:http"), 400),
    "a host in Latin-1": (get("Host: b\xfccher"), 400),
    "an address without brackets": (get("Host: ::1"), 400),
    "a simple request of HTTP/0.9": (b"GET /health\r\n", 400),
    "HTTP/0.9 with an end": (b"GET /health\r\n\r\n", 400),
    "HTTP/0.9 by its name": (get(HOST, first="GET /health HTTP/0.9"), 400),
    "HTTP/2.0": (get(HOST, first="GET /health HTTP/2.0"), 505),
    "HTTP/2 at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/1.2": (get(HOST, first="GET /health HTTP/1.2"), 400),
    "gzip, chunked": (post(HOST, "Transfer-Encoding: gzip, chunked", data=CHUNKS), 501),
    "GZIP,Chunked": (post(HOST, "Transfer-Encoding: GZIP,Chunked", data=CHUNKS), 501),
    "gzip and chunked": (post(HOST, "Transfer-Encoding: gzip", CHUNKED, data=CHUNKS), 501),
    "a parameter": (post(HOST, "Transfer-Encoding: x;a=b, chunked", data=CHUNKS), 501),
    "chunked, gzip": (post(HOST, "Transfer-Encoding: chunked, gzip", data=CHUNKS), 400),
    "chunked twice": (post(HOST, CHUNKED, CHUNKED, data=CHUNKS), 400),
    "chunked, chunked": (post(HOST, "Transfer-Encoding: chunked, chunked", data=CHUNKS), 400),
    "gzip alone": (post(HOST, "Transfer-Encoding: gzip", data=CHUNKS), 400),
    "identity": (post(HOST, "Transfer-Encoding: identity", data=CHUNKS), 400),
    "xchunked": (post(HOST, "Transfer-Encoding: xchunked", data=CHUNKS), 400),
    "an empty coding": (post(HOST, "Transfer-Encoding: ", data=CHUNKS), 400),
    "chunks of HTTP/1.0": (post(HOST, CHUNKED, version="1.0", data=CHUNKS), 400),
    "a length and chunks": (post(HOST, LENGTH, CHUNKED, data=CHUNKS), 400),
    "chunks and a length": (post(HOST, CHUNKED, LENGTH, data=CHUNKS), 400),
    "two lengths": (post(HOST, LENGTH, "Content-Length: 3"), 400),
    "a list of lengths": (post(HOST, f"{LENGTH}, {len(DATA)}"), 400),
    "a signed length": (post(HOST, f"Content-Length: +{len(DATA)}"), 400),
    "an expectation": (post(HOST, LENGTH, "Expect: the-unexpected"), 417),
    "one more expectation": (post(HOST, LENGTH, "Expect: 100-continue, x"), 417),
    "two lines": (post(HOST, LENGTH, "Expect: 100-continue", "Expect: x=y"), 417),
    "an expectation without a body": (get(HOST, "Expect: 200-ok"), 417),
    "a method that is not known": (get(HOST, first="FOO /v1/models HTTP/1.1"), 501),
    "a method in small letters": (get(HOST, first="get /health HTTP/1.1"), 501),
    "a longer method": (post(HOST, LENGTH).replace(b"POST", b"POSTS", 1), 501),
    "an unknown method of HTTP/3.0": (get(HOST, first="FOO /health HTTP/3.0"), 400),
    "a method with a colon": (get(HOST, first="F:O /health HTTP/1.1"), 400),
    "the first bytes of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "a space before the colon": (get(HOST, "a : b"), 400),
    "a folded header": (get(HOST, "a: b", " c"), 400),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_closed_at_once(api, name) -> None:
    raw, status = REFUSED[name]
    answer = sent(api, raw + get(HOST, first="GET /smuggled HTTP/1.1"))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer
    assert api.engine.generates == []
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_method_that_is_not_known_is_named(api) -> None:
    answer = sent(api, get(HOST, first="FOO /v1/models HTTP/1.1"))
    head, _, data = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 501 Not Implemented\r\n")
    assert json.loads(data)["error"] == {
        "message": "the method FOO is not supported; use GET or POST",
        "type": "server_error",
        "param": None,
        "code": "method_not_allowed",
    }
    two = sent(api, get(HOST) + get(HOST, first="FOO / HTTP/1.1"))  # the first one is answered
    assert re.findall(rb"HTTP/1\.1 (\d+) ", two) == [b"200", b"501"]
    assert b"the method FOO is not supported" in two


CUT = {
    "after a letter": [b"F", b"OO /x HTTP/1.1\r\n"],
    "in the method": [b"FO", b"O /x HTTP/1.1\r\n"],
    "letter by letter": [bytes([byte]) for byte in b"FOO /x HTTP/1.1\r\n"],
    "after a known method": [b"GET", b"S /x HTTP/1.0\r\n"],
    "in the address": [b"FOO /", b"x HTTP/1.1\r\n"],
    "before the end": [b"FOO /x HTTP/1.1\r", b"\n"],
    "after an empty line": [b"\r\n", b"FOO /x HTTP/1.1\r\n"],
    "with an empty line": [b"\r\nFOO /x HTTP/1.1\r\n"],
}


@pytest.mark.parametrize("name", CUT)
def test_an_unknown_method_is_refused_however_its_line_is_cut(api, name) -> None:
    answer = sent(api, *CUT[name])
    assert answer.startswith(b"HTTP/1.1 501 ") and answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("cut", [0, 2, 4, 6])
def test_an_unknown_method_is_refused_alike_after_an_early_answer(api, cut) -> None:
    """The first request is answered before its body is complete."""
    data = b"abcd" + get(HOST, first="FOO /x HTTP/1.1")
    first = post(HOST, "Content-Length: 4").replace(b"/v1/chat/completions", b"/v1/nothing", 1)
    head, _, _ = first.partition(b"\r\n\r\n")
    answer = sent(api, head + b"\r\n\r\n", *filter(None, (data[:cut], data[cut:])))
    first, second = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
    assert (first, second) == (b"404", b"501"), answer


def test_the_rest_after_complete_requests() -> None:
    """A request in a body is not one, and an empty line belongs to the rest."""
    body_with_request = post(
        HOST, "Content-Length: 29", data=b"FOO / HTTP/1.1\r\nHost: x\r\n\r\nab"
    )
    before = get(HOST) + body_with_request + post(HOST, CHUNKED, data=CHUNKS) + get(HOST, CLOSE)
    for rest in (b"", b"F", b"FOO /x HTTP/1.1\r\n", b"\r\nFOO /", b"GET / HTTP/1.1\r\nHost"):
        assert after_complete_requests(before + rest) == rest
        assert after_complete_requests(rest) == rest


def test_a_line_that_cannot_become_valid_is_refused_at_once(api) -> None:
    for parts in ([b"FOO /x HTTP/3"], [b"FO", b"O /x HTP"], [b"F:"], [b"FOO  /"], [b"F" * 33]):
        assert sent(api, *parts).startswith(b"HTTP/1.1 400 "), parts


PASSED = {
    "a host without a port": get(HOST, CLOSE),
    "a host in capitals": get("HOST: LOCALHOST:80", CLOSE),
    "white space around a host": get("Host: \t localhost \t", CLOSE),
    "HTTP/1.0 without a host": get(first="GET /health HTTP/1.0"),
    "HTTP/1.0 with an expectation": post(LENGTH, "Expect: the-unexpected", version="1.0"),
    "chunks": post(HOST, CHUNKED, CLOSE, data=CHUNKS),
    "chunks in capitals": post(HOST, "transfer-encoding: CHUNKED", CLOSE, data=CHUNKS),
    "codings that an answer may have": post(HOST, LENGTH, "TE: gzip, chunked", CLOSE),
    "the whole address": get(HOST, CLOSE, first="GET http://127.0.0.1:1/health?a=b HTTP/1.1"),
}


@pytest.mark.parametrize("name", PASSED)
def test_passed(api, name) -> None:
    assert sent(api, PASSED[name]).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("word", ["100-continue", "100-Continue", "100-continue, 100-continue"])
def test_a_client_that_waits_for_a_word_gets_it(api, word) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port), timeout=30) as sock:
        sock.sendall(post(HOST, LENGTH, f"Expect: {word}", data=b""))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(DATA)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_waits_gets_a_refusal_instead(api) -> None:
    """A refusal closes the connection, since the next bytes may be the body or another request."""
    head = post(HOST, LENGTH, "Expect: 100-continue", data=b"")
    answer = sent(api, head.replace(CHAT.encode(), b"/nothing"))
    assert answer.startswith(b"HTTP/1.1 404 ") and b"connection: close" in answer
    assert b"100 Continue" not in answer


def test_a_client_of_http_1_0_does_not_wait(api) -> None:
    answer = sent(api, post(LENGTH, "Expect: 100-continue", version="1.0"))
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_line_without_a_version_is_refused_before_anything_follows(api) -> None:
    for parts in ([b"GET /health\r\n"], [b"GET /health", b"\r\n"], [b"GET /he", b"alth\r", b"\n"]):
        with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port), timeout=30) as sock:
            for part in parts:
                sock.sendall(part)
                time.sleep(0.05)
            assert sock.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_head_may_come_byte_by_byte(api) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port), timeout=30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"\r\n" + get(HOST, CLOSE):
            sock.sendall(bytes([byte]))
            time.sleep(0.002)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_parts_of_a_head() -> None:
    assert host_of_target(b"http://a.example:81/x") == b"a.example:81"
    assert host_of_target(b"http://[::1]/x") == b"[::1]"
    assert host_of_target(b"//a.example/x") is None and host_of_target(b"*") is None
    assert expects_continue("1.1", [(b"expect", b"100-Continue")])
    assert not expects_continue("1.0", [(b"expect", b"100-continue")])
    check_head("1.1", [(b"host", b"")])
    with pytest.raises(ApiError, match="exactly one header Host, not 2"):
        check_head("1.0", [(b"host", b"a"), (b"host", b"a")])
