"""D's side of transfers: pages of other engines, as a tier below host memory.

Theory of operation:

    1. offer   the ticket of a request is checked; then its pages can be found by their keys
    2. read    the load of an admitted request reads them from P to host slots, as one fetch
    3. poll    reports the fetch after P has confirmed the lease; only then pages are used
    4. settle  the request has started or ended: a ticket that was not read is declined

`decline` does the same for a request that an API process has refused before step 1.

Every ticket that names a connected engine thus ends with one message to P: done, or not wanted. All
methods are called from the engine's thread. A request whose pages do not arrive computes them.

A ticket of a model with recurrent states has the state after its last page, in parts of the size of
a page. They have keys of their own, and are read by the same fetch.

Decision: the ticket has the key of its last page, which D compares with that of its own prompt. A
ticket that is sent with another prompt thus never puts wrong pages under this prompt's keys.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.plan import Availability, state_part_keys
from nanovllm.transfer.device_pages import Arrivals
from nanovllm.transfer.page_client import PageClient, ReaderLimits
from nanovllm.transfer.tickets import Ticket, TicketError, TicketKey

log = logging.getLogger("transfer")
Key = bytes


class Announcement(NamedTuple):
    """Message to the other ranks of D: a ticket that rank 0 uses, or without keys, its end."""

    request_id: int
    text: str = ""
    keys: Sequence[Key] = ()  # of the pages, then of the parts of the state


@dataclass(slots=True, eq=False)
class Offer:
    """The pages of one request's ticket."""

    request_id: int
    ticket: Ticket
    keys: list[Key]  # of the pages, then of the parts of the state
    is_read: bool = False  # a fetch of it has been started


