"""Raw ASGI: reading a body, sending a response, and writing to a stream from plain callbacks.

Knows nothing about routes or chat.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any

from nanovllm.server.errors import ApiError

Scope = dict[str, Any]
Message = dict[str, Any]
Header = tuple[bytes, bytes]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]

JSON = b"application/json"


class ClientLeftError(Exception):
    """The client closed the connection."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first of that name, which must be in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Raises ApiError (413) as soon as the body is known to be too large, or ClientLeftError."""
    announced = header(scope, b"content-length") or b"0"
    num_expected = int(announced) if announced.isdigit() else 0
    parts: list[bytes] = []
    num_read = 0
    while max(num_read, num_expected) <= max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        parts.append(message.get("body", b""))
        num_read += len(parts[-1])
        if not message.get("more_body", False) and num_read <= max_bytes:
            return b"".join(parts)
    text = f"the body must be at most {max_bytes} bytes (server.max_body_bytes)"
    raise ApiError(413, text, code="body_too_large")


async def respond(
    send: Send, status: int, kind: bytes, body: bytes, more: Iterable[Header] = ()
) -> None:
    await send(start(status, kind, [*more, (b"content-length", b"%d" % len(body))]))
    await send({"type": "http.response.body", "body": body})


def start(status: int, kind: bytes, more: Iterable[Header]) -> Message:
    headers = [(b"content-type", kind), *more]
    return {"type": "http.response.start", "status": status, "headers": headers}


class Writer:
    """Sends from callbacks, in order.

    Decision: `send` is stepped by hand. It finishes at once unless the client reads slowly, so a
    write costs neither a task nor a turn of the event loop. Only when it has to wait does a task
    take over, and later writes queue behind it.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queue: list[Message] = []
        self._task: asyncio.Task[None] | None = None

    def put(self, message: Message) -> None:
        if self._task is not None:
            self._queue.append(message)
            return
        sending = self._send(message)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        self._task = asyncio.get_running_loop().create_task(self._catch_up(sending, waits_for))

    async def _catch_up(self, sending: Coroutine[Any, Any, None], waits_for: object) -> None:
        await _continued(sending, waits_for)
        while self._queue:
            queue, self._queue = self._queue, []
            for message in queue:
                await self._send(message)
        self._task = None


@types.coroutine
def _continued(sending: Coroutine[Any, Any, None], waits_for: object) -> Generator[Any, Any, None]:
    """The rest of a coroutine that ran up to its first wait."""
    while True:
        yield waits_for
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
