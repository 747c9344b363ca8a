"""What lets pages of other origins use the API from a browser (the Fetch standard's CORS protocol).

Before a request that such a page could not send without scripts, the browser asks by OPTIONS; and
it shows the page an answer only if that names the page's origin, or all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from nanovllm.server.asgi import Message, Receive, Scope, Send, Writer, header

ANY = "*"
ALLOWED_S = 600  # for which a browser need not ask again
METHODS = b"GET, HEAD, POST, OPTIONS"
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class Cors:
    """An application whose answers `origins` may read: `https://chat.example`, or `*` for all."""

    def __init__(self, app: Asgi, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope, b"origin")
        if origin is None or not self._origins & {ANY, origin.decode("latin-1")}:
            await self._app(scope, receive, send)
            return
        own = [(b"access-control-allow-origin", b"*" if ANY in self._origins else origin)]
        if ANY not in self._origins:
            own.append((b"vary", b"origin"))  # a cache keeps answers for others apart
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