class RemotePages:
    """Tier below host memory whose pages are those of the tickets of open requests."""

    writable = None  # kv.below.Below
    has_peers = True
    can_write = False
    availability = Availability()

    def __init__(
        self,
        peers: Sequence[tuple[str, int]],
        secret: str,
        limits: ReaderLimits,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called from any thread when `poll` has new results."""
        self.counts: Counter[str] = Counter()  # of tickets by reason for which they were not used
        self._limits = limits
        self._key = TicketKey(secret)
        self._client = PageClient(peers, secret, limits, wake)
        self._offers: dict[int, Offer] = {}  # by request
        # Offers of a page, with its place in the ticket. Prompts may share their first pages.
        self._where: dict[Key, dict[Offer, int]] = {}
        self._fetches: dict[int, Offer | None] = {}  # by number; None: no ticket had the pages
        self._announce: Callable[[Announcement], None] = lambda _: None

    def offer(self, request_id: int, text: str, key_of: Callable[[int], Key], most: int) -> None:
        """Make the pages of a ticket available. Log one warning if it cannot be used.

        `key_of` returns the key of a page of the request's prompt, of which `most` can be cached.
        """
        try:
            now = time.time()
            ticket = self._key.check(text, self._limits.layout, self._limits.identity, now)
        except TicketError as error:
            self._warn(request_id, error.reason, str(error))
            return
        if not self._client.reads_from(ticket.engine):
            self._client.decline(ticket)
            self._warn(request_id, "unconnected", "no transfer.peers is the engine of its ticket")
            return
        count = len(ticket.pages)
        if not 0 < count <= most or key_of(count - 1) != ticket.text:
            self._client.decline(ticket)
            self._warn(
                request_id, "text", "its ticket is for another prompt, cache_salt or adapter"
            )
            return
        keys = [key_of(place) for place in range(count)]
        offer = Offer(request_id, ticket, [*keys, *self.keys_of_parts(keys[-1])])
        self._announce(Announcement(request_id, text, offer.keys))
        self._add(offer)

    def announce_by(self, send: Callable[[Announcement], None]) -> None:
        """Call `send` with each ticket that is used, and with its end, for the other ranks."""
        self._announce = send

    def follow(self, announced: Announcement) -> None:
        """Use a ticket on a rank other than 0, which reads its own share. Or forget it."""
        if not announced.keys:
            self.settle(announced.request_id)
            return
        try:
            now = time.time()
            ticket = self._key.check(
                announced.text, self._limits.layout, self._limits.identity, now
            )
        except TicketError as error:
            self._warn(announced.request_id, error.reason, str(error))
            return
        self._add(Offer(announced.request_id, ticket, [*announced.keys]))

    def _add(self, offer: Offer) -> None:
        self._offers[offer.request_id] = offer
        for place, key in enumerate(offer.keys):
            self._where.setdefault(key, {})[offer] = place
        self._client.keep(offer.ticket)

    def settle(self, request_id: int) -> None:
        """Forget the ticket of a request that has started or ended.

        Decline it if it is unread, unless another open request has the same one.
        """
        if (offer := self._offers.pop(request_id, None)) is None:
            return
        self._announce(Announcement(request_id))
        for key in offer.keys:
            del self._where[key][offer]
            if not self._where[key]:
                del self._where[key]
        if not offer.is_read and all(one.ticket != offer.ticket for one in self._offers.values()):
            self.counts["not wanted"] += 1
            self._client.decline(offer.ticket)

    def decline(self, text: str) -> None:
        """Decline the ticket of a request that was refused before it came here.

        Ignore one that this engine cannot use, or that an open request has, too.
        """
        try:
            ticket = self._key.check(text, self._limits.layout, self._limits.identity, time.time())
        except TicketError:
            return
        if all(offer.ticket != ticket for offer in self._offers.values()):
            self.counts["not wanted"] += 1
            self._client.decline(ticket)

    def holds(self, key: Key) -> bool:
        """Return True if an unread ticket has the page."""
        return any(not offer.is_read for offer in self._where.get(key, ()))

    def has_remote(self, keys: Iterable[Key]) -> bool:
        return any(map(self.holds, keys))

    def is_listed(self, key: Key) -> bool:
        return self.holds(key)

    def note_rank(self, rank: int, availability: Availability) -> None:
        """Do nothing: a ticket that one rank cannot use fails its load on all ranks."""

    def state_keys(self, key: Key) -> list[Key]:
        """Return `keys_of_parts` if a ticket ends at the page."""
        return self.keys_of_parts(key) if self.holds(state_part_keys(key, 1)[0]) else []

    def page_counts(self) -> dict[str, float]:
        """Return nothing: the pages of other engines are not counted."""
        return {}

    def keys_of_parts(self, key: Key) -> list[Key]:
        """Return the keys of the parts of the state after a page."""
        return state_part_keys(key, self._limits.state_parts)

    def read_all(
        self, pages: Sequence[tuple[Key, memoryview]], arrivals: Arrivals | None = None
    ) -> dict[int, list[Key]]:
        """Begin to read pages that `holds` into buffers. Return the keys by number of their fetch.

        `arrivals` has pages on the device that may be filled instead of the buffers.

        A ticket is read once. So shared pages come from the ticket with most of these pages and
        fewest others, which is usually the request's own.
        """
        if any(key not in self._where for key, _ in pages):  # on a rank that refused the ticket
            number = self._client.fail()
            self._fetches[number] = None
            return {number: [key for key, _ in pages]}
        num_wanted = Counter(offer for key, _ in pages for offer in self._where[key])
        by_offer: dict[Offer, list[tuple[int, memoryview, int]]] = {}
        for key, buffer in pages:
            offers = self._where[key]
            offer = min(offers, key=lambda o: (o.is_read, -num_wanted[o], len(o.keys)))
            page = -1 if arrivals is None else arrivals.pages.get(key, -1)
            by_offer.setdefault(offer, []).append((offers[offer], buffer, page))
        keys_by_number: dict[int, list[Key]] = {}
        for offer, wanted in by_offer.items():
            offer.is_read = True
            ordered = sorted(wanted, key=lambda one: one[0])
            places, buffers, targets = zip(*ordered, strict=True)
            number = self._client.fetch(
                offer.ticket, buffers, places, arrivals=arrivals, targets=targets
            )
            self._fetches[number] = offer
            keys_by_number[number] = [offer.keys[place] for place in places]
        return keys_by_number

    def write(self, key: Key, buffer: memoryview) -> int | None:
        """Return None: pages are read only."""
        return None

    def poll(self) -> list[tuple[int, bool]]:
        """Return the fetches that have ended since the last call, and True for valid pages."""
        results = self._client.poll()
        for number, ok in results:
            offer = self._fetches.pop(number)
            if ok:
                self.counts["read"] += 1
            elif offer is not None:
                self._warn(offer.request_id, "lost", "the prefill server did not send its pages")
        return results

    @property
    def num_failed(self) -> int:
        """Number of fetches that have failed."""
        return self._client.counts["failed"]

    def taken_reads(self) -> list[tuple[int, float]]:
        """Return bytes and seconds of the fetches that succeeded since the last call."""
        reads = self._client.reads
        return [reads.pop(0) for _ in range(len(reads))]

    def close(self) -> None:
        self._client.close()

    def _warn(self, request_id: int, reason: str, text: str) -> None:
        self.counts[reason] += 1
        log.warning("request %d computes its prompt here (%s): %s", request_id, reason, text)
