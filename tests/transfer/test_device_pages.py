"""Pages are copied between devices, here by a fake one; every fault is a failed fetch, soon.

The messages and the leases are real.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from nanovllm.transfer.device_pages import Arrivals, DeviceMemory, MemoryPart, this_process
from nanovllm.transfer.messages import EngineCard, ToD
from nanovllm.transfer.page_client import PageClient
from nanovllm.transfer.sealed import PeerError
from nanovllm.transfer.tickets import Ticket
from tests.transfer.test_page_client import (
    LIMITS,
    PAGE_BYTES,
    SECRET,
    PrefillEngine,
    eventually,
    result,
)

ROWS = 20
OWN = DeviceMemory("host", "pids", [MemoryPart(b"", 0, 2, 7, PAGE_BYTES // 2)])


def offered(handle: bytes, **changed: Any) -> DeviceMemory:
    part = msgspec.structs.replace(OWN.parts[0], handle=handle, rows=ROWS)
    return msgspec.structs.replace(OWN, **{"parts": [part], **changed})


class Reader:
    """A device with pages by number, to which those of `engines` are copied, by their handles."""

    def __init__(self, *engines: PrefillEngine, is_required: bool = True) -> None:
        self.own = OWN
        self.is_required = is_required
        self.usable = threading.Event()
        self.usable.set()
        self.pools = {engine.engine.encode(): engine.pool for engine in engines}
        self.pages: dict[int, bytes] = {}
        self.opened: list[bytes] = []
        self.closed: list[bytes] = []
        self.ready: list[object] = []
        self.before: Callable[[], object] = lambda: None
        self.seconds = 1e-6

    def open(self, memory: DeviceMemory) -> Opened:
        handle = memory.parts[0].handle
        if handle not in self.pools:
            raise PeerError("memory", "its memory cannot be opened: none")
        self.opened.append(handle)
        return Opened(self, handle)


class Opened:
    def __init__(self, reader: Reader, handle: bytes) -> None:
        self.reader, self.handle = reader, handle
        self.is_closed = False

    def copy(self, pages: Sequence[tuple[int, int]], ready: object) -> float:
        reader = self.reader
        assert not self.is_closed
        reader.ready.append(ready)
        reader.before()
        for source, target in pages:
            reader.pages[target] = reader.pools[self.handle][source]
        return reader.seconds

    def link_rate(self) -> float:
        return 1e9

    def close(self) -> None:
        self.is_closed = True
        self.reader.closed.append(self.handle)


def offering(engine: str = "p1", port: int = 0, **changed: Any) -> PrefillEngine:
    """Return P that offers its memory, or what is in `changed`."""
    p = PrefillEngine(engine, port)
    has_own = "memory" in changed
    fields = {name: value for name, value in changed.items() if name != "num_ranks"}
    memory = changed["memory"] if has_own else offered(engine.encode(), **fields)
    memories = [] if memory is None else [memory]
    num_ranks = changed.get("num_ranks", 1)
    p.server._card = msgspec.structs.replace(
        p.server._card, memories=memories * num_ranks, num_ranks=num_ranks
    )
    return p


@pytest.fixture
def p() -> Iterator[PrefillEngine]:
    engine = offering()
    yield engine
    engine.going.set()
    engine.server.close()


@contextlib.contextmanager
def client_of(memory: Reader, p: PrefillEngine) -> Iterator[PageClient]:
    limits = msgspec.structs.replace(LIMITS, memory=memory)
    client = PageClient([p.server.address], SECRET, limits, lambda: None)
    eventually(lambda: client.reads_from(p.engine))
    yield client
    client.close()


class Started:
    """A fetch of all pages of a ticket to pages 1, 2, ... of the device."""

    def __init__(self, client: PageClient, ticket: Ticket) -> None:
        targets = range(1, 1 + len(ticket.pages))
        self.arrivals = Arrivals({bytes([page]): page for page in targets}, ready="event")
        self.buffers = [bytearray(PAGE_BYTES) for _ in targets]
        views = [memoryview(buffer) for buffer in self.buffers]
        self.number = client.fetch(ticket, views, arrivals=self.arrivals, targets=targets)


def fetch(client: PageClient, ticket: Ticket) -> tuple[bool, Arrivals]:
    started = Started(client, ticket)
    ok = result(client, started.number)
    assert not any(map(any, started.buffers)), "a host slot was written"
    return ok, started.arrivals


def test_pages_go_to_the_device_and_the_lease_ends(
    p: PrefillEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader = Reader(p)
    with client_of(reader, p) as d:
        ok, arrivals = fetch(d, p.ticket(3, 1, 2))
        assert ok and arrivals.filled == {1, 2, 3} and reader.ready == ["event"]
        assert reader.pages == {1: p.pool[3], 2: p.pool[1], 3: p.pool[2]}
        eventually(lambda: len(p.released) == 1)
        assert p.leases.counts["done"] == 1 and p.server.counts["pages"] == 0
        assert p.server.counts["bytes"] == 3 * PAGE_BYTES  # as D has reported
        assert fetch(d, p.ticket(4))[0] is True
    eventually(lambda: reader.closed == [b"p1"])
    (said,) = (r for r in caplog.records if "first copy of" in r.getMessage())
    assert "first copy of 0.1 MB ran at 60.00 GB/s, the link at 1.00" in said.getMessage()
    assert said.levelno == logging.INFO


def test_a_slow_first_transfer_is_one_warning(
    p: PrefillEngine, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader(p)
    reader.seconds = 1.0
    with client_of(reader, p) as d:
        assert fetch(d, p.ticket(3))[0] and fetch(d, p.ticket(4))[0]
    (said,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "ran at 0.00 GB/s, the link at 1.00" in said.getMessage()


REFUSED = [
    ({"boot": "another"}, "it runs on another host"),
    ({"pids": "another"}, "it runs in another PID namespace: share one"),
    ({"parts": OWN.parts * 2}, "its cache has other tensors"),
    ({"memory": None}, "it offers no memory for cuda_ipc"),
    ({"num_ranks": 2}, "its parallel.tp is 2, and 1 here; cuda_ipc needs equal ones: set one numb"),
    ({"memory": offered(b"unknown")}, "its memory cannot be opened: none"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_pages_come_by_socket_where_memory_cannot_be_opened(
    changed: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    p = offering(**changed)
    reader = Reader(p, is_required=False)
    with client_of(reader, p) as d:
        started = Started(d, p.ticket(3, 1))
        assert result(d, started.number) and not started.arrivals.filled and not reader.pages
        assert started.buffers == [p.pool[3], p.pool[1]]
    assert said in caplog.text and not [r for r in caplog.records if r.levelno > logging.INFO]
    p.server.close()


def test_a_card_of_another_release_offers_no_memory() -> None:
    """It has one memory in another field, which is not that of each rank."""
    card = dict(type="engine", engine="p1", layout=b"l", identity=b"m", page_bytes=1, memory=OWN)
    decoder = msgspec.msgpack.Decoder[ToD](ToD)
    assert decoder.decode(msgspec.msgpack.encode(card)) == EngineCard("p1", b"l", b"m", 1)


def test_required_memory_that_cannot_be_opened(caplog: pytest.LogCaptureFixture) -> None:
    for changed, said in REFUSED:
        caplog.clear()
        p = offering(**changed)
        limits = msgspec.structs.replace(LIMITS, memory=Reader(p))
        d = PageClient([p.server.address], SECRET, limits, lambda: None)
        eventually(lambda text=said: text in caplog.text)
        assert not d.reads_from("p1") and len(caplog.records) == 1
        d.close()
        p.server.close()


def test_a_lease_that_ends_during_the_copy(p: PrefillEngine) -> None:
    reader = Reader(p)

    def expire() -> None:
        p.now += 1000
        p.released += p.leases.scan()

    with client_of(reader, p) as d:
        reader.before = expire
        ok, arrivals = fetch(d, p.ticket(1, 2))
        assert not ok and not arrivals.filled and reader.pages  # which are not used
        reader.before = lambda: None
        assert fetch(d, p.ticket(1))[0] is True


def test_p_dies_during_the_copy_and_its_handle_is_not_used_again(p: PrefillEngine) -> None:
    """Its memory is closed. The next start has another handle, and an old ticket is refused."""
    again = offering("p2", 0)
    reader, port = Reader(p, again), p.server.address[1]
    again.server.close()
    with client_of(reader, p) as d:
        reader.before = p.server.close
        began = time.monotonic()
        ok, arrivals = fetch(d, p.ticket(1, 2))
        assert not ok and not arrivals.filled and time.monotonic() - began < 15
        eventually(lambda: reader.closed == [b"p1"])
        reader.before = lambda: None
        p.engine, again = p.engine, offering("p2", port)
        eventually(lambda: d.reads_from("p2"))
        reader.pages.clear()
        assert fetch(d, p.ticket(5))[0] is False and not reader.pages
        assert fetch(d, again.ticket(5))[0] is True and reader.pages == {1: again.pool[5]}
        assert reader.opened == [b"p1", b"p2"]
    eventually(lambda: reader.closed == [b"p1", b"p2"])
    again.server.close()


def test_p_is_frozen(p: PrefillEngine) -> None:
    """The copy succeeds without P, but the answer about the lease is missing."""
    reader = Reader(p)
    real = p.leases.is_held
    p.leases.is_held = lambda generation: p.going.wait(30) and real(generation)  # type: ignore
    with client_of(reader, p) as d:
        p.going.clear()
        ok, arrivals = fetch(d, p.ticket(1))
        assert not ok and not arrivals.filled and reader.pages
        eventually(lambda: reader.closed == [b"p1"])
        p.going.set()
        eventually(lambda: d.reads_from("p1"))
        assert fetch(d, p.ticket(1))[0] is True and reader.opened == [b"p1", b"p1"]


def test_cancel_waits_for_the_copy(p: PrefillEngine) -> None:
    """The pages are given back, so nothing may write to them."""
    reader, begun, going = Reader(p), threading.Event(), threading.Event()
    reader.before = lambda: begun.set() or going.wait(30)
    with client_of(reader, p) as d:
        started = Started(d, p.ticket(1, 2))
        assert begun.wait(30)
        cancelled = threading.Thread(target=d.cancel, args=(started.number,))
        cancelled.start()
        time.sleep(0.05)
        assert cancelled.is_alive() and not reader.pages
        going.set()
        cancelled.join(30)
        assert not cancelled.is_alive() and len(reader.pages) == 2 and d.poll() == []
        eventually(lambda: p.leases.counts["not wanted"] == 1)
        assert not started.arrivals.filled and fetch(d, p.ticket(1))[0] is True


def test_a_long_ticket_is_copied_in_parts_with_heartbeats(
    p: PrefillEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.transfer.page_client.AT_ONCE", 2)
    reader = Reader(p)

    def slow() -> None:  # 6 parts take 42 s of P's clock
        p.now += 7
        time.sleep(0.06)

    with client_of(reader, p) as d:
        reader.before = slow
        ok, arrivals = fetch(d, p.ticket(*range(1, 13)))
        assert ok and len(arrivals.filled) == 12 and p.now == 42
        assert [reader.pages[1 + i] for i in range(12)] == p.pool[1:13]


def test_peers_are_connected_once_the_device_is_usable(p: PrefillEngine) -> None:
    """A call of CUDA by another thread would break the capture of a graph."""
    reader = Reader(p)
    reader.usable.clear()
    limits = msgspec.structs.replace(LIMITS, memory=reader)
    d = PageClient([p.server.address], SECRET, limits, lambda: None)
    time.sleep(0.1)
    assert not d.reads_from("p1") and not reader.opened
    reader.usable.set()
    eventually(lambda: d.reads_from("p1"))
    d.close()


def test_a_page_that_the_cache_does_not_have(
    p: PrefillEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading beyond the memory would end D's engine."""
    reader = Reader(p)
    for page in (0, -1, ROWS, 2**40):
        with client_of(reader, p) as d:
            assert fetch(d, p.ticket(1, page))[0] is False and not reader.pages
            assert "a ticket has a page that its cache does not have" in caplog.text
        caplog.clear()


def test_a_process_is_named_by_its_host_and_its_pids() -> None:
    boot, pids = this_process()
    assert len(boot) >= 1 and pids.startswith("pid:[") and this_process() == (boot, pids)
