"""Writes of pages from host memory to the tier below, and removals there.

A page is queued when a request that used it has released it: only then all its tokens were checked.
Writes are dropped if too many are queued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from nanovllm.kv.keys import Key
from nanovllm.plan import Write

MOST_WRITING = 16  # pages in writes that have not ended


class PageWrites:
    """Queue of pages by key, and the writes that have not ended. `counts` are those of the tier."""

    def __init__(self, most_queued: int, counts: Counter[str]) -> None:
        self._most_queued = most_queued
        self._counts = counts
        self._queued: dict[Key, None] = {}  # in order
        self._checked: set[Key] = set()  # to be queued once their store has ended
        self._running: dict[int, Write] = {}  # by ticket
        self._removed: dict[Key, None] = {}  # since the last Moves

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_queued(self) -> bool:
        """Return True if a write or a removal may start with the next plan."""
        return bool(self._removed) or (bool(self._queued) and len(self) < MOST_WRITING)

    @property
    def slots(self) -> list[int]:
        """The slots that are read."""
        return [write.slot for write in self._running.values()]

    def is_removed(self, key: Key) -> bool:
        """Return True if the content below is invalid and its removal has not started."""
        return key in self._removed

    def note_checked(self, keys: Iterable[Key], kept: Container[Key]) -> list[Key]:
        """Return the keys that may be queued now. The others follow after their stores."""
        if len(self._checked) > self._most_queued:
            self._checked.clear()  # most are of pages whose stores were dropped
        keys = list(keys)
        self._checked.update(key for key in keys if key not in kept)
        return [key for key in keys if key in kept]

    def is_checked(self, key: Key) -> bool:
        """Return True, once, if a stored page was noted before."""
        is_checked = key in self._checked
        self._checked.discard(key)
        return is_checked

    def is_running(self, key: Key) -> bool:
        return any(key == write.key for write in self._running.values())

    def queue(self, key: Key, *, can_write: bool) -> Key | None:
        """Queue a page. Return the key of a page that is dropped.

        This is the oldest of too many, or the page itself if the tier below cannot be written.
        """
        if not can_write:
            self._counts["disk.dropped"] += 1
            return key
        self._queued[key] = None
        if len(self._queued) <= self._most_queued:
            return None
        oldest = next(iter(self._queued))
        del self._queued[oldest]
        self._counts["disk.dropped"] += 1
        return oldest

    def next(self) -> Key | None:
        """Remove and return the first key if its write may start now."""
        if not self._queued or len(self) >= MOST_WRITING:
            return None
        key = next(iter(self._queued))
        del self._queued[key]
        return key

    def start(self, write: Write) -> None:
        self._running[write.ticket] = write

    def end(self, ticket: int, *, ok: bool) -> Write | None:
        """End a write and return it. Return None if the ticket is not that of a write."""
        if (write := self._running.pop(ticket, None)) is not None:
            self._counts["disk.stored" if ok else "disk.dropped"] += 1
        return write

    def remove(self, key: Key, *, is_below: bool) -> None:
        """Do not write the page. Remove what is below, or what a write in progress will leave."""
        self._queued.pop(key, None)
        self._checked.discard(key)
        if is_below or self.is_running(key):
            self._removed[key] = None

    def forget(self, key: Key) -> None:
        """Do not write a page that has left host memory."""
        self._queued.pop(key, None)

    def taken_removes(self) -> list[Key]:
        """Return the keys to remove since the last call."""
        removed, self._removed = self._removed, {}
        return [*removed]
