"""Answers that pages of other origins may read in a browser (the Fetch standard's CORS protocol).

Metrics, steps and the page itself are for its own origin, for pages of this machine and for
origins that are named: `*` opens the API alone.

Before a request that a page could not send without scripts, the browser sends OPTIONS; and it
shows the page an answer only if that names the page's origin, or all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from nanovllm.hosts import ANY
from nanovllm.server.access import Access
from nanovllm.server.asgi import Header, Message, Receive, Scope, Send, Writer, header
from nanovllm.server.errors import ApiError

ALLOWED_S = 600  # for which a browser need not send OPTIONS again
METHODS = b"GET, HEAD, POST, OPTIONS"
NETWORK = b"access-control-request-private-network"  # sent by pages of the internet
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class Cors:
    """An application whose answers may be read by the pages that `access` lets read them."""

    def __init__(self, app: Asgi, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = self._reader(scope)
        if reader is None:
            await self._app(scope, receive, send)
            return
        own = [(b"access-control-allow-origin", reader)]
        own += [] if reader == ANY.encode() else [(b"vary", b"origin")]  # for a cache's sake
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
        """Return the origin whose pages may read the answer; the application refuses others."""
        try:
            self._access.check(scope)
        except ApiError:
            return None
        return self._access.readable_by(scope)


def _allowed(scope: Scope) -> list[Header]:
    """Return the headers by which an answer to OPTIONS permits the request that is to follow."""
    wanted = header(scope, b"access-control-request-headers") or b""
    allowed = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", b"%d" % ALLOWED_S),
    ]
    if header(scope, NETWORK) == b"true":
        allowed.append((b"access-control-allow-private-network", b"true"))
    return allowed
