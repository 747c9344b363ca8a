"""D's end of the socket backend: reads pages from the peers of the recipe.

Theory of operation:

1. Each peer has a thread with one connection, on which it first names its engine. A ticket's engine
   is looked up among these, so no address is ever taken from a request.
2. A fetch requests WINDOW pages at a time. Each page is received into memory of the thread, its MAC
   is checked, and then it is copied to the caller's buffer. Inside one host, device_pages.py
   instead copies the pages between the devices. P may still compute the prompt: D waits until the
   wanted pages are complete, and reads other tickets meanwhile.
3. After the last page P confirms that the lease still holds. Only then is the result True.
4. Every fetch ends with one message to P: done, or not wanted. If the connection is lost, the
   result is False. P receives the message after the next connection to the same start of P.
5. A peer that is silent for `silence_s` is given up, since a frozen one gives no error.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from nanovllm.transfer.device_pages import (
    AT_ONCE,
    Arrivals,
    MemoryReader,
    PeerMemory,
    opened_memory,
)
from nanovllm.transfer.fetches import Fetch, Fetches, FetchResults
from nanovllm.transfer.leases import HEARTBEAT_S, End
from nanovllm.transfer.messages import (
    MAX_HEADER,
    MOST_WAIT_MS,
    CheckLease,
    EndedLeases,
    EngineCard,
    FinishLease,
    Heartbeat,
    LeaseAnswer,
    PageBytes,
    ReadPages,
    ReadyPages,
    ToD,
    WaitForPages,
    decode,
    encode,
)
from nanovllm.transfer.sealed import PeerError, SealedConnection
from nanovllm.transfer.tickets import Ticket

WINDOW = 4  # pages that are requested at once
RETRY_S, MAX_RETRY_S = 0.5, 30.0  # pauses between connections
log = logging.getLogger("transfer")
M = TypeVar("M", bound=Struct)
Progress: TypeAlias = Literal["ready", "read", "postponed", "lost"]


class ReaderLimits(Struct, frozen=True, kw_only=True):
    layout: bytes  # D's own, which P's must equal
    identity: bytes
    page_bytes: int
    state_parts: int = 0  # of a recurrent state, which follow the pages of a ticket
    share: int = 0  # this rank's, of `shares`: the number of ranks of D and of P
    shares: int = 1
    silence_s: float = 5.0
    heartbeat_s: float = HEARTBEAT_S
    memory: MemoryReader | None = None  # of peers' ranks; None: pages come by socket


class PageClient:
    """Connections to all peers. Any thread may call the methods, none of which waits for a peer.

    `cancel` waits for the end of a copy on the device, and `wait` for a result.

    `counts` has the numbers of fetches by result. The caller empties `reads` now and then.
    """

    def __init__(
        self,
        peers: Sequence[tuple[str, int]],
        secret: str,
        limits: ReaderLimits,
        wake: Callable[[], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.reads: list[tuple[int, float]] = []  # bytes and seconds of fetches that succeeded
        self._page_bytes = limits.page_bytes
        self._results = FetchResults(wake)
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[PeerReader, Fetch]] = {}
        self._peers = [
            PeerReader(peer, secret, limits, self._results, note=self.reads.append)
            for peer in peers
        ]

    def reads_from(self, engine: str) -> bool:
        """Return True if there is a connection to this engine."""
        return any(peer.fetches.engine == engine for peer in self._peers)

    def keep(self, ticket: Ticket) -> None:
        """Extend the lease of a ticket until it is fetched or declined."""
        peer = self._peer_of(ticket.engine)
        if peer is not None:
            peer.fetches.keep(ticket.generation)

    def fetch(
        self,
        ticket: Ticket,
        buffers: Sequence[memoryview],
        places: Sequence[int] | None = None,
        *,
        arrivals: Arrivals | None = None,
        targets: Sequence[int] = (),
    ) -> int:
        """Read the ticket's pages into buffers of `page_bytes` each. Return a number for `poll`.

        `places` are those of the wanted pages in the ticket's list, in rising order; None: all. The
        parts of its recurrent state follow the pages.

        The buffers must stay valid until the number is polled or cancelled. Their content is valid
        only if the result is True. `targets` are pages of `arrivals` that may be filled instead.
        """
        number = next(self._numbers)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        chosen = range(len(ticket.pages)) if places is None else places
        if len(views) != len(chosen) or any(len(v) != self._page_bytes for v in views):
            raise ValueError(f"{len(chosen)} buffers of {self._page_bytes} bytes are needed")
        peer = self._peer_of(ticket.engine)
        fetch = Fetch(number, ticket, views, chosen, arrivals=arrivals, targets=targets)
        if peer is not None:
            self._open[number] = peer, fetch
        if peer is None or not peer.fetches.add(fetch):
            self._results.put(number, False)
        return number

    def fail(self) -> int:
        """Return the number of a fetch that fails, since no ticket has its pages."""
        number = next(self._numbers)
        self._results.put(number, False)
        return number

    def decline(self, ticket: Ticket) -> None:
        """Let P release the pages of a ticket, without reading any."""
        peer = self._peer_of(ticket.engine)
        if peer is not None:
            peer.fetches.add(Fetch(0, ticket, (), state="done"))

    def cancel(self, number: int) -> None:
        """Give the buffers back at once. The number is not polled, and P releases the pages."""
        if number in self._open:
            peer, fetch = self._open.pop(number)
            peer.fetches.cancel(fetch)
        self._results.discard(number)

    def poll(self) -> list[tuple[int, bool]]:
        """Return (number, ok) of fetches that have ended since the last call."""
        results = self._results.poll()
        for number, ok in results:
            self._open.pop(number, None)
            self.counts["fetched" if ok else "failed"] += 1
        return results

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `poll` has results. Return False after `timeout_s`."""
        return self._results.wait(timeout_s)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def _peer_of(self, engine: str) -> PeerReader | None:
        """Return the peer whose latest connection led to this engine."""
        peers = [peer for peer in self._peers if peer.fetches.last_engine == engine]
        return next((peer for peer in peers if peer.fetches.engine), peers[0] if peers else None)


