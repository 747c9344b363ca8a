"""CORS headers (the Fetch standard), which let pages of other origins read answers in a browser.

Metrics, steps and the page itself are open to the server's own origin, to pages of this machine and
to origins allowed by name. An allowed origin of `*` opens the API only.

Before a request that a form could not send, such as one with JSON, the browser sends OPTIONS. The
page may read an answer only if its headers name the page's origin, or `*`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from nanovllm.hosts import ANY
from nanovllm.server.access import Access
from nanovllm.server.asgi import Header, Message, Receive, Scope, Send, Writer, header
from nanovllm.server.errors import ApiError

ALLOWED_S = 600  # seconds for which a browser may cache the answer to OPTIONS
METHODS = b"GET, HEAD, POST, OPTIONS"
NETWORK = b"access-control-request-private-network"  # sent by pages of the internet
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class Cors:
    """ASGI application that adds CORS headers for the pages that `access` admits."""

    def __init__(self, app: Asgi, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = self._reader(scope)
        if reader is None:
            await self._app(scope, receive, send)
            return
        own = [(b"access-control-allow-origin", reader)]
        own += [] if reader == ANY.encode() else [(b"vary", b"origin")]  # caches depend on it
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
            Writer(scope, send).respond(200, b"text/plain", b"", [*own, *_allowed(scope)])
            return
        own.append((b"access-control-expose-headers", b"x-request-id"))

        def with_origin(message: Message) -> Coroutine[Any, Any, None]:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *own]}
            return send(message)

        await self._app(scope, receive, with_origin)

    def _reader(self, scope: Scope) -> bytes | None:
        """Return the origin that may read the answer. The application refuses the others."""
        reader = self._access.readable_by(scope)
        if reader is not None:  # few requests come from a page of another origin
            try:
                self._access.check(scope)
            except ApiError:
                return None
        return reader


def _allowed(scope: Scope) -> list[Header]:
    """Return the headers that permit the request announced by OPTIONS."""
    headers = header(scope, b"access-control-request-headers") or b""
    allowed = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", headers),
        (b"access-control-max-age", b"%d" % ALLOWED_S),
    ]
    if header(scope, NETWORK) == b"true":
        allowed.append((b"access-control-allow-private-network", b"true"))
    return allowed
