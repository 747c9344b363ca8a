"""Raw requests that a server without an API key must refuse, with the right statuses.

They are web pages of other origins, names that were made to resolve to this machine, and heads that
RFC 9112 forbids. `localhost` stands for the server.
"""

from __future__ import annotations

import json

CHAT = "/v1/chat/completions"
LARGE_BYTES = 33 * 2**20
BODY = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}).encode()
JSON = "Content-Type: application/json"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def request(line: str, *headers: str, body: bytes = b"", host: str | None = "localhost") -> bytes:
    """Return a request that closes its connection. Without a `host` it has no header Host."""
    named = [] if host is None else [f"Host: {host}"]
    if body and not any(one.startswith(("Content-Length", "Transfer-Enc")) for one in headers):
        named.append(f"Content-Length: {len(body)}")
    lines = [line, *named, *headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


def post(*headers: str, body: bytes = BODY, host: str | None = "localhost") -> bytes:
    return request(f"POST {CHAT} HTTP/1.1", *headers, body=body, host=host)


PAGES: list[tuple[bytes, int]] = [
    (post("Origin: https://evil.example", JSON), 403),
    (post("Origin: https://evil.example", "Content-Type: text/plain"), 403),
    (post("Origin: null", JSON), 403),
    (post(JSON, host="rebind.example"), 403),
    (post("Origin: http://rebind.example", JSON, host="rebind.example"), 403),
    (post("Content-Type: text/plain"), 415),
    (post("Content-Type: application/x-www-form-urlencoded"), 415),
    (post(), 415),
    *(
        (request(f"GET {path} HTTP/1.1", host="rebind.example"), 403)
        for path in ("/metrics", "/debug/steps", "/v1/models", "/")
    ),
    (
        request(
            f"OPTIONS {CHAT} HTTP/1.1",
            "Origin: https://evil.example",
            "Access-Control-Request-Method: POST",
        ),
        403,
    ),
]
HEADS: list[tuple[bytes, int]] = [
    (post(JSON, host=None), 400),
    (post(JSON, "Host: localhost"), 400),
    (post(JSON, host="local host"), 400),
    (b"GET /health\r\n", 400),
    (request("GET /health HTTP/0.9"), 400),
    (request("GET /health HTTP/2.0"), 505),
    (post(JSON, "Transfer-Encoding: gzip, chunked", body=CHUNKS), 501),
    (post(JSON, "Transfer-Encoding: chunked, gzip", body=CHUNKS), 400),
    (post(JSON, "Transfer-Encoding: chunked", "Content-Length: 5", body=CHUNKS), 400),
    (post(JSON, "Expect: the-unexpected"), 417),
]
EARLY: list[tuple[bytes, int]] = [  # refused before the body has been read
    (post("Content-Type: text/plain", body=b" " * LARGE_BYTES), 415),
    (post(JSON, body=b" " * LARGE_BYTES), 413),
]
