"""Slots of pages in host memory: free, kept under a key, or in a transfer.

A kept slot may be evicted, the least recently used first. A slot that a load or a write reads is
not evicted. If its key is removed meanwhile, it is an orphan: free after the last read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from nanovllm.kv.keys import Key


class HostSlots:
    """Slots 0..count - 1. `removed` is called with each key that is removed or evicted."""

    def __init__(
        self, count: int, counts: Counter[str], removed: Callable[[Key], None] = lambda _: None
    ) -> None:
        self.count = count
        self._counts = counts
        self._removed = removed
        self._kept: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free = list(range(count))[::-1]
        self._readers: Counter[int] = Counter()  # loads and writes by slot
        self._orphans: set[int] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __getitem__(self, key: Key) -> int:
        """Return the slot that is kept under a key."""
        return self._kept[key]

    @property
    def num_used(self) -> int:
        return self.count - len(self._free)

    @property
    def num_blank(self) -> int:
        """The maximum number of slots that `take` can return."""
        return len(self._free) + len(self._kept) - len(self._readers)

    def touch(self, keys: Iterable[Key]) -> None:
        """Count a use of kept slots. The last one is evicted last."""
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)

    def take(self) -> int:
        """Return a slot without content, or -1. If none is free, evict the least recently used."""
        if self._free:
            return self._free.pop()
        for key, slot in self._kept.items():  # those being read were used lately: they come last
            if slot not in self._readers:
                self.remove(key)
                self._counts["host.evicted"] += 1
                return self._free.pop()
        return -1

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots that `take` returned."""
        self._free += slots

    def keep(self, key: Key, slot: int) -> None:
        """Keep a slot that `take` returned under a key that has none."""
        assert key not in self._kept
        self._kept[key] = slot

    def remove(self, key: Key) -> None:
        slot = self._kept.pop(key)
        if slot in self._readers:
            self._orphans.add(slot)
        else:
            self._free.append(slot)
        self._removed(key)

    def begin_reads(self, keys: Iterable[Key]) -> list[int]:
        """Return the slots of kept keys. They are read until `end_read`."""
        slots = [self._kept[key] for key in keys]
        self._readers.update(slots)
        return slots

    def end_read(self, slot: int) -> None:
        self._readers[slot] -= 1
        if not self._readers[slot]:
            del self._readers[slot]
            if slot in self._orphans:
                self._orphans.remove(slot)
                self._free.append(slot)

    def check(self, read: Counter[int], taken: Iterable[int]) -> None:
        """Check that every slot is in one place. `read` and `taken` are those of all transfers."""
        assert read == self._readers and self._orphans <= set(read)
        places = [*self._free, *self._kept.values(), *taken, *self._orphans]
        assert sorted(places) == list(range(self.count)), "a slot is lost or in two places"
        assert set(read) <= {*self._kept.values(), *self._orphans}, "a read slot is free"
