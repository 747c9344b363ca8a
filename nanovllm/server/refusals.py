"""Log lines of refused requests: the client's address, the method, the path and the status.

Every client that reaches the port can cause them, so their rate is limited to BURST lines at once
and one a second after that. The next line has the number of those left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from nanovllm.log import fields
from nanovllm.server.asgi import Scope
from nanovllm.server.errors import ApiError

log = logging.getLogger("server")
BURST = 20
PER_S = 1.0
PATH_CHARS = 200


class RefusalLog:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._room = float(BURST)
        self._filled = now()
        self._left_out = 0

    def request(self, scope: Scope, error: ApiError, request_id: str) -> None:
        """Log a request that was parsed and refused.

        The path is logged as sent, with its escapes (`%0A`). The query is not logged, since it may
        hold secrets.
        """
        path = scope["raw_path"].decode("latin-1")[:PATH_CHARS]
        where = {"method": scope["method"], "path": escaped(path), "id": request_id}
        why = error.message if error.status == 403 else ""
        self._line("refused", scope["client"], error, where=where, why=why)

    def connection(self, client: tuple[str, int] | None, error: ApiError) -> None:
        """Log a connection that sent no complete request."""
        self._line("connection", client, error, where={}, why="")

    def _line(
        self,
        event: str,
        client: tuple[str, int] | None,
        error: ApiError,
        *,
        where: dict[str, str],
        why: str,
    ) -> None:
        now = self._now()
        self._room = min(float(BURST), self._room + (now - self._filled) * PER_S)
        self._filled = now
        if self._room < 1.0:
            self._left_out += 1
            return
        self._room -= 1.0
        shown = fields(
            address=address(client),
            **where,
            status=error.status,
            error=error.code,
            left_out=self._left_out or None,
        )
        self._left_out = 0
        log.info("%s %s%s", event, shown, f": {why}" if why else "")


def address(client: tuple[str, int] | None) -> str:
    if client is None:  # the address is unknown
        return "local"
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def escaped(text: str) -> str:
    """Return the text with escapes for spaces, control characters and non-ASCII characters."""
    return "".join(c if "!" <= c <= "~" else ascii(c)[1:-1].replace(" ", r"\x20") for c in text)
