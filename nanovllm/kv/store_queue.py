"""Pages on the device that are registered for reuse and are not in host memory."""

from __future__ import annotations

from collections.abc import Callable

from nanovllm.kv.keys import Key


class StoreQueue:
    """Pages by key, in the order in which they were noted. A page is removed when it is evicted."""

    def __init__(self) -> None:
        self._fresh: dict[Key, int] = {}  # filled by the plan under construction
        self._queue: dict[Key, int] = {}  # filled by issued plans

    def __len__(self) -> int:
        return len(self._queue) + len(self._fresh)

    def __contains__(self, key: Key) -> bool:
        """Return True if a page is queued whose store may start now."""
        return key in self._queue

    def note(self, key: Key, page: int, *, is_issued: bool) -> None:
        """Queue a registered page. Of equal pages, the first one stays.

        `is_issued`: the plan that fills it has been issued, and is not the one under construction.
        """
        queue = self._queue if is_issued else self._fresh
        queue.setdefault(key, page)

    def remove(self, key: Key) -> bool:
        """Remove a page. Return False if it is not queued."""
        is_fresh = self._fresh.pop(key, None) is not None
        return self._queue.pop(key, None) is not None or is_fresh

    def taken(self, room: int, is_needed: Callable[[Key], bool]) -> dict[Key, int]:
        """Remove and return up to `room` pages whose stores may start. Then queue the fresh ones.

        The pages that the present plan fills come later, since it has not been launched.
        """
        stores: dict[Key, int] = {}
        while self._queue and len(stores) < room:
            key = next(iter(self._queue))
            page = self._queue.pop(key)
            if is_needed(key):
                stores[key] = page
        for key, page in self._fresh.items():
            if is_needed(key) and key not in stores:
                self._queue.setdefault(key, page)
        self._fresh.clear()
        return stores
