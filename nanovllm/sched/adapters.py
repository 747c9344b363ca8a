"""Adapters by name, and those on the device: slots and pages, least recently used first.

A page of adapter memory holds RANK_PAGE LoRA ranks of one adapter (adapters/section.py).

Theory of operation:

    1. load      give an adapter a number, that of its load; a later load of the name gets another
    2. resolve   return the number for a new request
    3. take      at admission: put the adapter in a slot, unless it has one; evict unused ones
    4. give      a request left its slot of the batch; the adapter stays until it is evicted
    5. unload    forget the name; requests that have the number go on

The base model has the number 0.

Decision: the keys of cached pages depend on a digest of the adapter's files, never on its name or
number. So a reloaded adapter with other bytes shares no page with the former one of its name. Pages
on disk stay valid after a restart, and other servers with the same adapter can read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nanovllm.adapters.section import Adapters, num_pages_of, num_rank_pages
from nanovllm.plan import AdapterContent, AdapterLoad

BASE = 0  # the number of requests without an adapter


@dataclass(slots=True)
class Resident:
    """An adapter on the device."""

    slot: int
    pages: list[int]
    num_users: int = 0  # requests in slots of the batch


class AdapterSlots:
    """Host-side state of all adapters. Without arguments there are none."""

    def __init__(self, num_slots: int = 0, num_pages: int = 0) -> None:
        self.num_slots = num_slots
        self.by_name: dict[str, int] = {}  # number of the latest load
        self._contents: dict[int, AdapterContent] = {}  # by number
        self._residents: dict[int, Resident] = {}  # by number, the least recently used first
        self._free_slots = list(range(num_slots))[::-1]
        self._free_pages = list(range(num_pages))[::-1]
        self._num_loads = 0
        self._loads: list[AdapterLoad] = []  # of adapters taken after the latest plan

    def new_number(self) -> int:
        """Return the number of the next load."""
        self._num_loads += 1
        return self._num_loads

    def load(self, name: str, number: int, content: AdapterContent) -> None:
        """Name a load, in place of an earlier adapter of the same name."""
        self.by_name[name] = number
        self._contents[number] = content

    def unload(self, name: str) -> None:
        del self.by_name[name]

    def forget(self, in_use: Iterable[int]) -> list[int]:
        """Remove adapters without a name that are not in use, and return their numbers."""
        in_memory = {*self.by_name.values(), *in_use}
        gone = [number for number in self._contents if number not in in_memory]
        for number in gone:
            del self._contents[number]
            if number in self._residents:
                self._evict(number)
        return gone

    def resolve(self, name: str) -> int | None:
        """Return the number for a request, BASE without a name; None if there is no such name."""
        return self.by_name.get(name) if name else BASE

    def page_key(self, number: int) -> bytes:
        """Return the digest that keys of cached pages depend on; empty for the base model."""
        return b"" if number == BASE else self._contents[number].digest

    def has_room_for(self, number: int) -> bool:
        """Return False if all slots, or pages that the adapter lacks, have adapters in use."""
        if number == BASE or number in self._residents:
            return True
        return self._to_evict(number) is not None

    def take(self, number: int) -> None:
        """Note a request in a slot of the batch, and put its adapter on the device.

        has_room_for() must be true.
        """
        if number == BASE:
            return
        if number not in self._residents:
            for other in self._to_evict(number) or ():
                self._evict(other)
            count = num_pages_of(self._contents[number].rank)
            # In ascending order, so that the order of a sum over ranks is always the same.
            pages = sorted(self._free_pages.pop() for _ in range(count))
            self._residents[number] = Resident(self._free_slots.pop(), pages)
            self._loads.append(AdapterLoad(number, self._residents[number].slot, pages))
        self._residents[number].num_users += 1

    def slot(self, number: int) -> int:
        """Return the slot of an adapter in use. That of the base model is -1."""
        return -1 if number == BASE else self._residents[number].slot

    def taken_loads(self) -> list[AdapterLoad]:
        """Return the loads that the next plan must do first, and clear the list.

        A request that waits for a transfer may have taken its adapter before there is a plan.
        """
        loads, self._loads = self._loads, []
        return loads

    def give(self, number: int) -> None:
        """Note that a request with this adapter has left its slot of the batch."""
        if number != BASE:
            resident = self._residents.pop(number)
            resident.num_users -= 1
            self._residents[number] = resident  # now the most recently used

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """Return the number of requests by adapter. `names` are those of the requests."""
        counts = Counter(names)
        return {name: counts[name] for name in self.by_name}

    def slot_counts(self) -> dict[str, int]:
        """Return the number of slots by state, as Stats.adapter_slots; empty without slots."""
        if not self.num_slots:
            return {}
        in_use = {number for number, one in self._residents.items() if one.num_users}
        named = in_use.union(self.by_name.values())  # slots of unloaded adapters are free to use
        loaded = len(self._residents.keys() & named)
        return {"capacity": self.num_slots, "loaded": loaded, "in_use": len(in_use)}

    def _evict(self, number: int) -> None:
        evicted = self._residents.pop(number)
        # Its load may still wait for a plan. Done after all, it would take pages of the next one.
        self._loads = [load for load in self._loads if load.number != number]
        self._free_slots.append(evicted.slot)
        self._free_pages += evicted.pages

    def _to_evict(self, number: int) -> list[int] | None:
        """Return the unused adapters that must leave for this one; None if they do not suffice."""
        slots, pages = len(self._free_slots), len(self._free_pages)
        needed, evicted = num_pages_of(self._contents[number].rank), list[int]()
        for other, resident in self._residents.items():
            if slots and pages >= needed:
                break
            if not resident.num_users:
                evicted.append(other)
                slots, pages = slots + 1, pages + len(resident.pages)
        return evicted if slots and pages >= needed else None

    def check(self, users: Iterable[int]) -> None:
        """Assert the invariants. `users` are the numbers of all requests in slots."""
        counts = Counter(number for number in users if number != BASE)
        assert counts == {n: one.num_users for n, one in self._residents.items() if one.num_users}
        pages = [page for one in self._residents.values() for page in one.pages]
        assert len({*pages, *self._free_pages}) == len(pages) + len(self._free_pages)


def adapter_slots(options: Adapters | None, contents: Mapping[str, AdapterContent]) -> AdapterSlots:
    """Return the state of a resolved recipe's adapters, with those of the start loaded.

    `contents` are those of the start by name, in the order of their numbers.
    """
    if options is None:
        return AdapterSlots()
    ranks = [content.rank for content in contents.values()]
    slots = AdapterSlots(options.slots, num_rank_pages(options, ranks))
    for name, content in contents.items():
        slots.load(name, slots.new_number(), content)
    return slots
