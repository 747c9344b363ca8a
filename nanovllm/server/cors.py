"""What lets pages of other origins use the API from a browser (the Fetch standard's CORS protocol).

What only looks at the server (metrics, its steps, its page) is for its own page and for origins
that are named: `*` opens the API alone.

Before a request that such a page could not send without scripts, the browser asks by OPTIONS; and
it shows the page an answer only if that names the page's origin, or all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from nanovllm.server.asgi import Message, Receive, Scope, Send, Writer, header

ANY = "*"
OPEN = ("/v1/", "/health", "/ready", "/version")  # what `*` is about
ALLOWED_S = 600  # for which a browser need not ask again
METHODS = b"GET, HEAD, POST, OPTIONS"
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class Cors:
    """An application whose answers `origins` may read: `https://chat.example`, or `*` for all who
    use the API."""

    def __init__(self, app: Asgi, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope, b"origin")
        is_open = ANY in self._origins and scope["path"].startswith(OPEN)
        if origin is None or not (is_open or origin.decode("latin-1") in self._origins):
            await self._app(scope, receive, send)
            return
        own = [(b"access-control-allow-origin", b"*" if is_open else origin)]
        own += [] if is_open else [(b"vary", b"origin")]  # a cache keeps answers for others apart
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
            wanted = header(scope, b"access-control-request-headers") or b""
            own += [
                (b"access-control-allow-methods", METHODS),
                (b"access-control-allow-headers", wanted),
                (b"access-control-max-age", b"%d" % ALLOWED_S),
            ]
            Writer(scope, send).respond(200, b"text/plain", b"", own)
            return
        own.append((b"access-control-expose-headers", b"x-request-id"))

        def with_origin(message: Message) -> Coroutine[Any, Any, None]:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *own]}
            return send(message)

        await self._app(scope, receive, with_origin)
