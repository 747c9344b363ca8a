"""Changes of the pages that can be reused, as the step loop notes them.

KVMemory calls `filled` where it has a page's text, `registered` and `forgotten` where the page gets
and loses its key. After each step, `flush` passes the changes on in order. Nothing here depends on
their receiver; each call costs some dict and list operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from nanovllm.kv.keys import Key, PageKeys


class Registered(NamedTuple):
    """A full page, the page `page_index` of its text, can be found by `key`."""

    key: Key
    keys: PageKeys
    page_index: int


Forgotten = tuple[Key, ...]  # keys of one page that cannot be found any more
Change = Registered | Forgotten


class PageLog:
    """Changes since the last flush. Several memories of one engine may share it."""

    def __init__(
        self, send: Callable[[list[Change]], object], close: Callable[[], object] = lambda: None
    ) -> None:
        """`send` must not block. `close` ends its receiver."""
        self.close = close
        self._send = send
        self._places: dict[Key, tuple[PageKeys, int]] = {}  # of pages without a key so far
        self._changes: list[Change] = []

    def filled(self, keys: PageKeys, indices: Iterable[int]) -> None:
        """Note the texts of full pages that are about to be registered."""
        for index in indices:
            self._places[keys.full(index)] = keys, index

    def registered(self, key: Key) -> None:
        """Note that a page can be found. Partly filled pages were not `filled`, and are ignored."""
        if (place := self._places.pop(key, None)) is not None:
            self._changes.append(Registered(key, *place))

    def forgotten(self, keys: Forgotten) -> None:
        """Note that a page cannot be found any more, or will not be."""
        for key in keys:
            self._places.pop(key, None)
        self._changes.append(keys)

    def flush(self) -> None:
        if self._changes:
            changes, self._changes = self._changes, []
            self._send(changes)
