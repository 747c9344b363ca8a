"""The port of P: strangers and faulty peers get nothing, and no connection outlives the server."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from nanovllm.config import ConfigError
from nanovllm.transfer.messages import FinishLease, ReadPages, encode
from nanovllm.transfer.sealed import SealedConnection
from tests.transfer.test_page_client import (
    PAGE_BYTES,
    SECRET,
    PrefillEngine,
    eventually,
    fetch,
    p,
    reader,
)

__all__ = ["p"]  # a fixture


def test_random_bytes_on_the_port(p: PrefillEngine, caplog: pytest.LogCaptureFixture) -> None:
    sent = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(50_000), b"nvkvxfr1" + os.urandom(500)]
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        for data in sent * 3:
            with (
                socket.create_connection(p.server.address, 5) as sock,
                contextlib.suppress(OSError),
            ):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1000):
                    pass
        assert fetch(d, p.ticket(1, 2))[0] is True
    eventually(lambda: not p.server._connections)
    assert p.server.counts["refused_stranger"] == 6 and p.server.counts["refused_secret"] == 3
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 2, warned


@contextlib.contextmanager
def connected_to(p: PrefillEngine) -> Iterator[tuple[SealedConnection, memoryview]]:
    """Connect as a decode server that has read P's first message. Yield a buffer, too."""
    with socket.create_connection(p.server.address, 5) as sock:
        connection = SealedConnection.connect(sock, SECRET)
        buffer = memoryview(bytearray(PAGE_BYTES + 1000))
        connection.wait_at_most(5)
        connection.receive(buffer)
        yield connection, buffer


def test_a_peer_cannot_read_beyond_its_lease(p: PrefillEngine) -> None:
    wanted = [(0, 3), (-1, 1), (1, 2), (0, 0), (0, 2**40)]
    for first, count in wanted:
        with connected_to(p) as (connection, buffer):
            generation = p.ticket(1, 2).generation
            connection.send(encode(ReadPages(generation, first, count)))
            with pytest.raises(OSError):
                connection.receive(buffer)
    eventually(lambda: p.server.counts["refused_protocol"] == len(wanted))
    assert p.server.counts["pages"] == 0


def test_a_peer_cannot_read_parts_or_shares_that_p_has_not(p: PrefillEngine) -> None:
    """A state has four parts for one rank of D, and two for each of two. Three cannot share it."""

    def state_parts(shares: int) -> int:
        if 4 % shares:
            raise ConfigError(f"{shares} ranks cannot share it")
        return 4 // shares

    def state(checkpoint: int, parts: range, share: int, shares: int) -> memoryview:
        return memoryview(bytes(n for part in parts for n in (checkpoint, part, share, shares)))

    p.server._source = p.server._source._replace(state=state, state_parts=state_parts)
    ticket = p.ticket(1, 2)
    generation = p.leases.grant("r", ticket.pages, 9)
    forged = [(2, 3, 0, 2), (5, 2, 0, 1), (2, 1, 2, 2), (2, 1, 0, 3), (0, 1, 0, 65), (2, 1, -1, 2)]
    for first, count, share, shares in forged:
        with connected_to(p) as (connection, buffer):
            connection.send(encode(ReadPages(generation, 3, 1, share=1, shares=2)))
            assert bytes(connection.receive(buffer)).endswith(bytes([9, 1, 1, 2]))
            connection.send(encode(ReadPages(generation, first, count, share=share, shares=shares)))
            with pytest.raises(OSError):
                connection.receive(buffer)
    eventually(lambda: p.server.counts["refused_protocol"] == len(forged))
    assert p.server.counts["pages"] == len(forged) and p.server.counts["bytes"] == 4 * len(forged)


def test_a_peer_cannot_report_impossible_numbers_of_bytes(p: PrefillEngine) -> None:
    for copied_bytes in (500, -1, 1 << 45):
        with connected_to(p) as (connection, _):
            generation = p.ticket(1, 2).generation
            connection.send(encode(FinishLease(generation, "done", copied_bytes=copied_bytes)))
    eventually(lambda: p.server.counts["refused_protocol"] == 2 and len(p.released) == 1)
    assert p.server.counts["bytes"] == 500


def test_copied_bytes_count_once_for_each_share_of_a_lease(p: PrefillEngine) -> None:
    """A lease that was never granted, and one that has ended, count nothing."""
    generation = p.ticket(1, 2).generation
    reports = [(generation + 7, 0, 1000), (generation, 0, 100), (generation, 0, 20)]
    reports += [(generation, 1, 3), (generation, 1, 4000)]
    with connected_to(p) as (connection, _):
        for number, share, count in reports:
            message = FinishLease(number, "done", share=share, shares=2, copied_bytes=count)
            connection.send(encode(message))
        eventually(lambda: p.leases.counts["late"] == 2)
    assert p.server.counts["bytes"] == 103 and p.leases.counts["done"] == 1


class LateLock:
    """A lock that the accepting thread gets only after `going` has been set."""

    def __init__(self) -> None:
        self.lock, self.going = threading.Lock(), threading.Event()
        self.is_wanted = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name == "transfer-accept":
            self.is_wanted.set()
            self.going.wait(30)
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_connection_that_is_accepted_during_close() -> None:
    """Its socket is closed at once, and not after the idle limit. D would wait for it."""
    server, lock = PrefillEngine().server, LateLock()
    server._lock = lock  # type: ignore[assignment]
    with socket.create_connection(server.address, 2) as sock:
        assert lock.is_wanted.wait(30)
        server.close()
        lock.going.set()
        assert sock.recv(1) == b""
