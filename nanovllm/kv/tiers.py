"""Pages in host memory below the device's cache, as the scheduler sees them.

Theory of operation:

    1. note     a page has filled and is registered for reuse: queue it for a store
    2. store    when it will be evicted soon, copy it to a host slot; it is held until the copy ends
    3. find     only then the slot can be found, by the same key as the page
    4. load     a request that needs the page gets a blank one; a transfer fills it from the slot
    5. end      the page is registered; requests that wait for it (state ARRIVING) go on

    queued --start_store--> storing --end--> kept --start_load--> read by a load --end--> kept
                                              '--evicted: least recently used first--> free

Only keys, pages, slots and tickets are handled here. A transfer is a ticket that is reported ended
later, with or without success. Other sources of pages can thus use the same path.

Decision: pages are stored shortly before they are evicted (tests/load/tier_rules.py has measured
this beside other rules: results/tiers.md). `ahead` is the number of the device's pages that are
blank, or stored and evicted next. A request that needs more of them waits for their stores. Steps
never wait. Host memory then has pages that the device does not have. If each page were stored once
it has filled, the two would have the same pages, and an equally large host memory would be useless.

Decision: with a disk, `ahead` is None, and each page is stored once it has filled. Only pages in
host memory are written to the disk, where a restarted server finds them.

Decision: a load is all or nothing. If it fails, the request computes.

A tier below (a disk) extends this. A load may first fetch pages from it to host slots. Kept pages
are written to it when a request that used them has released them: only then all their tokens were
checked, and a page below may outlive the engine. Writes are dropped if too many are queued.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable

from msgspec.structs import replace

from nanovllm.kv.below import Below
from nanovllm.kv.costs import TransferCosts
from nanovllm.kv.host_slots import HostSlots
from nanovllm.kv.keys import Key, PageKeys
from nanovllm.kv.page_moves import PageLoad, PageStore
from nanovllm.kv.page_writes import PageWrites
from nanovllm.kv.store_queue import StoreQueue
from nanovllm.kv.tier_counts import with_zeros
from nanovllm.plan import Copies, Moved, Moves, Write

AHEAD = 1 / 8  # of the host slots: pages that are stored before they are evicted
MOST_STORING = 64  # pages in stores that have not ended; they cannot be evicted from the device


class HostTier:
    """Pages in host slots by key, and the transfers in progress.

    A slot that is neither free nor kept (host_slots.py) is the target of a store or of a fetch.
    `forget` is called with each key that is removed.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        page_bytes: int = 0,
        costs: TransferCosts | None = None,
        ahead: int | None = None,
        most_queued: int = 1 << 20,
        most_storing: int = MOST_STORING,
        below: Below | None = None,
    ) -> None:
        self.page_bytes = page_bytes
        self.costs = costs or TransferCosts()
        self.most_storing = most_storing
        self.ahead = ahead
        self.below = below
        self.forget: Callable[[Key], None] = lambda _: None
        self.loads: dict[int, PageLoad] = {}
        self.stores: dict[int, PageStore] = {}
        self._storing: dict[Key, PageStore] = {}
        self._unverified: set[Key] = set()  # keys whose content may contain NaN
        self._parts: set[Key] = set()  # of a state on its way to the disk
        self._ticket = 0
        self._moves = Moves([], [], [], [])
        self.counts: Counter[str] = Counter()  # the names are those of wire.Stats.tiers
        self._slots = HostSlots(num_slots, self.counts, self._removed)
        self.queue = StoreQueue()
        self._writes = PageWrites(most_queued, self.counts)
        self.seconds = {"store": 0.0, "load": 0.0}

    # -- lookup -----------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        return self._slots.count

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def following(self, keys: PageKeys, first: int, end: int) -> list[Key]:
        """Return the keys of pages of a text, from index `first` on, up to the first gap.

        They are kept here, or on the tier below if it can be read and slots for them can be had.
        """
        keys_below: list[Key] = []
        num_fetched = 0
        room = self._slots.num_blank if self.below else 0
        for index in range(first, end):
            key = keys.full(index)
            room -= 1  # a kept page of the load cannot be evicted, a fetched one needs a slot
            is_kept = key in self._slots
            if room < 0 and (num_fetched or not is_kept):
                break
            if not is_kept and not self._is_in(self.below, key):
                break
            num_fetched += not is_kept
            keys_below.append(key)
        return keys_below

    def state_keys(self, end: Key, num_pages: int) -> list[Key]:
        """Return the keys of the parts of the state after the page of key `end`.

        Return an empty list if it is not below, or if there are too few slots for `num_pages` more.
        """
        parts = [] if self.below is None else self.below.state_keys(end)
        is_valid = not any(map(self._writes.is_removed, parts))
        return parts if is_valid and len(parts) + num_pages <= self._slots.num_blank else []

    def _is_in(self, below: Below | None, key: Key) -> bool:
        if below is None or key in self._storing or self._writes.is_removed(key):
            return False
        return below.holds(key)

    def _is_remote(self, key: Key) -> bool:
        return self.below is not None and self.below.has_remote([key])

    @property
    def disk(self) -> Below | None:
        """The disk, to which pages are written."""
        return None if self.below is None else self.below.writable

    @property
    def can_write(self) -> bool:
        """Return True if there is a disk that can be written at present."""
        return self.disk is not None and self.disk.can_write

    def num_fetched(self, keys: Iterable[Key]) -> int:
        """Return the number of pages that are not kept in host memory."""
        return sum(key not in self._slots for key in keys)

    def is_worth(self, num_tokens: int, keys: list[Key]) -> bool:
        """Return True if these pages arrive sooner than the tokens could be computed.

        Without keys, only the loads in progress count.
        """
        if self.below is not None and self.below.has_remote(
            k for k in keys if k not in self._slots
        ):
            return True
        pages = len(keys) + sum(len(load.pages) for load in self.loads.values())
        fetched = self.num_fetched(keys) + sum(len(load.fetched) for load in self.loads.values())
        return self.costs.is_worth(num_tokens, pages, fetched)

    def awaited(self, keys: PageKeys, end: int, before: int, page_tokens: int) -> int:
        """Return the ticket of a load in progress that a request should wait for, or 0.

        The load brings pages of the first `end` ones of its text. `before` is the ticket that the
        request has waited for, or 0: no request waits for a second one.

        Pages of another engine are always worth it, as in `is_worth`, also for a request that has
        waited before. They can be read once, so a second load of them would fail.
        """
        for ticket, load in self.loads.items():
            most = min(end - load.first, len(load.keys))
            if most < 1 or load.is_void:
                continue
            at = range(most)
            shared = bisect_left(at, True, key=lambda i: keys.full(load.first + i) != load.keys[i])
            is_remote = not load.remote.isdisjoint(load.keys[:shared])
            may_wait = before in (0, ticket)
            if is_remote or (may_wait and shared and self.is_worth(shared * page_tokens, [])):
                return ticket
        return 0

    def touch(self, keys: Iterable[Key]) -> None:
        """Count a use of kept pages. The last one is evicted last."""
        self._slots.touch(keys)

    # -- stores -----------------------------------------------------------------------------

    def note(self, key: Key, page: int, *, is_issued: bool) -> None:
        """Queue a registered page for a store; see StoreQueue.note."""
        if self.num_slots and self.is_needed(key):
            self.queue.note(key, page, is_issued=is_issued)

    def is_needed(self, key: Key) -> bool:
        return key not in self._slots and key not in self._storing

    @property
    def has_writes(self) -> bool:
        """Return True if a write may start with the next plan."""
        return self._writes.has_queued

    @property
    def num_storing(self) -> int:
        """The number of pages in stores that have not ended."""
        return sum(len(store.pages) for store in self.stores.values())

    def taken_candidates(self, most: int) -> dict[Key, int]:
        """Remove and return up to `most` queued pages whose stores may start now."""
        return self.queue.taken(most, self.is_needed)

    def start_store(self, pages: dict[Key, int], unverified: set[int]) -> list[int]:
        """Start a store of registered pages. Return those that have got a slot.

        The caller holds these until the transfer ends. `unverified` pages may contain NaN.
        """
        store = PageStore([], [], [])
        for key, page in pages.items():
            if (slot := self._slots.take()) < 0:
                self.counts["host.dropped"] += 1
                continue
            store.keys.append(key)
            store.pages.append(page)
            store.slots.append(slot)
            self._storing[key] = store
            if page in unverified:
                self._unverified.add(key)
        if store.pages:
            self._ticket += 1
            self.stores[self._ticket] = store
            pairs = list(zip(store.pages, store.slots, strict=True))
            self._moves.stores.append(Copies(self._ticket, pairs))
        return store.pages

    def has_state(self, key: Key) -> bool:
        """Return True if the state after a page is on the disk, or on its way there."""
        assert self.disk is not None
        first = self.disk.keys_of_parts(key)[0]
        return first in self._storing or first in self._slots or self._is_in(self.disk, first)

    @property
    def may_store_state(self) -> bool:
        """Return True if no other state is being stored or written, and the disk is in use."""
        return not self._parts and self.can_write

    def start_state_store(self, key: Key, checkpoint: int) -> int:
        """Start to store the checkpoint after a page, and then to write it to the disk.

        Return the ticket of the store, or 0 if there are too few slots. The caller holds the
        checkpoint until the store ends.
        """
        assert self.disk is not None
        parts = self.disk.keys_of_parts(key)
        if len(parts) > self._slots.num_blank:
            self.counts["disk.dropped"] += len(parts)
            return 0
        store = PageStore(keys=parts, pages=[], slots=[self._slots.take() for _ in parts])
        self._storing |= dict.fromkeys(parts, store)
        self._parts.update(parts)
        self._writes.note_checked(parts, ())
        self._ticket += 1
        self.stores[self._ticket] = store
        pairs = list(zip(parts, store.slots, strict=True))
        copies = Copies(self._ticket, [], state_fetches=pairs, state_to=checkpoint)
        self._moves.stores.append(copies)
        return self._ticket

    def end_store(self, ticket: int, *, ok: bool) -> list[int]:
        """End a store, and return its pages, which the caller drops. Its slots are found now."""
        store = self.stores.pop(ticket)
        for key, slot in zip(store.keys, store.slots, strict=True):
            del self._storing[key]
            if ok and key not in store.void and key not in self._slots:
                self._slots.keep(key, slot)
                self.counts["host.stored"] += 1
                if self._writes.is_checked(key):
                    self._queue_write(key)
            else:
                self._slots.give_back([slot])
                self._parts.discard(key)
                if key not in self._slots:
                    self._unverified.discard(key)
        self._moves.ended.append(ticket)
        return store.pages

    # -- loads ------------------------------------------------------------------------------

    def start_load(
        self,
        request_id: int,
        first: int,
        keys: list[Key],
        pages: list[int],
        *,
        state_keys: Iterable[Key] = (),
        state_to: int = -1,
    ) -> int:
        """Start a load of pages that `following` returned to blank ones. Return its ticket.

        With `state_keys`, the load also brings a state, to a checkpoint.
        """
        self.touch(reversed(keys))
        self._slots.begin_reads(key for key in keys if key in self._slots)
        fetched = {key: self._slots.take() for key in keys if key not in self._slots}
        state = {key: self._slots.take() for key in state_keys}
        assert -1 not in (*fetched.values(), *state.values()), "no slot for a part of a load"
        slots = [fetched[key] if key in fetched else self._slots[key] for key in keys]
        self._ticket += 1
        load = self.loads[self._ticket] = PageLoad(
            request_id=request_id,
            first=first,
            keys=keys,
            pages=pages,
            slots=slots,
            fetched=fetched,
            state=state,
            state_to=state_to,
            remote=frozenset(key for key in (*fetched, *state) if self._is_remote(key)),
        )
        self._moves.loads.append(load.copies(self._ticket))
        return self._ticket

    def end_load(
        self, ticket: int, *, ok: bool, blank: Container[int] = ()
    ) -> tuple[PageLoad, bool]:
        """End a load. Return it, and True if its pages have their content.

        `blank` are slots of fetches that have none.
        """
        load = self.loads.pop(ticket)
        fetched = set(load.fetched.values())
        own = [slot for slot in load.slots if slot not in fetched]
        for slot in own:
            self._slots.end_read(slot)
        for key, slot in load.fetched.items():
            is_new = self.is_needed(key)
            if ok and not load.is_void and is_new and slot not in blank:
                self._slots.keep(key, slot)
            else:
                self._slots.give_back([slot])
        self._slots.give_back(load.state.values())
        self._moves.ended.append(ticket)
        if ok:
            self.counts["host.loaded"] += len(own)
            for source, num_pages in load.num_by_source.items():
                self.counts[f"{source}.loaded"] += num_pages
        elif load.fetched or load.state:
            self.counts[f"{load.source}.failed"] += 1
        else:
            self.counts["host.failed"] += 1
            for key in load.keys:
                self.invalidate(key)
        return load, ok and not load.is_void

    def abandon(self, request_id: int) -> set[int]:
        """Return the pages that a load still writes for a request that leaves. They stay held."""
        for load in self.loads.values():
            if load.request_id == request_id:
                load.request_id = -1
                return set(load.pages)
        return set()

    def measured(self, moved: Moved, num_pages: int, *, is_load: bool) -> None:
        """Count the bytes and the time of a transfer."""
        kind = "load" if is_load else "store"
        if is_load:
            load = self.loads[moved.ticket]
            num_pages += len(load.state)
            num_fetched = (len(load.fetched) + len(load.state)) * (moved.fetch_s > 0)
            if num_fetched and (load.source == "disk" or self.disk is None):
                self.costs.fetched(num_fetched, moved.fetch_s)
        self.counts[f"host.{kind}_bytes"] += moved.num_bytes
        self.seconds[kind] += moved.seconds
        if is_load and moved.ok and num_pages > len(moved.blank):
            self.costs.loaded(num_pages - len(moved.blank), moved.seconds)

    # -- writes to the tier below -----------------------------------------------------------

    def note_checked(self, keys: Iterable[Key]) -> None:
        """Queue pages for a write whose tokens have all been checked."""
        if self.disk is None:
            return
        for key in self._writes.note_checked(keys, self._slots):
            self._queue_write(key)

    def _queue_write(self, key: Key) -> None:
        unneeded: Key | None = key
        is_known = self._writes.is_running(key) or self._is_in(self.disk, key)
        if key not in self._unverified and not is_known:
            unneeded = self._writes.queue(key, can_write=self.can_write)
        if unneeded in self._parts:
            self._slots.remove(unneeded)

    def start_writes(self) -> None:
        """Start queued writes. Their slots are read until they end."""
        while (key := self._writes.next()) is not None:
            if key not in self._slots or key in self._unverified:
                continue
            self._ticket += 1
            [slot] = self._slots.begin_reads([key])
            write = Write(self._ticket, slot, key)
            self._writes.start(write)
            self._moves.writes.append(write)

    def end_write(self, ticket: int, *, ok: bool) -> bool:
        """End a write. Return False if the ticket is not that of a write."""
        if (write := self._writes.end(ticket, ok=ok)) is None:
            return False
        self._slots.end_read(write.slot)
        self._moves.ended.append(ticket)
        if write.key in self._parts:  # the checkpoint is kept on the device
            self._slots.remove(write.key)
        return True

    # -- content ----------------------------------------------------------------------------

    def mark_unverified(self, key: Key) -> None:
        """Note that the content under a key may contain NaN."""
        if key in self._slots or key in self._storing:
            self._unverified.add(key)

    def is_unverified(self, key: Key) -> bool:
        return key in self._unverified

    def invalidate(self, key: Key) -> None:
        """Remove a page and its state, also from transfers in progress and the disk."""
        parts = [] if self.disk is None else self.disk.keys_of_parts(key)
        for one in (key, *parts):
            self._invalidate(one)

    def remove_below(self, keys: Iterable[Key]) -> None:
        """Remove pages from the disk of all ranks, since a rank could not read its share."""
        for key in keys:
            self._writes.remove(key, is_below=self.disk is not None and self.disk.is_listed(key))

    def _invalidate(self, key: Key) -> None:
        self.remove_below([key])
        self.queue.remove(key)
        if (store := self._storing.get(key)) is not None:
            store.void.add(key)
        for load in self.loads.values():
            load.is_void = load.is_void or key in load.keys
        if key in self._slots:
            self._slots.remove(key)

    def _removed(self, key: Key) -> None:
        self._unverified.discard(key)
        self._parts.discard(key)
        self._writes.forget(key)
        self.forget(key)

    # -- plans ------------------------------------------------------------------------------

    @property
    def num_moving(self) -> int:
        """The number of transfers that have not ended."""
        return len(self.stores) + len(self.loads) + len(self._writes)

    def taken_moves(self) -> Moves | None:
        """Return the transfers that start, and those that have ended, since the last call."""
        moves, removes = self._moves, self._writes.taken_removes()
        if not (moves.ended or moves.stores or moves.loads or moves.writes or removes):
            return None
        self._moves = Moves([], [], [], [])
        return replace(moves, removes=removes)

    def stats(self) -> dict[str, float]:
        """Return wire.Stats.tiers without the number of arriving requests."""
        stats = {
            **self.counts,
            "host.pages": self.num_slots,
            "host.pages_used": self._slots.num_used,
            "host.page_bytes": self.page_bytes,
            "host.queued": len(self.queue),
            "host.loading": sum(len(load.pages) for load in self.loads.values()),
            "host.store_s": self.seconds["store"],
            "host.load_s": self.seconds["load"],
        }
        return with_zeros(stats, self.below)

    def check(self) -> None:
        stored = [slot for store in self.stores.values() for slot in store.slots]
        fetched = [slot for load in self.loads.values() for slot in load.fetched.values()]
        loaded = [slot for load in self.loads.values() for slot in load.slots]
        reading = Counter(self._writes.slots)
        reading += Counter(loaded) - Counter(fetched)
        parts = [slot for load in self.loads.values() for slot in load.state.values()]
        self._slots.check(reading, (*stored, *fetched, *parts))
        assert all(key in self._slots or key in self._storing for key in self._unverified)
