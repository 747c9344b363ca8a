"""Page allocation and prefix reuse with a tier of host memory below the device.

Adds to KVMemory:

    1. admit        also finds pages in host memory, and starts their load to blank pages
    2. taken_moves  starts stores of pages that will be evicted next
    3. moved        ends a transfer: only then pages are registered, and slots can be found
    4. release      puts pages that a load still writes in quarantine: held until it ends

    held --release--> cached --evicted soon--> storing --end--> ready --take: evict--> held
                         '--------in host memory already----------^

Decision: pages that were registered on the device are used before those in host memory. After the
first gap on the device, all pages come from host memory. Leaves of a chain are evicted first, so a
gap is rarely followed by a page on the device.
"""

from __future__ import annotations

from itertools import islice

from nanovllm.kv.keys import Key, PageKeys
from nanovllm.kv.memory import Found, Holding, KVMemory
from nanovllm.kv.tiers import HostTier
from nanovllm.plan import Moved, Moves


class TieredMemory(KVMemory):
    """Pages of all requests, by request id, and the transfers from and to `tier`.

    A tier without slots changes nothing.
    """

    def __init__(
        self, num_pages: int, page_tokens: int, *, prefix: bool = True, tier: HostTier | None = None
    ) -> None:
        super().__init__(num_pages, page_tokens, prefix=prefix)
        self.tier = tier or HostTier(0)
        self.has_tiers = self.tier.num_slots > 0
        self._wanted = 0  # pages to be ready for a request that was refused
        self._checked: set[int] = set()  # requests with tokens whose logits were finite

    # -- admission --------------------------------------------------------------------------

    def _find_on_tiers(self, keys: PageKeys) -> tuple[Found, list[Key]]:
        prefix = self.find(keys)
        if prefix.source:
            return prefix, []
        loads = self.tier.following(keys, len(prefix.pages), self._most_shared(keys))
        chosen = self._worthwhile(loads, len(loads) * self.page_tokens)
        if not chosen and self.tier.num_fetched(loads):  # perhaps without the tier below
            own = next(i for i, key in enumerate(loads) if key not in self.tier)
            chosen = self._worthwhile(loads[:own], own * self.page_tokens)
        return prefix, chosen

    def _worthwhile(self, loads: list[Key], num_tokens: int) -> list[Key]:
        """Return `loads` if they save `num_tokens` in less time than computing these takes."""
        if not loads or self.tier.is_worth(num_tokens, loads):
            return loads
        self.tier.counts["host.declined"] += 1
        self.tier.costs.declined(self.tier.num_fetched(loads))
        return []

    def _use(self, request_id: int, prefix: Found, loads: list[Key]) -> int:
        """Also queue pages for a store that are on the device alone.

        A load replaces the content of its pages, so the next plan must not zero them meanwhile.
        """
        tier, holding = self.tier, self._holdings[request_id]
        own = [holding.keys.full(i) for i in range(holding.num_named)]
        tier.touch(reversed(own))
        for key, page in zip(own, prefix.pages, strict=True):
            tier.note(key, page, is_issued=True)
        state_to, parts = self._state_to_fetch(prefix, holding.keys)
        if not loads and not parts:
            return 0
        pages = holding.pages[len(own) : len(own) + len(loads)]
        if self.log is not None:
            self.log.filled(holding.keys, range(len(own), len(own) + len(loads)))
        if again := set(self._to_clean).intersection(pages):
            self._to_clean = [page for page in self._to_clean if page not in again]
            self._dirty |= again
        return tier.start_load(
            request_id, len(own), keys=loads, pages=pages, state_keys=parts, state_to=state_to
        )

    def _state_to_fetch(self, prefix: Found, keys: PageKeys) -> tuple[int, list[Key]]:
        """Return the checkpoint for a state that a load brings, and the keys of its parts."""
        return -1, []

    def awaited(self, keys: PageKeys, before: int) -> int:
        if not self.tier.loads:
            return 0
        return self.tier.awaited(keys, self._most_shared(keys), before, self.page_tokens)

    # -- transfers --------------------------------------------------------------------------

    @property
    def num_moving(self) -> int:
        return self.tier.num_moving

    @property
    def has_moves(self) -> bool:
        tier = self.tier
        may_store = len(tier.queue) > 0 and tier.num_storing < tier.most_storing
        if tier.ahead is not None:
            may_store = may_store and self._num_missing > 0 and len(self.pool.cached) > 0
        return tier.has_writes or may_store

    @property
    def _num_missing(self) -> int:
        """The number of further pages that should be ready to be evicted."""
        ahead = min(max(self.tier.ahead or 0, self._wanted), self.pool.num_pages)
        return ahead - self.pool.num_ready - self.tier.num_storing

    def _may_evict(self, count: int) -> bool:
        """Return False if a request should wait for stores of the pages that it replaces."""
        if self.tier.ahead is None or self._make_ready(count - self.pool.num_ready):
            return True
        self._wanted = count
        return False

    def _make_ready(self, count: int) -> bool:
        """Make the next `count` cached pages ready. Return False at one that can be stored."""
        for page in list(islice(self.pool.cached, max(count, 0))):
            keys = self._keys_of[page]
            if any(key in self.tier.queue for key in keys):
                return False
            self.tier.touch(keys)
            self.pool.make_ready(page)
        return True

    def _taken_next(self, room: int) -> dict[Key, int]:
        """Remove and return up to `room` queued pages that are the next to be evicted."""
        self._make_ready(self._num_missing)
        queue, pages = self.tier.queue, islice(self.pool.cached, max(self._num_missing, 0))
        waiting = ((key, page) for page in pages for key in self._keys_of[page])
        chosen = dict(islice(((k, page) for k, page in waiting if k in queue), room))
        for key in chosen:
            queue.remove(key)
        self._num_releases += self._wanted > 0  # the refused request is tried again
        self._wanted = 0
        return chosen

    def taken_moves(self) -> Moves | None:
        tier = self.tier
        room = tier.most_storing - tier.num_storing
        chosen = {} if tier.ahead is None else self._taken_next(room)
        queued = tier.taken_candidates(room if tier.ahead is None else 0)
        chosen |= {key: page for key, page in queued.items() if self._page_of.get(key) == page}
        for page in tier.start_store(chosen, self._dirty):
            self.pool.hold(page)
        self.tier.start_writes()
        return self.tier.taken_moves()

    def moved(self, moved: Moved) -> tuple[int, bool]:
        tier = self.tier
        tier.remove_below(moved.lost)
        if tier.end_write(moved.ticket, ok=moved.ok):
            return -1, moved.ok
        self._num_releases += 1
        if (store := tier.stores.get(moved.ticket)) is not None:
            tier.measured(moved, len(store.pages), is_load=False)
            pages = tier.end_store(moved.ticket, ok=moved.ok)
            self._drop(pages[::-1])
            for page in pages if tier.ahead is not None else ():
                self.pool.make_ready(page)
            return -1, moved.ok
        tier.measured(moved, len(tier.loads[moved.ticket].pages), is_load=True)
        load, ok = tier.end_load(moved.ticket, ok=moved.ok, blank=moved.blank)
        if not ok and self.log is not None:
            self.log.forgotten(tuple(load.keys))
        self._dirty.update(load.pages)  # a failed load may have written anything
        for key, page, slot in zip(load.keys, load.pages, load.slots, strict=True):
            if ok:
                self._name(key, page)
                if not tier.is_unverified(key):
                    self._dirty.discard(page)
                if slot in moved.blank:
                    tier.note(key, page, is_issued=True)
        if load.request_id < 0:
            self._drop(load.pages)
        elif ok:
            holding = self._holdings[load.request_id]
            holding.num_named += len(load.pages)
            holding.num_fetched = load.num_by_source
        return load.request_id, ok

    def started(self, request_id: int, num_prompt: int, num_cached: int, num_loaded: int) -> None:
        """Count the prompt's hits by tier. They and the computed tokens are all of the prompt."""
        counts = self.tier.counts
        holding = self._holdings[request_id]
        counts["asked_tokens"] += num_prompt
        counts["gpu.hit_tokens"] += num_cached - num_loaded
        num_fetched = holding.num_fetched
        counts["host.hit_tokens"] += num_loaded - num_fetched.total() * self.page_tokens
        for source, num_pages in num_fetched.items():
            counts[f"{source}.hit_tokens"] += num_pages * self.page_tokens

    def computed(self, num_tokens: int, seconds: float) -> None:
        self.tier.costs.computed(num_tokens, seconds)

    def tier_stats(self, num_arriving: int, loaded_tokens: int) -> dict[str, float]:
        if not self.has_tiers:
            return {}
        return {**self.tier.stats(), "arriving": num_arriving, "loaded_tokens": loaded_tokens}

    # -- registration and departures --------------------------------------------------------

    def _newly_full(self, holding: Holding, num_computed: int, *, is_issued: bool) -> range:
        filled = super()._newly_full(holding, num_computed, is_issued=is_issued)
        for i in filled if self.has_tiers else ():
            self.tier.note(holding.keys.full(i), holding.pages[i], is_issued=is_issued)
        return filled

    def commit(self, request_id: int, num_computed: int) -> None:
        """Also note that the request's prefix contains no NaN."""
        super().commit(request_id, num_computed)
        if self.tier.below is not None:
            self._checked.add(request_id)

    def mark_unverified(self, request_id: int, written: range) -> None:
        super().mark_unverified(request_id, written)
        holding, size = self._holdings[request_id], self.page_tokens
        end = min(self.num_pages_for(written.stop), holding.num_named) if written else 0
        for i in range(written.start // size, end):
            self.tier.mark_unverified(holding.keys.full(i))

    def invalidate(self, request_id: int, start: int = 0) -> None:
        """Also remove the pages from host memory, and from transfers in progress."""
        self._checked.discard(request_id)
        for key in self._holdings[request_id].keys.computed[start // self.page_tokens :]:
            self.tier.invalidate(key)
        super().invalidate(request_id, start)

    def invalidate_by_keys(self, keys: PageKeys) -> None:
        for key in keys.computed:
            self.tier.invalidate(key)
        super().invalidate_by_keys(keys)

    def release(self, request_id: int) -> None:
        holding = self._holdings[request_id]
        if self.has_tiers:
            self.tier.touch(reversed(holding.keys.computed[: holding.num_named]))
            if request_id in self._checked:
                self._checked.remove(request_id)
                self._note_checked(holding)
        if quarantined := self.tier.abandon(request_id):
            holding.pages = [page for page in holding.pages if page not in quarantined]
        super().release(request_id)

    def _forget(self, page: int) -> None:
        waiting = [self.tier.queue.remove(key) for key in self._keys_of.get(page, ())]
        self.tier.counts["host.dropped"] += sum(waiting)
        super()._forget(page)

    def _note_checked(self, holding: Holding) -> None:
        """Let a request's pages go to the tier below. All their tokens were checked."""
        self.tier.note_checked(holding.keys.computed[: holding.num_named])

    def check(self) -> None:
        super().check()
        self.tier.check()
        loading = [page for load in self.tier.loads.values() for page in load.pages]
        assert len(loading) == len(set(loading)), "two loads write one page"
        assert not self._keys_of.keys() & set(loading), "registered before it has arrived"
        assert not set(self._to_clean) & set(loading), "zeroed while it arrives"
        stored = [page for store in self.tier.stores.values() for page in store.pages]
        held = self.pool.held
        assert held.issuperset(loading) and held.issuperset(stored), "free during a transfer"
