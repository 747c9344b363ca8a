"""Tickets of a lender at remote pages, over real sockets.

Each fault leaves the request without pages, with one warning, and P without a lease.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nanovllm.kv.keys import PageKeys
from nanovllm.plan import Lent
from nanovllm.transfer.leases import Lease
from nanovllm.transfer.lender import Lender
from nanovllm.transfer.page_client import ReaderLimits, run_length
from nanovllm.transfer.remote_pages import RemotePages
from tests.transfer.test_page_client import eventually

SECRET = "the secret of these tests"
PAGE_BYTES = 4096
TOKENS = array("i", range(100))
KEYS = PageKeys(TOKENS, "", 16)
LIMITS = ReaderLimits(
    layout=b"l", identity=b"m", page_bytes=PAGE_BYTES, silence_s=0.5, heartbeat_s=0.05
)


def content(page: int) -> bytes:
    return bytes([page]) * PAGE_BYTES


class Pair:
    """P, whose leases take `lease_s`, and D."""

    def __init__(self, *, lease_s: float = 30.0, secret: str = SECRET, **limits: Any) -> None:
        self.ended: list[Lease] = []
        self.p = Lender(
            ("127.0.0.1", 0), SECRET, layout=b"l", identity=b"m", page_bytes=PAGE_BYTES,
            most_pages=8, page=lambda page, *share: memoryview(content(page)), lease_s=lease_s,
        )  # fmt: skip
        self.p.call_when_ended(self.ended.append)
        own = msgspec.structs.replace(LIMITS, **limits)
        self.d = RemotePages([self.p.server.address], secret, own, lambda: None)

    def connect(self) -> None:
        eventually(lambda: self.d._client.reads_from(self.p.engine))

    def ticket(self, pages: tuple[int, ...] = (3, 1, 2), *, text: bytes | None = None) -> str:
        own = KEYS.full(len(pages) - 1) if text is None else text
        params = json.loads(self.p.lend("r", Lent(pages, own), 16 * len(pages)))
        assert params["do_remote_prefill"] and params["remote_num_tokens"] == 16 * len(pages)
        return str(params["nanovllm_ticket"])

    def offer(self, text: str) -> None:
        self.d.offer(7, text, KEYS.full, 6)

    def read(self, *places: int) -> tuple[bool, list[bytes]]:
        buffers = [bytearray(PAGE_BYTES) for _ in places]
        pages = [(KEYS.full(i), memoryview(b)) for i, b in zip(places, buffers, strict=True)]
        numbers = [*self.d.read_all(pages)]
        assert len(numbers) == 1 and self.d._client.wait(30)
        ((number, ok),) = self.d.poll()
        assert number == numbers[0]
        return ok, [bytes(buffer) for buffer in buffers]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    pair.connect()
    yield pair
    pair.d.close()
    pair.p.close()


def test_places_are_read_in_runs() -> None:
    places = [0, 1, 2, 3, 4, 7, 9, 10]
    assert [run_length(places[at:]) for at in range(8)] == [5, 4, 3, 2, 1, 1, 2, 1]


@pytest.mark.parametrize(("places", "pages"), [((0, 1, 2), (3, 1, 2)), ((0, 2), (3, 2))])
def test_pages_of_a_ticket(pair: Pair, places: tuple[int, ...], pages: tuple[int, ...]) -> None:
    pair.offer(pair.ticket())
    assert all(pair.d.holds(KEYS.full(i)) for i in range(3)) and not pair.d.holds(KEYS.full(3))
    assert pair.read(*places) == (True, [content(page) for page in pages])
    assert not pair.d.holds(KEYS.full(0))  # a ticket is read once
    pair.d.settle(7)
    eventually(lambda: [lease.pages for lease in pair.ended] == [(3, 1, 2)])
    assert pair.p.leases.counts == {"granted": 1, "done": 1} and pair.d.counts == {"read": 1}


def test_an_unread_ticket_is_declined(pair: Pair) -> None:
    """As after a prefix hit of everything, a refusal or an abort."""
    pair.offer(pair.ticket())
    pair.d.settle(7)
    eventually(lambda: len(pair.ended) == 1)
    assert pair.p.leases.counts == {"granted": 1, "not wanted": 1}
    assert not pair.d.holds(KEYS.full(0))


def test_prompts_that_share_their_first_pages(pair: Pair) -> None:
    """The ticket of the longer one stays usable after the other one has been declined."""
    longer, shorter = pair.ticket(), pair.ticket((3, 1))
    pair.offer(longer)
    pair.d.offer(8, shorter, KEYS.full, 6)
    pair.d.settle(8)
    assert pair.read(0, 1, 2) == (True, [content(page) for page in (3, 1, 2)])
    pair.d.offer(9, pair.ticket((4,)), KEYS.full, 6)
    assert pair.d.holds(KEYS.full(0)) and pair.read(0) == (True, [content(4)])
    pair.d.settle(9)
    pair.d.settle(7)
    eventually(lambda: len(pair.ended) == 3)
    assert pair.p.leases.counts == {"granted": 3, "done": 2, "not wanted": 1}


def test_a_request_leaves_the_tickets_of_others_unread(pair: Pair) -> None:
    pair.offer(pair.ticket((3, 1, 2)))
    pair.d.offer(8, pair.ticket((4, 5)), KEYS.full, 6)
    assert pair.read(0, 1) == (True, [content(4), content(5)])
    pair.d.settle(8)
    assert pair.read(0, 1, 2) == (True, [content(page) for page in (3, 1, 2)])


def test_a_ticket_of_two_requests_stays_when_one_leaves(pair: Pair) -> None:
    """As after a retry of the router, or when one of several choices is refused."""
    ticket = pair.ticket()
    pair.offer(ticket)
    pair.d.offer(8, ticket, KEYS.full, 6)
    pair.d.settle(8)
    assert pair.read(0, 1, 2) == (True, [content(page) for page in (3, 1, 2)])


def test_a_ticket_without_a_request_is_declined(pair: Pair) -> None:
    """As after a refusal by an API process. An open request keeps its ticket."""
    ticket, other = pair.ticket(), pair.ticket((4,))
    pair.offer(ticket)
    for text in (ticket, forged(other), "x", other):
        pair.d.decline(text)
    eventually(lambda: len(pair.ended) == 1)
    assert pair.ended[0].pages == (4,) and pair.d.counts == {"not wanted": 1}
    assert pair.read(0, 1, 2) == (True, [content(page) for page in (3, 1, 2)])


def test_shared_pages_are_lent_to_many(pair: Pair) -> None:
    assert all(pair.p.lend("r", Lent((1, 2, 3, 4, 5)), 80) for _ in range(9))
    assert pair.p.leases.num_pages == 5
    assert not pair.p.lend("r", Lent((1, 6, 7, 8, 9)), 80)


def test_too_many_pages_are_not_lent(pair: Pair) -> None:
    pair.ticket((1, 2, 3, 4, 5))
    assert pair.p.lend("r", Lent((6, 7, 8, 9)), 64) == "" == pair.p.lend("r", Lent(), 0)
    assert pair.ticket((6, 7, 8))


def forged(text: str) -> str:
    return ("A" if text[0] != "A" else "B") + text[1:]


def test_tickets_that_are_not_used(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    other = Pair()
    cases = {
        "forged": forged(pair.ticket()),
        "malformed": "no ticket",
        "text": pair.ticket(text=KEYS.full(1)),
        "unconnected": other.ticket(),
    }
    for reason, text in cases.items():
        caplog.clear()
        pair.offer(text)
        assert pair.d.counts[reason] == 1 and not pair.d.holds(KEYS.full(0))
        (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
        assert f"request 7 computes its prompt here ({reason})" in record.getMessage()
    eventually(lambda: pair.p.leases.counts["not wanted"] == 1)  # that of another prompt
    other.d.close()
    other.p.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"identity": b"x"}, "model"), ({"layout": b"x"}, "layout")],
)
def test_another_model(changed: dict[str, bytes], reason: str) -> None:
    pair = Pair(**changed)
    pair.offer(pair.ticket())
    assert pair.d.counts == {reason: 1}
    eventually(lambda: not pair.d._client.reads_from(pair.p.engine))
    pair.d.close()
    pair.p.close()


def test_another_secret(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(secret="another secret of D")
    eventually(lambda: "secret" in caplog.text)
    pair.offer(pair.ticket())
    assert pair.d.counts == {"forged": 1} and not pair.d._client.reads_from(pair.p.engine)
    pair.d.close()
    pair.p.close()


def test_the_lease_of_a_waiting_request_is_extended_then_lost_with_p() -> None:
    pair = Pair(lease_s=1.0)
    pair.connect()
    pair.offer(pair.ticket())
    time.sleep(1.5)
    assert len(pair.p.leases) == 1 and not pair.ended
    pair.p.server.close()
    ok, _ = pair.read(0, 1, 2)
    assert not ok and pair.d.counts == {"lost": 1}
    eventually(lambda: len(pair.ended) == 1)  # by its expiry
    assert pair.p.leases.counts == {"granted": 1, "expired": 1}
    pair.d.close()
    pair.p.close()


def test_an_ended_lease_is_never_used() -> None:
    pair = Pair(lease_s=0.3, heartbeat_s=30.0)
    pair.connect()
    pair.offer(pair.ticket())
    time.sleep(0.4)
    assert pair.read(0, 1)[0] is False and pair.d.counts == {"lost": 1}
    eventually(lambda: len(pair.ended) == 1)
    pair.d.close()
    pair.p.close()
