"""Leases of P: pages of prompts, held until D has read them or the lease has ended.

    grant -> held -> finish (done, not wanted) -> pages return to the pool
                  -> expired -> scan           -> pages return to the pool
                  -> revoke                    -> pages return to the pool

A lease may be granted while P still computes the prompt. `advance` then tells which pages are
complete, and D waits for them (`wait_for`). If P cannot compute the rest, it revokes the lease.

The law: pages return only after `is_held` has become False for their generation. D requests
`is_held` after its read and uses the pages only if the answer is True. So no text is computed from
pages that were reused during a read, although nothing can stop a read that is under way.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

LEASE_S = 30.0
HEARTBEAT_S = LEASE_S / 6
MAX_LEASE_S = 600.0  # heartbeats do not extend a lease beyond this age

End = Literal["done", "not wanted"]


@dataclass(slots=True)
class Lease:
    """Pages of one request, and perhaps a recurrent state. Times are monotonic seconds."""

    generation: int
    request: str
    pages: tuple[int, ...]
    expires: float
    last_end: float  # no heartbeat extends the lease beyond it
    num_ready: int  # leading pages that are complete
    state: int = -1  # checkpoint of the state after the pages; -1: the model has none
    done: set[int] = field(default_factory=set)  # shares that have been read
    reported: set[int] = field(default_factory=set)  # shares whose copied bytes are counted


class Leases:
    """Leases by generation. All methods may be called from any thread.

    `counts` has the numbers of leases granted, of leases by their end, and of messages about leases
    that had already ended (`late`).
    """

    def __init__(
        self, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[int, Lease] = {}
        self._holders: Counter[int] = Counter()  # leases by page; prompts may share pages
        self._latest = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # pages are complete, or a lease has ended

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_pages(self) -> int:
        """Number of held pages; one that several requests share is counted once."""
        return self.num_pages_with(())

    def num_pages_with(self, pages: Iterable[int]) -> int:
        """Return the number of held pages if these were held, too."""
        with self._lock:
            return len(self._holders.keys() | pages)

    def grant(
        self, request: str, pages: Sequence[int], state: int = -1, *, num_ready: int | None = None
    ) -> int:
        """Hold pages and a state for a reader. Return the generation, which is never used again.

        The first `num_ready` pages are complete, by default all.
        """
        now = self._clock()
        with self._lock:
            self._latest += 1
            self._leases[self._latest] = Lease(
                generation=self._latest,
                request=request,
                pages=tuple(pages),
                expires=now + self._lease_s,
                last_end=now + MAX_LEASE_S,
                num_ready=len(pages) if num_ready is None else num_ready,
                state=state,
            )
            self._holders.update(self._leases[self._latest].pages)
            self.counts["granted"] += 1
            return self._latest

    def advance(self, generation: int, num_ready: int) -> None:
        """Note that the first `num_ready` pages of a lease are complete."""
        with self._changed:
            if (lease := self._leases.get(generation)) is not None:
                lease.num_ready = num_ready
                self._changed.notify_all()

    def wait_for(self, generation: int, num_pages: int, timeout_s: float) -> int | None:
        """Wait until the first `num_pages` pages are complete. Return the number of complete ones.

        It is smaller after `timeout_s`. Return None if the lease has ended.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (lease := self._held(generation)) is None or lease.num_ready >= num_pages,
                timeout_s,
            )
            lease = self._held(generation)
            return None if lease is None else lease.num_ready

    def revoke(self, generation: int) -> Lease | None:
        """End a lease whose pages P cannot complete. Return it; its pages go to the pool.

        Return None if it has ended already.
        """
        with self._lock:
            if generation not in self._leases:
                return None
            self.counts["revoked"] += 1
            return self._removed(generation)

    def is_held(self, generation: int) -> bool:
        """Return True if the pages of this generation have not returned to the pool."""
        return self.lease_of(generation) is not None

    def lease_of(self, generation: int) -> Lease | None:
        """Return a lease, or None if it has ended."""
        with self._lock:
            return self._held(generation)

    def extend(self, generations: Iterable[int]) -> list[int]:
        """Extend leases after a heartbeat. Return those that have ended, for the sender."""
        ended = []
        with self._lock:
            until = self._clock() + self._lease_s
            for generation in generations:
                lease = self._held(generation)
                if lease is None:
                    ended.append(generation)
                else:
                    lease.expires = max(lease.expires, min(until, lease.last_end))
        return ended

    def takes_report(self, generation: int, share: int) -> bool:
        """Return True once for each share of a lease, until the lease has ended."""
        with self._lock:
            lease = self._held(generation)
            if lease is None or share in lease.reported:
                return False
            lease.reported.add(share)
            return True

    def finish(self, generation: int, end: End, share: int = 0, shares: int = 1) -> Lease | None:
        """End a lease on a message of its reader. Return it; its pages go to the pool.

        Return None if it has ended already, or if it is done and others of its shares are not. An
        expired lease is left to `scan`.
        """
        with self._lock:
            lease = self._held(generation)
            if lease is None:
                self.counts["late"] += 1
                return None
            lease.done.add(share)
            if end == "done" and len(lease.done) < shares:
                return None
            self.counts[end] += 1
            return self._removed(generation)

    def scan(self) -> list[Lease]:
        """End all expired leases and return them; their pages go to the pool.

        Each call looks at all leases: extended ones are not in the order of their end.
        """
        with self._lock:
            now = self._clock()
            expired = [lease for lease in self._leases.values() if now >= lease.expires]
            for lease in expired:
                self._removed(lease.generation)
            self.counts["expired"] += len(expired)
            return expired

    def _removed(self, generation: int) -> Lease:
        lease = self._leases.pop(generation)
        for page in lease.pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
        self._changed.notify_all()
        return lease

    def _held(self, generation: int) -> Lease | None:
        lease = self._leases.get(generation)
        return lease if lease is not None and self._clock() < lease.expires else None
