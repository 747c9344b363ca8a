"""Pages in host memory below the device's cache, as the scheduler sees them.

Theory of operation:

    1. note     a page has filled and is registered for reuse: queue it for a store
    2. store    a later plan copies it to a host slot; the page is held until the copy has ended
    3. find     only then the slot can be found, by the same key as the page
    4. load     a request that needs the page gets a blank one; a transfer fills it from the slot
    5. end      the page is registered; requests that wait for it (state ARRIVING) go on

    queued --start_store--> storing --end--> kept --start_load--> read by a load --end--> kept
                                              '--evicted: least recently used first--> free

Only keys, pages, slots and tickets are handled here. A transfer is a ticket that is reported ended
later, with or without success. Other sources of pages can thus use the same path.

Decision: write through. A page is stored soon after it was registered, and not when it is evicted.
An eviction needs the page at once, so the step would wait for the copy. The copies of new pages
take a few percent of the bus, and a preempted request finds its pages. The cost is that pages are
stored which are never evicted.

Decision: a load is all or nothing. If it fails, the request computes.

A tier below (a disk) extends this. A load may first fetch pages from it to host slots. Kept pages
are written to it when a request that used them has released them: only then all their tokens were
checked, and a page below may outlive the engine. Writes are dropped if too many are queued.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

from nanovllm.kv.below import Below
from nanovllm.kv.costs import TransferCosts
from nanovllm.kv.keys import Key, PageKeys
from nanovllm.kv.page_moves import PageLoad, PageStore
from nanovllm.plan import Copies, Moved, Moves, Write

MOST_STORING = 64  # pages in stores that have not ended; they cannot be evicted from the device
MOST_WRITING = 16  # pages in writes to the tier below that have not ended
COUNTERS = (
    "asked_tokens",
    "gpu.hit_tokens",
    "host.hit_tokens",
    "host.stored",
    "host.loaded",
    "host.dropped",
    "host.evicted",
    "host.failed",
    "host.declined",
    "host.store_bytes",
    "host.load_bytes",
    "disk.hit_tokens",
    "disk.stored",
    "disk.loaded",
    "disk.dropped",
    "disk.failed",
)  # of wire.Stats.tiers


class HostTier:
    """Host slots by page key, and the transfers in progress.

    Every slot is free, kept under a key, the target of a store or of a fetch, or an orphan:
    forgotten while a load or a write still reads it. `forget` is called with each removed key.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        page_bytes: int = 0,
        costs: TransferCosts | None = None,
        most_queued: int = 1 << 20,
        most_storing: int = MOST_STORING,
        below: Below | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.page_bytes = page_bytes
        self.costs = costs or TransferCosts()
        self.most_queued = most_queued
        self.most_storing = most_storing
        self.below = below
        self.forget: Callable[[Key], None] = lambda _: None
        self.loads: dict[int, PageLoad] = {}
        self.stores: dict[int, PageStore] = {}
        self._writes: dict[int, tuple[Key, int]] = {}  # key and slot, by ticket
        self._to_write: dict[Key, None] = {}  # in order
        self._checked: set[Key] = set()  # to be written once their store has ended
        self._kept: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free = list(range(num_slots))[::-1]
        self._readers: Counter[int] = Counter()  # loads and writes by slot
        self._orphans: set[int] = set()
        self._storing: dict[Key, PageStore] = {}
        self._unverified: set[Key] = set()  # keys whose content may contain NaN
        self._fresh: list[tuple[Key, int]] = []  # filled by the plan under construction
        self._queue: deque[tuple[Key, int]] = deque()  # filled by issued plans
        self._ticket = 0
        self._moves = Moves([], [], [], [])
        self.counts: Counter[str] = Counter()  # the names are those of wire.Stats.tiers
        self.seconds = {"store": 0.0, "load": 0.0}

    # -- lookup -----------------------------------------------------------------------------

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def following(self, keys: PageKeys, first: int, end: int) -> list[Key]:
        """Return the keys of pages of a text, from index `first` on, up to the first gap.

        They are kept here, or on the tier below if it can be read and slots for them can be had.
        """
        found: list[Key] = []
        num_fetched = 0
        room = self._num_blank() if self.below else 0
        for index in range(first, end):
            key = keys.full(index)
            room -= 1  # a kept page of the load cannot be evicted, a fetched one needs a slot
            is_kept = key in self._kept
            if room < 0 and (num_fetched or not is_kept):
                break
            if not is_kept and not self._is_below(key):
                break
            num_fetched += not is_kept
            found.append(key)
        return found

    def _num_blank(self) -> int:
        """Return how many slots `_blank_slot` can return at most."""
        return len(self._free) + len(self._kept) - len(self._readers)

    def state_keys(self, end: Key, num_pages: int) -> list[Key]:
        """Return the keys of the parts of the state after the page of key `end`.

        Return an empty list if the tier below has no such state, or there are too few slots for it
        and `num_pages` that are loaded with it.
        """
        parts = [] if self.below is None else self.below.state_keys(end)
        return parts if len(parts) + num_pages <= self._num_blank() else []

    def _is_below(self, key: Key) -> bool:
        return self.below is not None and key not in self._storing and self.below.holds(key)

    def num_fetched(self, keys: Iterable[Key]) -> int:
        """Return the number of pages that are not kept in host memory."""
        return sum(key not in self._kept for key in keys)

    def is_worth(self, num_tokens: int, keys: list[Key]) -> bool:
        """Return True if these pages arrive sooner than the tokens could be computed.

        Without keys, only the loads in progress count.
        """
        if self.below is not None and self.below.is_remote and self.num_fetched(keys):
            return True
        pages = len(keys) + sum(len(load.pages) for load in self.loads.values())
        fetched = self.num_fetched(keys) + sum(len(load.fetched) for load in self.loads.values())
        return self.costs.is_worth(num_tokens, pages, fetched)

    def awaited(self, keys: PageKeys, end: int, before: int, page_tokens: int) -> int:
        """Return the ticket of a load in progress that a request should wait for, or 0.

        The load brings pages of the first `end` ones of its text. `before` is the ticket that the
        request has waited for, or 0: no request waits for a second one.
        """
        for ticket, load in self.loads.items():
            most = min(end - load.first, len(load.keys))
            if before not in (0, ticket) or most < 1 or load.is_void:
                continue
            at = range(most)
            shared = bisect_left(at, True, key=lambda i: keys.full(load.first + i) != load.keys[i])
            if shared and self.is_worth(shared * page_tokens, []):
                return ticket
        return 0

    def touch(self, keys: Iterable[Key]) -> None:
        """Count a use of kept pages. The last one is evicted last."""
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)

    # -- stores -----------------------------------------------------------------------------

    def note(self, key: Key, page: int, *, is_issued: bool) -> None:
        """Queue a registered page for a store. Drop the oldest of too many.

        `is_issued`: the plan that fills it has been issued, and is not the one under construction.
        """
        if key in self._kept or key in self._storing or not self.num_slots:
            return
        if not is_issued:
            self._fresh.append((key, page))
            return
        if len(self._queue) >= self.most_queued:
            self._queue.popleft()
            self.counts["host.dropped"] += 1
        self._queue.append((key, page))

    @property
    def has_queued(self) -> bool:
        """Return True if a store or a write may start with the next plan."""
        may_store = bool(self._queue or self._fresh) and self._room() > 0
        return may_store or (bool(self._to_write) and len(self._writes) < MOST_WRITING)

    def _room(self) -> int:
        return self.most_storing - sum(len(store.pages) for store in self.stores.values())

    def taken_candidates(self) -> dict[Key, int]:
        """Remove and return queued pages whose stores may start now. Then queue the fresh ones.

        The pages that the present plan fills come later, since it has not been launched. They may
        also be in the queue, if they had the same text before.
        """
        found: dict[Key, int] = {}
        room, unfilled = self._room(), {key for key, _ in self._fresh}
        while self._queue and len(found) < room:
            key, page = self._queue.popleft()
            if key not in self._kept and key not in self._storing and key not in unfilled:
                found[key] = page
        fresh, self._fresh = self._fresh, []
        for key, page in fresh:
            self.note(key, page, is_issued=True)
        return found

    def start_store(self, pages: dict[Key, int], unverified: set[int]) -> list[int]:
        """Start a store of registered pages. Return those that have got a slot.

        The caller holds these until the transfer ends. `unverified` pages may contain NaN.
        """
        store = PageStore([], [], [])
        for key, page in pages.items():
            if (slot := self._blank_slot()) < 0:
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

    def _blank_slot(self) -> int:
        """Return a slot without content, or -1. If none is free, evict the least recently used."""
        if self._free:
            return self._free.pop()
        for key, slot in self._kept.items():  # those being read were used lately: they come last
            if slot not in self._readers:
                self._remove(key)
                self.counts["host.evicted"] += 1
                return self._free.pop()
        return -1

    def end_store(self, ticket: int, *, ok: bool) -> list[int]:
        """End a store, and return its pages, which the caller drops. Its slots are found now."""
        store = self.stores.pop(ticket)
        for key, slot in zip(store.keys, store.slots, strict=True):
            del self._storing[key]
            if ok and key not in store.void and key not in self._kept:
                self._kept[key] = slot
                self.counts["host.stored"] += 1
                if key in self._checked:
                    self._queue_write(key)
            else:
                self._free.append(slot)
                if key not in self._kept:
                    self._unverified.discard(key)
            self._checked.discard(key)
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
        self._readers.update(self._kept[key] for key in keys if key in self._kept)
        fetched = {key: self._blank_slot() for key in keys if key not in self._kept}
        state = {key: self._blank_slot() for key in state_keys}
        assert -1 not in (*fetched.values(), *state.values()), "no slot for a part of a load"
        slots = [fetched[key] if key in fetched else self._kept[key] for key in keys]
        self._ticket += 1
        self.loads[self._ticket] = PageLoad(
            request_id=request_id,
            first=first,
            keys=keys,
            pages=pages,
            slots=slots,
            fetched=fetched,
            state=state,
            state_to=state_to,
        )
        pairs = list(zip(slots, pages, strict=True))
        copies = Copies(
            self._ticket,
            pairs,
            fetches=[*fetched.items()],
            state_fetches=[*state.items()],
            state_to=state_to,
        )
        self._moves.loads.append(copies)
        return self._ticket

    def end_load(self, ticket: int, *, ok: bool) -> tuple[PageLoad, bool]:
        """End a load. Return it, and True if its pages have their content."""
        load = self.loads.pop(ticket)
        fetched = set(load.fetched.values())
        own = [slot for slot in load.slots if slot not in fetched]
        for slot in own:
            self._end_read(slot)
        for key, slot in load.fetched.items():
            if ok and not load.is_void and key not in self._kept and key not in self._storing:
                self._kept[key] = slot
            else:
                self._free.append(slot)
        self._free += load.state.values()
        self._moves.ended.append(ticket)
        if ok:
            self.counts["host.loaded"] += len(own)
            self.counts["disk.loaded"] += len(load.fetched)
        elif load.fetched or load.state:
            self.counts["disk.failed"] += 1
        else:
            self.counts["host.failed"] += 1
            for key in load.keys:
                self.invalidate(key)
        return load, ok and not load.is_void

    def _end_read(self, slot: int) -> None:
        self._readers[slot] -= 1
        if not self._readers[slot]:
            del self._readers[slot]
            if slot in self._orphans:
                self._orphans.remove(slot)
                self._free.append(slot)

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
        if moved.fetch_s and (num_fetched := len(self.loads[moved.ticket].fetched)):
            self.costs.fetched(num_fetched, moved.fetch_s)
        self.counts[f"host.{kind}_bytes"] += moved.num_bytes
        self.seconds[kind] += moved.seconds
        if is_load and moved.ok and num_pages:
            self.costs.loaded(num_pages, moved.seconds)

    # -- writes to the tier below -----------------------------------------------------------

    def note_checked(self, keys: Iterable[Key]) -> None:
        """Queue pages for a write whose tokens have all been checked."""
        if self.below is None or self.below.is_remote:
            return
        if len(self._checked) > self.most_queued:
            self._checked.clear()  # most are of pages whose stores were dropped
        for key in keys:
            if key in self._kept:
                self._queue_write(key)
            else:
                self._checked.add(key)

    def _queue_write(self, key: Key) -> None:
        is_written = any(key == other for other, _ in self._writes.values())
        if key in self._unverified or is_written or self._is_below(key):
            return
        self._to_write[key] = None
        if len(self._to_write) > self.most_queued:
            del self._to_write[next(iter(self._to_write))]
            self.counts["disk.dropped"] += 1

    def start_writes(self) -> None:
        """Start queued writes. Their slots are read until they end."""
        while self._to_write and len(self._writes) < MOST_WRITING:
            key = next(iter(self._to_write))
            del self._to_write[key]
            if (slot := self._kept.get(key, -1)) < 0 or key in self._unverified:
                continue
            self._ticket += 1
            self._readers[slot] += 1
            self._writes[self._ticket] = key, slot
            self._moves.writes.append(Write(self._ticket, slot, key))

    def end_write(self, ticket: int, *, ok: bool) -> bool:
        """End a write. Return False if the ticket is not that of a write."""
        if ticket not in self._writes:
            return False
        self._end_read(self._writes.pop(ticket)[1])
        self._moves.ended.append(ticket)
        self.counts["disk.stored" if ok else "disk.dropped"] += 1
        return True

    # -- content ----------------------------------------------------------------------------

    def mark_unverified(self, key: Key) -> None:
        """Note that the content under a key may contain NaN."""
        if key in self._kept or key in self._storing:
            self._unverified.add(key)

    def is_unverified(self, key: Key) -> bool:
        return key in self._unverified

    def invalidate(self, key: Key) -> None:
        """Remove the content under a key, also from transfers in progress."""
        if (store := self._storing.get(key)) is not None:
            store.void.add(key)
        for load in self.loads.values():
            load.is_void = load.is_void or key in load.keys
        if key in self._kept:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        slot = self._kept.pop(key)
        self._unverified.discard(key)
        self._to_write.pop(key, None)
        if slot in self._readers:
            self._orphans.add(slot)
        else:
            self._free.append(slot)
        self.forget(key)

    # -- plans ------------------------------------------------------------------------------

    @property
    def num_moving(self) -> int:
        """The number of transfers that have not ended."""
        return len(self.stores) + len(self.loads) + len(self._writes)

    def taken_moves(self) -> Moves | None:
        """Return the transfers that start, and those that have ended, since the last call."""
        moves = self._moves
        if not (moves.ended or moves.stores or moves.loads or moves.writes):
            return None
        self._moves = Moves([], [], [], [])
        return moves

    def stats(self) -> dict[str, float]:
        """Return wire.Stats.tiers without the number of arriving requests."""
        names = [name for name in COUNTERS if self.below or not name.startswith("disk.")]
        found: dict[str, float] = dict.fromkeys(names, 0.0)
        found |= self.counts
        if self.below is not None and self.below.is_remote:
            found = {name.replace("disk.", "peer."): value for name, value in found.items()}
        return {
            **found,
            "host.pages": self.num_slots,
            "host.pages_used": self.num_slots - len(self._free),
            "host.page_bytes": self.page_bytes,
            "host.queued": len(self._queue) + len(self._fresh),
            "host.loading": sum(len(load.pages) for load in self.loads.values()),
            "host.store_s": self.seconds["store"],
            "host.load_s": self.seconds["load"],
        }

    def check(self) -> None:
        stored = [slot for store in self.stores.values() for slot in store.slots]
        fetched = [slot for load in self.loads.values() for slot in load.fetched.values()]
        loaded = [slot for load in self.loads.values() for slot in load.slots]
        reading = Counter(slot for _, slot in self._writes.values())
        reading += Counter(loaded) - Counter(fetched)
        assert reading == self._readers and self._orphans <= set(reading)
        parts = [slot for load in self.loads.values() for slot in load.state.values()]
        places = [*self._free, *self._kept.values(), *stored, *fetched, *parts, *self._orphans]
        assert sorted(places) == list(range(self.num_slots)), "a slot is lost or in two places"
        assert set(reading) <= {*self._kept.values(), *self._orphans}, "a read slot is free"
        assert self._unverified <= {*self._kept, *self._storing}
