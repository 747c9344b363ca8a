"""Pages of P's other ranks. Each rank has its share of a page, and rank 0 alone listens for D.

Rank 0 reads the share of another rank through a socket in a private folder of this host. Its
threads do this when D requests the share, so no step waits for it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import TypeAlias

import msgspec

from nanovllm.transfer.tickets import derived_key

SCOPE = b"nanovllm transfer share 1\0"  # keeps other uses of the secret apart
Span: TypeAlias = tuple[int, int]  # first byte in a rank's state, number of bytes
# Number of a page, and None; or number of a checkpoint, and spans of its state.
decode = msgspec.msgpack.Decoder(tuple[int, list[Span] | None]).decode
RETRY_S, CONNECT_S = 0.05, 10.0  # the other rank listens before rank 0 serves, unless it has ended
log = logging.getLogger("transfer")


class ShareServer:
    """Server of this rank's share, for rank 0.

    `page` returns the bytes of a page. `state` returns those of spans of a checkpoint, joined.
    """

    def __init__(
        self,
        path: str,
        secret: str,
        page: Callable[[int], memoryview],
        state: Callable[[int, Sequence[Span]], memoryview],
    ) -> None:
        self._page, self._state, self._is_closed = page, state, False
        self._path = path
        self._listener = Listener(path, "AF_UNIX", authkey=key_of(secret))
        os.chmod(path, 0o600)
        threading.Thread(target=self._accept_all, name="transfer-ranks", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. Those that are open end with rank 0's end of them."""
        self._is_closed = True
        # Closing a socket does not end an accept() that another thread waits in. A connection does.
        with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self._path)
        self._listener.close()

    def _accept_all(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except Exception as error:
                if self._is_closed:
                    return
                log.warning("a connection for this rank's pages failed: %s", error)
                time.sleep(RETRY_S)
                continue
            args = (connection,)
            threading.Thread(
                target=self._serve, args=args, name="transfer-share", daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError, msgspec.DecodeError):
            while True:
                number, spans = decode(connection.recv_bytes())
                data = self._page(number) if spans is None else self._state(number, spans)
                connection.send_bytes(data)


class OtherRank:
    """Another rank's share of pages, on rank 0. Methods may be called from any thread."""

    def __init__(self, path: str, secret: str) -> None:
        self._path, self._key = path, key_of(secret)
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def page(self, page: int) -> memoryview:
        """Return the bytes of a page. Raise OSError if the rank has ended."""
        return self._read(page, None)

    def state(self, checkpoint: int, spans: Sequence[Span]) -> memoryview:
        """Return the bytes of spans of a checkpoint, joined, by one request. Raise likewise."""
        return self._read(checkpoint, spans)

    def _read(self, number: int, spans: Sequence[Span] | None) -> memoryview:
        with self._lock:
            if self._connection is None:
                self._connection = connected(self._path, self._key)
            try:
                self._connection.send_bytes(msgspec.msgpack.encode((number, spans)))
                return memoryview(self._connection.recv_bytes())
            except (EOFError, OSError) as error:
                self._connection.close()
                self._connection = None
                raise OSError(f"the rank of {self._path} has ended: {error!r}") from error


def connected(path: str, key: bytes) -> Connection:
    """Return a connection. Raise OSError after CONNECT_S."""
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            return Client(path, "AF_UNIX", authkey=key)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
        time.sleep(RETRY_S)


def key_of(secret: str) -> bytes:
    """Return the key of connections between the ranks of one engine."""
    return derived_key(secret, SCOPE)
