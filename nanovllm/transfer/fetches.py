"""Loads of one request's pages from P: their states, and the results for D's engine.

Life of a fetch: queued -> running -> done. A running one whose pages P still computes is queued
again if others wait. The thread that reads from P copies a page only under the lock and only while
the fetch is running. So `cancel` gives the buffers back at once. Copies on the device are made
without the lock, and `cancel` waits for the end of one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nanovllm.transfer.device_pages import Arrivals
from nanovllm.transfer.tickets import Ticket

LATE_S = 0.01  # a longer wait for complete pages is not the network's


@dataclass(slots=True, eq=False)
class Fetch:
    number: int
    ticket: Ticket
    buffers: Sequence[memoryview]  # of the caller, one a page
    places: Sequence[int] = ()  # of the pages in the ticket's list, in rising order
    state: Literal["queued", "running", "done"] = "queued"
    arrivals: Arrivals | None = None  # pages that may be filled instead of the buffers
    targets: Sequence[int] = ()  # those of the places; unused for parts of a state
    is_written: bool = False  # a copy to the targets is under way
    copied_bytes: int = 0  # to the targets, of copies that P has no report of
    num_ready: int = 0  # leading pages of the ticket that P has computed, as far as is known
    num_read: int = 0  # places that have been read
    read_s: float = 0.0  # time spent on it, without waiting for P to compute
    waited_s: float = 0.0  # for P to compute

    @property
    def num_direct(self) -> int:
        """Number of places that are pages. Parts of a recurrent state follow them."""
        return sum(place < len(self.ticket.pages) for place in self.places)

    def ready_places(self, most: int) -> Sequence[int]:
        """Return the next places to read: at most `most`, all of which P has computed."""
        places = self.places[self.num_read : self.num_read + most]
        if self.num_ready == len(self.ticket.pages):
            return places
        return [place for place in places if place < self.num_ready]

    def waited(self, seconds: float) -> None:
        """Note a wait for pages that P had to compute, which says nothing about the link."""
        self.read_s -= seconds
        self.waited_s += seconds
        if self.waited_s > LATE_S and self.arrivals is not None:
            self.arrivals.were_awaited = True

    def end(self) -> None:
        """Give the buffers back to the caller."""
        self.state = "done"
        self.buffers = ()


class Fetches:
    """The fetches of one peer, in order. All methods may be called from any thread.

    A fetch that is cancelled, refused or failed before its end stays in the queue of `take`: P
    receives a message that its lease is not wanted. This and the leases to keep outlive a break of
    the connection, if the next connection leads to the same engine.
    """

    def __init__(self, results: FetchResults) -> None:
        self._results = results
        self._changed = threading.Condition()
        self._queue: deque[Fetch] = deque()
        self._running: Fetch | None = None
        self._kept: set[int] = set()  # leases of requests that wait for their fetch
        self.engine: str | None = None  # that the connection leads to
        self.last_engine: str | None = None  # of the latest connection
        self._is_closed = False

    def open(self, engine: str) -> None:
        """Accept fetches from this engine. `fail_all` ends that."""
        with self._changed:
            if engine != self.last_engine:  # leases of another start of P have ended with it
                self._kept.clear()
                self._queue.clear()
            self.last_engine = engine
            self.engine = None if self._is_closed else engine

    def add(self, fetch: Fetch) -> bool:
        """Queue a fetch. Return False if the connection does not lead to its engine any more.

        A ticket from before a restart of P must not meet a lease of the new engine.
        """
        with self._changed:
            if self.last_engine != fetch.ticket.engine:
                return False
            self._kept.discard(fetch.ticket.generation)
            is_open = self.engine is not None
            if not is_open:
                fetch.end()
            self._queue.append(fetch)
            self._changed.notify_all()
            return is_open

    def keep(self, generation: int) -> None:
        """Include a lease in heartbeats before its fetch, which ends that."""
        with self._changed:
            self._kept.add(generation)

    def take(self, timeout_s: float) -> Fetch | None:
        """Return the next fetch; None after `timeout_s`. It is running now, or done already."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed, timeout_s)
            if not self._queue:
                return None
            fetch = self._queue.popleft()
            if fetch.state == "queued":
                fetch.state = "running"
                self._running = fetch
            return fetch

    def generations(self) -> list[int]:
        """Return the leases that are still wanted, for a heartbeat."""
        with self._changed:
            pending = [*self._queue, *([self._running] if self._running else [])]
            return [*self._kept, *(f.ticket.generation for f in pending if f.state != "done")]

    def copy(self, fetch: Fetch, place: int, data: memoryview) -> bool:
        """Copy a page to the caller's buffer. Return False if the fetch is done."""
        with self._changed:
            if fetch.state != "running":
                return False
            into = np.frombuffer(fetch.buffers[place], np.uint8)
            np.copyto(into, np.frombuffer(data, np.uint8))
            return True

    def run(self, fetch: Fetch, copy: Callable[[], int]) -> bool:
        """Call `copy`, which writes bytes to the targets. Return False if the fetch is done."""
        with self._changed:
            if fetch.state != "running":
                return False
            fetch.is_written = True
        try:
            fetch.copied_bytes += copy()
        finally:
            with self._changed:
                fetch.is_written = False
                self._changed.notify_all()
        return fetch.state == "running"

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def postpone(self, fetch: Fetch) -> bool:
        """Queue a running fetch behind the others. Return False if there are none."""
        with self._changed:
            if not self._queue or fetch.state != "running":
                return False
            fetch.state, self._running = "queued", None
            self._queue.append(fetch)
            return True

    def is_running(self, fetch: Fetch) -> bool:
        return fetch.state == "running"

    def finish(self, fetch: Fetch, ok: bool) -> None:
        """Give the buffers back with a result, unless that has been done."""
        with self._changed:
            self._changed.wait_for(lambda: not fetch.is_written)
            is_new = fetch.state != "done"
            fetch.end()
            if self._running is fetch:
                self._running = None
        if is_new:
            self._results.put(fetch.number, ok)

    def cancel(self, fetch: Fetch) -> None:
        """Give the buffers back without a result."""
        with self._changed:
            fetch.end()
            self._changed.wait_for(lambda: not fetch.is_written)

    def fail_all(self) -> None:
        """End all fetches, since the connection is lost. P receives their ends after a new one."""
        with self._changed:
            self.engine = None
            fetches = [*([self._running] if self._running else []), *self._queue]
            self._queue = deque(fetches)
        for fetch in fetches:
            self.finish(fetch, False)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.fail_all()


class FetchResults:
    """Results of the fetches of all peers. `wake` is called when `poll` has new ones."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._results: list[tuple[int, bool]] = []

    def put(self, number: int, ok: bool) -> None:
        with self._changed:
            self._results.append((number, ok))
            is_first = len(self._results) == 1
            self._changed.notify_all()
        if is_first:
            self._wake()

    def poll(self) -> list[tuple[int, bool]]:
        with self._changed:
            results, self._results = self._results, []
            return results

    def discard(self, number: int) -> None:
        with self._changed:
            self._results = [result for result in self._results if result[0] != number]

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until `poll` has results. Return False after `timeout_s`."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._results, timeout_s))
