"""Pages on the device that wait for a store to host memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from nanovllm.kv.keys import Key


class StoreQueue:
    """Keys and pages in order. The oldest of more than `most` are dropped and counted."""

    def __init__(self, most: int, counts: Counter[str]) -> None:
        self._most = most
        self._counts = counts
        self._fresh: list[tuple[Key, int]] = []  # filled by the plan under construction
        self._queue: deque[tuple[Key, int]] = deque()  # filled by issued plans

    def __len__(self) -> int:
        return len(self._queue) + len(self._fresh)

    def note(self, key: Key, page: int, *, is_issued: bool) -> None:
        """Queue a registered page.

        `is_issued`: the plan that fills it has been issued, and is not the one under construction.
        """
        if not is_issued:
            self._fresh.append((key, page))
            return
        if len(self._queue) >= self._most:
            self._queue.popleft()
            self._counts["host.dropped"] += 1
        self._queue.append((key, page))

    def taken(self, room: int, is_needed: Callable[[Key], bool]) -> dict[Key, int]:
        """Remove and return up to `room` pages whose stores may start. Then queue the fresh ones.

        The pages that the present plan fills come later, since it has not been launched. They may
        also be in the queue, if they had the same text before.
        """
        stores: dict[Key, int] = {}
        unfilled = {key for key, _ in self._fresh}
        while self._queue and len(stores) < room:
            key, page = self._queue.popleft()
            if is_needed(key) and key not in unfilled:
                stores[key] = page
        fresh, self._fresh = self._fresh, []
        for key, page in fresh:
            if is_needed(key):
                self.note(key, page, is_issued=True)
        return stores
