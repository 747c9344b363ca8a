"""The web page: static files of the package, served with a strict Content-Security-Policy.

The files are public and need no API key. The page prompts for the key that its requests need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from nanovllm.config import Server
from nanovllm.hosts import is_loopback
from nanovllm.server.asgi import Header, Scope, Writer, header

FOLDER = Path(__file__).with_name("page")
KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# No other origin, nothing inline, and no embedding in a frame.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: list[Header] = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # the browser revalidates each time
]
Handler = Callable[[Scope, Writer], Awaitable[None]]


def is_shown(server: Server) -> bool:
    """Return True if the page and /debug/steps are served. `auto`: only on a loopback address."""
    return is_loopback(server.host) if server.page == "auto" else server.page


def page_files() -> dict[str, Handler]:
    """Return handlers by path: "/" for index.html, "/page/NAME" for each other file."""
    files = [path for path in FOLDER.iterdir() if path.suffix in KINDS]
    known = {f"/page/{p.name}": partial(_answer, KINDS[p.suffix], p.read_bytes()) for p in files}
    return {"/": known.pop("/page/index.html"), **known}


async def _answer(kind: bytes, body: bytes, scope: Scope, writer: Writer) -> None:
    tag = b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()
    headers = [*HEADERS, (b"etag", tag)]
    if tag in (header(scope, b"if-none-match") or b""):
        writer.respond(304, kind, b"", headers)
    else:
        writer.respond(200, kind, body, headers)
