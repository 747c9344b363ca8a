"""Pages are read while P computes the prompt: never before they are complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import replace

from nanovllm.transfer.device_pages import Arrivals
from nanovllm.transfer.leases import Leases
from nanovllm.transfer.messages import (
    MOST_WAIT_MS,
    ReadPages,
    ReadyPages,
    ToD,
    WaitForPages,
    decode,
    encode,
)
from nanovllm.transfer.tickets import Ticket
from tests.transfer.test_page_client import PAGE_BYTES, PrefillEngine, eventually, reader, result
from tests.transfer.test_page_server import connected_to

WAIT_S = MOST_WAIT_MS / 1000


@pytest.fixture
def p() -> Iterator[PrefillEngine]:
    engine = PrefillEngine()
    yield engine
    engine.server.close()


def incomplete(p: PrefillEngine, *pages: int, num_ready: int) -> Ticket:
    generation = p.leases.grant("r", pages, num_ready=num_ready)
    return replace(p.ticket(), pages=pages, generation=generation)


def blank(count: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE_BYTES)) for _ in range(count)]


# -- leases -------------------------------------------------------------------------------------


def test_a_lease_tells_how_many_pages_are_complete() -> None:
    leases = Leases()
    whole, begun = leases.grant("a", [1, 2]), leases.grant("b", [3, 4, 5], num_ready=1)
    assert leases.wait_for(whole, 2, 0) == 2
    assert [leases.wait_for(begun, count, 0) for count in (1, 2, 9)] == [1, 1, 1]
    leases.advance(begun, 3)
    assert leases.wait_for(begun, 3, 0) == 3
    assert leases.wait_for(99, 1, 0) is None
    leases.advance(99, 3)  # it has ended: nothing happens
    assert leases.counts == {"granted": 2}


def test_a_revoked_lease_ends_once() -> None:
    leases = Leases()
    generation = leases.grant("a", [1, 2], 7, num_ready=1)
    lease = leases.revoke(generation)
    assert lease is not None and (lease.pages, lease.state) == ((1, 2), 7)
    assert leases.revoke(generation) is None and not leases.is_held(generation)
    assert leases.finish(generation, "done") is None and leases.num_pages == 0
    assert leases.counts == {"granted": 1, "revoked": 1, "late": 1}


@pytest.mark.parametrize(("way", "found"), [("advance", 2), ("revoke", None), ("finish", None)])
def test_a_wait_ends_at_once(way: str, found: int | None) -> None:
    leases, found_by = Leases(), list[int | None]()
    generation = leases.grant("a", [1, 2], num_ready=0)
    thread = threading.Thread(target=lambda: found_by.append(leases.wait_for(generation, 2, 30)))
    thread.start()
    time.sleep(0.05)
    assert not found_by
    match way:
        case "advance":
            leases.advance(generation, 2)
        case "revoke":
            leases.revoke(generation)
        case _:
            leases.finish(generation, "not wanted")
    thread.join(20)
    assert found_by == [found]


# -- P ------------------------------------------------------------------------------------------


def test_p_sends_no_page_before_it_is_computed(p: PrefillEngine) -> None:
    generation = incomplete(p, 3, 4, 5, num_ready=1).generation
    with connected_to(p) as (connection, buffer):
        began = time.monotonic()
        connection.send(encode(WaitForPages(generation, 2)))
        found, _ = decode(connection.receive(buffer), msgspec.msgpack.Decoder[ToD](ToD))
        assert found == ReadyPages(generation, 1)
        assert WAIT_S <= time.monotonic() - began < 15
        connection.send(encode(ReadPages(generation, 0, 2)))
        with pytest.raises(OSError):
            connection.receive(buffer)
    eventually(lambda: p.server.counts["refused_protocol"] == 1)
    assert p.server.counts["pages"] == 0


def test_a_peer_cannot_hold_a_thread_of_p(p: PrefillEngine) -> None:
    for most_ms in (-1, MOST_WAIT_MS + 1):
        with connected_to(p) as (connection, buffer):
            connection.send(encode(WaitForPages(1, 1, most_ms)))
            with pytest.raises(OSError):
                connection.receive(buffer)
    eventually(lambda: p.server.counts["refused_protocol"] == 2)


# -- D ------------------------------------------------------------------------------------------


def test_pages_are_read_as_they_are_computed(p: PrefillEngine) -> None:
    """The time of the fetch leaves out the wait, which says nothing about the network."""
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        buffers, arrivals = blank(7), Arrivals({})
        ticket = incomplete(p, *range(1, 8), num_ready=1)
        began = time.monotonic()
        number = d.fetch(ticket, buffers, arrivals=arrivals)
        for ready in (1, 3, 7):
            p.leases.advance(ticket.generation, ready)
            eventually(lambda ready=ready: p.server.counts["pages"] == ready)
            time.sleep(3 * WAIT_S)
            assert p.server.counts["pages"] == ready
        assert result(d, number) is True
        assert [bytes(one) for one in buffers] == p.pool[1:8]
        ((num_bytes, seconds),) = d.reads
        assert num_bytes == 7 * PAGE_BYTES
        assert 0 < seconds < time.monotonic() - began - 6 * WAIT_S  # it waited for 3 in each pause
        assert arrivals.were_awaited
        whole = Arrivals({})
        assert result(d, d.fetch(p.ticket(1), blank(1), arrivals=whole)) is True
        assert not whole.were_awaited


def test_other_tickets_are_read_while_one_is_computed(p: PrefillEngine) -> None:
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        slow = [incomplete(p, 1, 2, num_ready=1), incomplete(p, 3, num_ready=0)]
        numbers = [d.fetch(ticket, blank(len(ticket.pages))) for ticket in slow]
        slow += [incomplete(p, page, num_ready=0) for page in range(10, 19)]
        numbers += [d.fetch(ticket, blank(1)) for ticket in slow[2:]]
        took_s = []
        for page in range(4, 10):
            buffers, began = blank(1), time.monotonic()
            assert result(d, d.fetch(p.ticket(page), buffers)) is True
            took_s.append(time.monotonic() - began)
            assert bytes(buffers[0]) == p.pool[page]
        assert min(took_s) < 2 * WAIT_S  # each waits for one round
        for number, ticket in zip(numbers[::-1], slow[::-1], strict=True):
            p.leases.advance(ticket.generation, len(ticket.pages))
            assert result(d, number) is True
        assert p.server.counts["pages"] == 18
        eventually(lambda: p.leases.counts["done"] == 17)


@pytest.mark.parametrize("way", ["cancelled", "revoked", "P is gone"])
def test_a_wait_for_pages_that_do_not_come(way: str, p: PrefillEngine) -> None:
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        tickets = [incomplete(p, 1, 2, num_ready=1), incomplete(p, 3, 4, num_ready=1)]
        numbers = [d.fetch(ticket, blank(2)) for ticket in tickets]  # which take turns
        eventually(lambda: p.server.counts["pages"] == 2)
        began = time.monotonic()
        if way == "cancelled":
            for number in numbers:
                d.cancel(number)
            eventually(lambda: len(p.released) == 2)
            assert d.poll() == [] and p.leases.counts["not wanted"] == 2
        elif way == "revoked":
            for ticket in tickets:
                assert p.leases.revoke(ticket.generation) is not None
            found: dict[int, bool] = {}
            while len(found) < 2:
                assert d.wait(30)
                found |= dict(d.poll())
            assert found == dict.fromkeys(numbers, False)
        else:
            p.server.close()
            eventually(lambda: len(d._results._results) == 2)
            assert dict(d.poll()) == dict.fromkeys(numbers, False)
        assert time.monotonic() - began < 15


def test_heartbeats_go_on_while_d_waits(p: PrefillEngine) -> None:
    with reader(p) as d:
        eventually(lambda: d.reads_from("p1"))
        ticket = incomplete(p, 1, 2, num_ready=1)
        number = d.fetch(ticket, blank(2))
        for _ in range(4):
            p.now += 20
            expires = p.leases.lease_of(ticket.generation).expires
            eventually(lambda seen=expires: p.leases.lease_of(ticket.generation).expires > seen)
        p.leases.advance(ticket.generation, 2)
        assert result(d, number) is True
