"""Messages over a Unix socket: frames of a little-endian u32 length and one msgpack message.

The module has framing and both ends: a blocking one for the engine process and an asyncio one for
API processes. It does not interpret messages.

Decision: a stream socket and these few lines replace a message library. A dead peer is an immediate
end of file; with heartbeats it would be a guess after seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from nanovllm.wire import FromEngine, ToEngine

T = TypeVar("T")
HEADER = struct.Struct("<I")
READ_BYTES = 256 * 1024
RETRY_S = 0.05
CHECK_EVERY_S = 1.0  # interval of checks that a listener's socket file still exists


class Frames(Generic[T]):
    """Incremental decoder of a byte stream, split at any position, into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decode = decoder.decode
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[T]:
        self._buffer += data
        messages: list[T] = []
        at = 0
        with memoryview(self._buffer) as view:
            while at + HEADER.size <= len(view):
                begin = at + HEADER.size
                end = begin + HEADER.unpack_from(view, at)[0]
                if end > len(view):
                    break
                messages.append(self._decode(view[begin:end]))
                at = end
        del self._buffer[:at]
        return messages


def frame(encoder: msgspec.msgpack.Encoder, message: object) -> bytes:
    body = encoder.encode(message)
    return HEADER.pack(len(body)) + body


class BlockingConnection:
    """The engine's end of one connection. One thread may send while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._frames = Frames(msgspec.msgpack.Decoder[ToEngine](ToEngine))
        self._chunk = memoryview(bytearray(READ_BYTES))
        self._received: deque[ToEngine] = deque()

    def send(self, message: FromEngine) -> None:
        """Send a message. Block while the peer's buffer is full; raise OSError if it is gone."""
        self._sock.sendall(frame(self._encoder, message))

    def recv(self) -> ToEngine | None:
        """Return the next message, blocking; None if the connection has ended."""
        while not self._received:
            try:
                count = self._sock.recv_into(self._chunk)
            except OSError:  # reset by the peer, or closed by another thread of this process
                return None
            if not count:
                return None
            self._received.extend(self._frames.feed(self._chunk[:count]))
        return self._received.popleft()

    def close(self) -> None:
        """Close the connection. A thread blocked in `recv` wakes up and returns None."""
        with contextlib.suppress(OSError):  # the peer closed first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def make_private(folder: str) -> None:
    """Create the folder of a server's sockets if it does not exist.

    Raise OSError if it belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if os.stat(folder).st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "belongs to another user", folder)


class Listener:
    """The engine's listening socket. API processes may connect before `accept` is called.

    A cleaner of /tmp may remove the socket's file. It is then bound again within CHECK_EVERY_S, so
    that API processes started later find the engine.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._sock = self._bound()

    def _bound(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(self._path)
            sock.listen()
        except OSError:
            sock.close()
            raise
        sock.settimeout(CHECK_EVERY_S)
        return sock

    def accept(self) -> BlockingConnection:
        """Return the next connection, blocking.

        Raise OSError if no file descriptor is free, or if the listener is closed.
        """
        while True:
            try:
                return BlockingConnection(self._sock.accept()[0])
            except TimeoutError:
                if not os.path.exists(self._path):
                    self._bind_again()

    def _bind_again(self) -> None:
        with contextlib.suppress(OSError):  # retried after the next timeout
            make_private(os.path.dirname(self._path))
            old, self._sock = self._sock, self._bound()
            old.close()

    def close(self) -> None:
        self._sock.close()


class AsyncConnection(asyncio.Protocol):
    """An API process's end of a connection. Messages of one read reach one callback call."""

    def __init__(
        self, received: Callable[[list[FromEngine]], None], lost: Callable[[], None]
    ) -> None:
        self._received = received
        self._lost = lost
        self._encoder = msgspec.msgpack.Encoder()
        self._frames = Frames(msgspec.msgpack.Decoder[FromEngine](FromEngine))
        self._transport: asyncio.Transport

    @classmethod
    async def connect(
        cls, path: str, received: Callable[[list[FromEngine]], None], lost: Callable[[], None]
    ) -> AsyncConnection:
        """Wait until an engine listens at `path`, and return the connection.

        The process that started the engine watches whether it lives. An engine that ends during
        the attempt resets the connection; it is retried, since a successor may use the same path.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                return (await loop.create_unix_connection(lambda: cls(received, lost), path))[1]
            except (FileNotFoundError, ConnectionError):
                await asyncio.sleep(RETRY_S)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self._received(self._frames.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def send(self, message: ToEngine) -> None:
        self._transport.write(frame(self._encoder, message))

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        """Close the connection without sending buffered data."""
        self._transport.abort()
