"""P's end of the socket backend: serves pages of leases to authenticated peers.

Decision: pages are read from the device when D requests them, not staged in host memory as chunks
finish. Staging would only save the copy from the device: 0.05 ms of a page of 1 MB, whose MAC takes
0.8 ms on either end. It would also copy all pages that D has cached or declines. Copies between
devices need no staging at all.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from nanovllm.config import ConfigError
from nanovllm.transfer.leases import Lease, Leases
from nanovllm.transfer.messages import (
    MAX_REQUEST,
    CheckLease,
    EndedLeases,
    EngineCard,
    FinishLease,
    Heartbeat,
    LeaseAnswer,
    PageBytes,
    ReadPages,
    ReadyPages,
    ToP,
    WaitForPages,
    decode,
    encode,
)
from nanovllm.transfer.sealed import PeerError, SealedConnection

MAX_CONNECTIONS = 64
MOST_SHARES = 64  # ranks of D
IDLE_S = 30.0  # D sends a heartbeat every 5 s
RETRY_S = 0.2  # delay after a failed accept
log = logging.getLogger("transfer")


def check_share(share: int, shares: int) -> None:
    """Raise PeerError unless D may have a rank like this."""
    if not 0 <= share < shares <= MOST_SHARES:
        raise PeerError("protocol", f"share {share} of {shares} was wanted")


def no_parts(_: int) -> int:
    """Return 0, the number of parts of a state in a model without states."""
    return 0


class PageSource(NamedTuple):
    """Access of the server to the engine. The functions are called from threads of the server."""

    page: Callable[[int, int, int], memoryview]  # bytes of a page, for a share of several
    release: Callable[[Lease], None]  # a reader has finished: return the pages to the pool
    # Parts of a checkpoint, joined.
    state: Callable[[int, range, int, int], memoryview] | None = None
    state_parts: Callable[[int], int] = no_parts  # their number on each of several ranks of D


class PageServer:
    """Listening socket with a thread per connection. A peer's fault ends its connection only.

    `counts` has the numbers of pages sent by socket, of bytes sent or copied from this device, and
    of refused connections by kind. Parts of states count as pages.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        secret: str,
        card: EngineCard,
        *,
        leases: Leases,
        source: PageSource,
        silence_s: float = 5.0,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._secret = secret
        self._card = card
        self._leases = leases
        self._source = source
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self._listener = socket.create_server(listen, family=family, backlog=16)
        threading.Thread(target=self._accept_all, name="transfer-accept", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """The address that is listened on, with the port that was chosen for port 0."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def close(self) -> None:
        """End all connections. Leases stay, and end by their expiry."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept_all(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(RETRY_S)  # a connection that ended already, or no free file descriptor
                continue
            host = address[0]
            with self._lock:
                if self._listener.fileno() < 0:  # closed just after the accept
                    sock.close()
                    return
                is_full = len(self._connections) >= MAX_CONNECTIONS
                if not is_full:
                    self._connections.add(sock)
            if is_full:
                self._refuse(host, "full", f"there are {MAX_CONNECTIONS} connections")
                sock.close()
                continue
            args = (sock, host)
            threading.Thread(target=self._serve, args=args, name="transfer", daemon=True).start()

    def _serve(self, sock: socket.socket, host: str) -> None:
        try:
            with sock:
                connection = SealedConnection.accept(sock, self._secret)
                self._answer_all(connection)
        except PeerError as error:
            self._refuse(host, error.kind, str(error))
        except OSError as error:  # the peer left, or is silent
            log.debug("the transfer connection of %s ended: %s", host, error)
        except Exception:
            log.exception("the transfer connection of %s failed", host)
        finally:
            with self._lock:
                self._connections.discard(sock)

    def _refuse(self, host: str, kind: str, reason: str) -> None:
        with self._lock:
            self.counts[f"refused_{kind}"] += 1
            is_first = self.counts[f"refused_{kind}"] == 1
        if is_first:
            text = "a transfer connection of %s was refused: %s; further ones are not logged"
            log.warning(text, host, reason)

    def _answer_all(self, connection: SealedConnection) -> None:
        decoder = msgspec.msgpack.Decoder[ToP](ToP)
        buffer = memoryview(bytearray(MAX_REQUEST))
        connection.wait_at_most(self._silence_s)
        connection.send(encode(self._card))
        while True:
            connection.wait_at_most(IDLE_S)
            message = decode(connection.receive(buffer), decoder)[0]
            connection.wait_at_most(self._silence_s)
            try:
                self._answer(connection, message)
            except ConfigError as error:  # ranks of D cannot share the model in this way
                raise PeerError("protocol", f"a share was wanted: {error}") from None

    def _answer(self, connection: SealedConnection, message: ToP) -> None:
        match message:
            case WaitForPages(generation, count, most_ms):
                ready = self._leases.wait_for(generation, count, most_ms / 1000)
                ended = EndedLeases([generation])
                connection.send(encode(ended if ready is None else ReadyPages(generation, ready)))
            case ReadPages():
                self._send_pages(connection, message)
            case CheckLease(generation):
                held = self._leases.is_held(generation)
                connection.send(encode(LeaseAnswer(generation, held)))
            case Heartbeat(generations):
                connection.send(encode(EndedLeases(self._leases.extend(generations))))
            case FinishLease(generation, end, share, shares, copied_bytes):
                check_share(share, shares)
                if copied_bytes and self._leases.takes_report(generation, share):
                    self._count(0, copied_bytes)
                lease = self._leases.finish(generation, end, share, shares)
                if lease is not None:
                    self._source.release(lease)

    def _send_pages(self, connection: SealedConnection, request: ReadPages) -> None:
        generation, first, last = request.generation, request.first, request.first + request.count
        lease = self._leases.lease_of(generation)
        if lease is None:
            connection.send(encode(EndedLeases([generation])))
            return
        num_pages = len(lease.pages)
        check_share(request.share, request.shares)
        count = num_pages
        if lease.state >= 0:
            count += self._source.state_parts(request.shares)
        if not 0 <= first < last <= count:
            raise PeerError("protocol", f"pages {first} to {last} of {count} were wanted")
        if min(last, num_pages) > lease.num_ready:
            raise PeerError("protocol", f"page {last} was wanted before it was computed")
        for place, data in enumerate(self._data_of(lease, request), first):
            connection.send(encode(PageBytes(generation, place)), data)
            self._count(1, len(data))

    def _data_of(self, lease: Lease, request: ReadPages) -> Iterator[memoryview]:
        """Yield the bytes of each requested page, then of each part of the state after them."""
        source, share, shares = self._source, request.share, request.shares
        last, num_pages = request.first + request.count, len(lease.pages)
        try:
            for page in lease.pages[request.first : last]:
                yield source.page(page, share, shares)
            if last > num_pages:
                assert source.state is not None
                parts = range(max(request.first - num_pages, 0), last - num_pages)
                data = source.state(lease.state, parts, share, shares)
                size = len(data) // len(parts)
                yield from (data[at * size : (at + 1) * size] for at in range(len(parts)))
        except OSError as error:
            raise PeerError("rank", f"a share could not be read: {error}") from None

    def _count(self, num_pages: int, num_bytes: int) -> None:
        with self._lock:
            self.counts["pages"] += num_pages
            self.counts["bytes"] += num_bytes