class PeerReader:
    """One peer: its thread, its connection, and the fetches from it."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        limits: ReaderLimits,
        results: FetchResults,
        *,
        note: Callable[[tuple[int, float]], None],
    ) -> None:
        """`note` is called with the bytes and seconds of each fetch that succeeded."""
        self.fetches = Fetches(results)
        self._note = note
        self._is_measured = False  # a fetch on this connection has been logged
        self._address = address
        self._secret = secret
        self._limits = limits
        self._decoder = msgspec.msgpack.Decoder[ToD](ToD)
        self._frame = memoryview(bytearray(MAX_HEADER + limits.page_bytes))
        self._sock: socket.socket | None = None
        self._memory: PeerMemory | None = None
        self._connection: SealedConnection
        self._last_heartbeat = 0.0
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="transfer-read", daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self.fetches.close()
        if (sock := self._sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        """Connect, and again after each fault. Log one fault of each kind, until a connection."""
        if self._limits.memory is not None:
            self._limits.memory.usable.wait()
        pause, logged = RETRY_S, set[str]()
        while not self._closing.is_set():
            try:
                with socket.create_connection(self._address, self._limits.silence_s) as sock:
                    self._sock = sock
                    self._open(sock)
                    pause = RETRY_S
                    logged.clear()
                    self._serve()
            except (OSError, PeerError) as error:
                kind = error.kind if isinstance(error, PeerError) else "network"
                if kind not in logged and not self._closing.is_set():
                    reason = str(error) or type(error).__name__
                    log.warning("transfer.peers: no pages from %s:%d: %s", *self._address, reason)
                logged.add(kind)
            except Exception:
                log.exception("the connection to %s failed", self._address)
            finally:
                self._sock = None
                self.fetches.fail_all()
                self._close_memory()
            self._closing.wait(pause)
            pause = min(2 * pause, MAX_RETRY_S)

    def _open(self, sock: socket.socket) -> None:
        self._connection = SealedConnection.connect(sock, self._secret)
        self._connection.wait_at_most(self._limits.silence_s)
        card, _ = self._receive(EngineCard)
        check_card(card, self._limits)
        self._is_measured = False
        self._memory = opened_memory(
            self._limits.memory,
            card.memories,
            self._address,
            rank=self._limits.share,
            num_ranks=(card.num_ranks, self._limits.shares),
        )
        self.fetches.open(card.engine)
        log.info("transfer.peers: %s:%d is engine %s", *self._address, card.engine)

    def _serve(self) -> None:
        self._beat()  # after a break, leases may be near their end
        while not self._closing.is_set():
            fetch = self.fetches.take(self._limits.heartbeat_s)
            if fetch is None:
                self._beat()
            elif self.fetches.is_running(fetch):
                began = time.monotonic()
                result = self._fetch(fetch)
                fetch.read_s += time.monotonic() - began
                if result != "postponed":
                    self._end(fetch, ok=result == "read")
            else:
                self._finish(fetch, "not wanted")

    def _end(self, fetch: Fetch, *, ok: bool) -> None:
        if ok:
            self._measured(len(fetch.places), fetch.read_s)
        self._finish(fetch, "done" if ok else "not wanted")
        self.fetches.finish(fetch, ok)

    def _fetch(self, fetch: Fetch) -> Progress:
        """Read all pages that were not read before.

        The result is "lost" if the lease has ended, or if the fetch was cancelled.
        """
        direct = fetch.num_direct if self._memory is not None and fetch.arrivals is not None else 0
        while (at := fetch.num_read) < len(fetch.places):
            if (progress := self._wait_for(fetch, fetch.places[at] + 1)) != "ready":
                return progress
            if at < direct:
                count = len(fetch.ready_places(min(AT_ONCE, direct - at)))
                is_read = self._copy(fetch, count)
            else:
                count = run_length(fetch.ready_places(WINDOW))
                is_read = self._receive_pages(fetch, count)
            if not is_read:
                return "lost"
            fetch.num_read += count
            self._beat_if_due()
        generation = fetch.ticket.generation
        self._connection.send(encode(CheckLease(generation)))
        checked, _ = self._receive(LeaseAnswer)
        is_held = checked == LeaseAnswer(generation, True)
        if is_held and direct and fetch.arrivals is not None:
            fetch.arrivals.filled.update(fetch.targets[:direct])
        return "read" if is_held else "lost"

    def _wait_for(self, fetch: Fetch, count: int) -> Progress:
        """Wait until P has computed the first `count` pages of a ticket.

        The result is "postponed" if other fetches can be read meanwhile.
        """
        generation, count = fetch.ticket.generation, min(count, len(fetch.ticket.pages))
        while fetch.num_ready < count:
            began = time.monotonic()
            most_ms = max(1, MOST_WAIT_MS // (1 + self.fetches.num_queued))  # they may be ready
            self._connection.send(encode(WaitForPages(generation, count, most_ms)))
            answer, _ = self._receive(ReadyPages, EndedLeases)
            if not isinstance(answer, ReadyPages) or not self.fetches.is_running(fetch):
                return "lost"
            fetch.num_ready = answer.count
            fetch.waited(time.monotonic() - began)
            self._beat_if_due()
            if fetch.num_ready < count and self.fetches.postpone(fetch):
                return "postponed"
        return "ready"

    def _receive_pages(self, fetch: Fetch, count: int) -> bool:
        """Read consecutive pages by socket. Return False if they cannot be used."""
        generation, first = fetch.ticket.generation, fetch.places[fetch.num_read]
        self._connection.send(self._wanted(generation, first, count))
        for nth in range(count):
            message, data = self._receive(PageBytes, EndedLeases)
            if isinstance(message, EndedLeases):
                return False
            is_right = message == PageBytes(generation, first + nth)
            if not is_right or len(data) != self._limits.page_bytes:
                raise PeerError("protocol", "it sent another page")
            self.fetches.copy(fetch, fetch.num_read + nth, data)
        return self.fetches.is_running(fetch)

    def _copy(self, fetch: Fetch, count: int) -> bool:
        """Copy pages between the devices. Return False if the fetch was cancelled."""
        assert self._memory is not None and fetch.arrivals is not None
        at = slice(fetch.num_read, fetch.num_read + count)
        pages = [fetch.ticket.pages[place] for place in fetch.places[at]]
        pairs = list(zip(pages, fetch.targets[at], strict=True))
        return self.fetches.run(fetch, partial(self._memory.copy, pairs, fetch.arrivals.ready))

    def _measured(self, num_pages: int, seconds: float) -> None:
        """Note the size and time of a fetch. Log the rate of the first one."""
        num_bytes = num_pages * self._limits.page_bytes
        self._note((num_bytes, seconds))
        if not self._is_measured:
            self._is_measured = True
            rate = num_bytes / max(seconds, 1e-9) / 1e9
            text = "transfer.peers: %s:%d sent its first %d pages, %.1f MB, at %.2f GB/s"
            log.info(text, *self._address, num_pages, num_bytes / 1e6, rate)

    def _close_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _beat_if_due(self) -> None:
        if time.monotonic() - self._last_heartbeat > self._limits.heartbeat_s:
            self._beat()

    def _beat(self) -> None:
        """Extend the leases that are wanted, and notice if the peer is gone."""
        self._last_heartbeat = time.monotonic()
        self._connection.send(encode(Heartbeat(self.fetches.generations())))
        self._receive(EndedLeases)

    def _wanted(self, generation: int, first: int, count: int) -> bytes:
        limits = self._limits
        return encode(ReadPages(generation, first, count, share=limits.share, shares=limits.shares))

    def _finish(self, fetch: Fetch, end: End) -> None:
        limits = self._limits
        copied_bytes, fetch.copied_bytes = fetch.copied_bytes, 0  # counted once by P
        message = FinishLease(
            fetch.ticket.generation,
            end,
            share=limits.share,
            shares=limits.shares,
            copied_bytes=copied_bytes,
        )
        self._connection.send(encode(message))

    def _receive(self, *kinds: type[M]) -> tuple[M, memoryview]:
        """Return the next message and its page. Raise PeerError if it is of another kind."""
        message, data = decode(self._connection.receive(self._frame), self._decoder)
        if not isinstance(message, kinds):
            raise PeerError("protocol", f"it sent {type(message).__name__}")
        return message, data


def check_card(card: EngineCard, limits: ReaderLimits) -> None:
    """Raise PeerError, with the remedy, unless D can use the pages of this engine."""
    has_equal_ranks = card.num_ranks == limits.shares
    names = ["identity", "layout"]
    if has_equal_ranks:  # else P cuts its pages for this rank
        names += ["page_bytes", "state_parts"]
    for name in names:
        if getattr(card, name) == getattr(limits, name):
            continue
        remedy = "serve the same model and recipe"
        if name == "layout" and not has_equal_ranks:
            remedy += f"; a speculate.method draft_model needs its parallel.tp of {card.num_ranks}"
        raise PeerError(name, f"its {name} differs: {remedy}")


def run_length(places: Sequence[int]) -> int:
    """Return how many of the places, which rise, are consecutive from the first one on."""
    return sum(place == places[0] + nth for nth, place in enumerate(places))
