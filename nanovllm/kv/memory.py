"""Page allocation and prefix reuse for the scheduler.

Theory of operation:

    1. admit      reserve the longest cached prefix, and blank pages for the rest of the prompt
    2. expect     list the pages that the plan under construction will fill
    3. publish    register those pages for reuse, once the plan is complete
    4. extend     reserve one more page when a decode row outgrows its last one
    5. commit     register the pages that generated tokens have filled
    6. release    return the pages; registered ones stay cached until they are evicted

    blank --take--> held --drop, registered--> cached --take: evict--> held
      ^              |  <-----hold: cache hit----/
      '--drop, not registered

Only page ids and checkpoint ids are handled here; the bytes live on the device. Tiers below the
device are in kv/tiered.py.

Decision: a request is admitted with pages for all of its prompt at once. Chunks then never compete
for pages, so only a decode row that outgrows its last page can cause a preemption.

Decision: the partly filled last page of a prompt is registered, too. An equal prompt copies it and
computes one token. The copy is needed because the owner goes on writing to its page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.kv.keys import Key, PageKeys
from nanovllm.kv.page_log import PageLog
from nanovllm.kv.page_moves import Source
from nanovllm.kv.pages import PagePool
from nanovllm.plan import Lent, Moved, Moves

Texts = Iterable[PageKeys]


@dataclass(slots=True)
class Holding:
    """Pages held by one request. The first `num_named` pages are full and registered for reuse."""

    keys: PageKeys
    pages: list[int]
    num_named: int
    # Of these, the numbers of pages that came from below host memory.
    num_fetched: Counter[Source] = field(default_factory=Counter)


class Found(NamedTuple):
    """Cached prefix of a text. After admission, `pages` also has the blank pages that follow it."""

    pages: list[int]
    num_cached: int  # tokens
    source: int = 0  # page to copy to the page of the last cached token; 0 = no copy
    checkpoint: int = -1  # recurrent state at the end of the prefix; -1 = the zero state
    ticket: int = 0  # transfer that brings the last pages of the prefix; 0 = none


class KVMemory:
    """Pages of all requests, by request id. `prefix=False` turns reuse off."""

    has_tiers = False  # True if there are tiers below the device, see kv/tiered.py

    def __init__(self, num_pages: int, page_tokens: int, *, prefix: bool = True) -> None:
        self.page_tokens = page_tokens
        self.prefix = prefix
        self.pool = PagePool(num_pages, self._forget)
        self._page_of: dict[Key, int] = {}
        # Keys of a full page, and of a prompt's last page.
        self._keys_of: dict[int, tuple[Key, ...]] = {}
        self._expected: dict[Key, int] = {}  # pages that the plan under construction fills
        self._sources: list[int] = []  # pages that the same plan copies from
        self._holdings: dict[int, Holding] = {}
        self._dirty: set[int] = set()  # pages that may contain NaN; zeroed before reuse
        self._to_clean: list[int] = []  # dirty pages that were reserved after the last plan
        self._num_releases = 0  # events that may let a refused request in
        self.log: PageLog | None = None  # for routers; None: nothing is noted
        self.checkpoints: dict[str, int] = {}  # the format of both is that of wire.Stats
        self.checkpoint_events: dict[str, int] = {}

    @property
    def usage(self) -> float:
        """Fraction of pages that running requests hold, 0..1."""
        return 1 - self.pool.num_free / self.pool.num_pages

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def fits(self, num_tokens: int) -> bool:
        return self.num_pages_for(num_tokens) <= self.pool.num_pages

    def holds(self, request_id: int) -> bool:
        """Return True if the request has pages. It may have left its slot."""
        return request_id in self._holdings

    # -- admission --------------------------------------------------------------------------

    def admit(
        self,
        request_id: int,
        keys: PageKeys,
        reserve: int,
        slot: int = -1,
        *,
        may_load: bool = False,
    ) -> Found | None:
        """Reserve the longest cached prefix and blank pages for the remaining tokens.

        Leave at least one token to compute, so that there are logits to sample from. Return None
        and reserve nothing if fewer than `reserve` pages would stay free for running requests.
        `slot` is the request's future slot, or -1 if it uses drafts. With drafts, a new page does
        not show how many tokens have been computed. With `may_load`, a transfer may start that
        brings pages of other tiers. After its end, arrived() returns what was found.
        """
        total = self.num_pages_for(len(keys.tokens))
        if not self._may_fit(keys, total + reserve):
            return None
        loads: list[Key] = []
        if self.has_tiers and may_load:
            prefix, loads = self._find_on_tiers(keys)
        else:
            prefix = self.find(keys)
        blank = self._hold(prefix, total, reserve)
        if blank is None and prefix.source:  # without the copy, one page less is needed
            prefix = self.find(keys, copies=False)
            blank = self._hold(prefix, total, reserve)
        if blank is None:
            keys.refused_at = self._num_releases
            return None
        self._holdings[request_id] = Holding(keys, prefix.pages + blank, len(prefix.pages))
        ticket = self._use(request_id, prefix, loads) if self.has_tiers else 0
        return prefix._replace(pages=prefix.pages + blank, ticket=ticket)

    def _hold(self, prefix: Found, total: int, reserve: int) -> list[int] | None:
        """Hold the pages in `prefix`. Return the blank pages up to `total`, or None if too few."""
        held = [*prefix.pages, prefix.source] if prefix.source else prefix.pages
        missing = total - len(prefix.pages)
        for page in held:
            self.pool.hold(page)
        fits = missing + reserve <= self.pool.num_free
        blank = self._take(missing) if fits and self._may_evict(missing) else None
        if blank is None:
            self._drop(held)
        elif prefix.source:
            self._sources.append(prefix.source)
        return blank

    def _may_evict(self, count: int) -> bool:
        """Return False if pages that `count` new ones replace should be stored before."""
        return True

    def find(self, keys: PageKeys, *, copies: bool = True) -> Found:
        """Return the longest reusable prefix. With `copies`, also match a partly filled last page,
        whose content must then be copied.
        """
        pages = self._cached_pages(keys)
        whole = copies and len(pages) == self._most_shared(keys) and self._copies_last(keys)
        if whole and (source := self._page_of.get(keys.last(len(keys.tokens)))):
            return Found(pages, len(keys.tokens) - 1, source)
        return Found(pages, len(pages) * self.page_tokens)

    def _cached_pages(self, keys: PageKeys) -> list[int]:
        """Return the leading pages of a text that are cached and can be shared."""
        pages: list[int] = []
        most = self._most_shared(keys)
        while len(pages) < most and (page := self._page_of.get(keys.full(len(pages)))):
            pages.append(page)
        keys.num_known = len(pages)
        return pages

    def _find_on_tiers(self, keys: PageKeys) -> tuple[Found, list[Key]]:
        """Return the longest prefix of all tiers, and the keys of its pages below the device.

        These follow the pages on the device.
        """
        raise NotImplementedError

    def _use(self, request_id: int, prefix: Found, loads: list[Key]) -> int:
        """Start the load of an admitted request. Return its ticket; 0 without `loads`."""
        raise NotImplementedError

    def _most_shared(self, keys: PageKeys) -> int:
        """Return the number of leading pages that can be shared, with one token left to compute."""
        return (len(keys.tokens) - 1) // self.page_tokens

    def _copies_last(self, keys: PageKeys) -> bool:
        """Return True if copying a partly filled last page could save tokens."""
        return self.prefix and (len(keys.tokens) - 1) % self.page_tokens > 0

    def _may_fit(self, keys: PageKeys, num_pages: int) -> bool:
        """Return False if admission cannot succeed yet.

        Called in every step for the head of the queue, so it must be cheap. After a refusal,
        nothing changes until pages are released or more of the text is cached.
        """
        before = keys.num_known
        if num_pages - self._count_known(keys) > self.pool.num_free:
            return False
        return keys.num_known > before or keys.refused_at != self._num_releases

    def _count_known(self, keys: PageKeys) -> int:
        """Return an upper bound of the leading pages that are cached.

        The bound is too high if pages were evicted after the last refusal.
        """
        most = self._most_shared(keys)
        while keys.num_known < most and keys.full(keys.num_known) in self._page_of:
            keys.num_known += 1
        return keys.num_known

    def reach(self, keys: PageKeys) -> tuple[int, int]:
        """Return how many tokens are cached now, and how many will be after the current plan.

        Both are estimates: pages that were evicted after the last refusal may still count.
        """
        size, most = self.page_tokens, self._most_shared(keys)
        now = then = self._count_known(keys)
        while then < most and keys.full(then) in self._expected:
            then += 1
        if then == most and self._expected and self._copies_last(keys):
            last, whole = keys.last(len(keys.tokens)), len(keys.tokens) - 1
            if last in self._page_of:
                return (whole if now == most else now * size), whole
            if last in self._expected:
                return now * size, whole
        return now * size, then * size

    # -- growth -----------------------------------------------------------------------------

    def extend(self, request_id: int, num_tokens: int) -> list[int] | None:
        """Reserve pages for `num_tokens` in total. Return the new pages, or None if too few."""
        held = self._holdings[request_id].pages
        if pages := self._take(max(self.num_pages_for(num_tokens) - len(held), 0)):
            held += pages
        return pages

    def _take(self, count: int) -> list[int] | None:
        pages = self.pool.take(count)
        if self._dirty and pages:
            dirty = self._dirty.intersection(pages)
            self._to_clean += sorted(dirty)
            self._dirty -= dirty
        return pages

    def taken_dirty(self) -> list[int]:
        """Return the pages that the next plan must zero, and clear the list."""
        pages, self._to_clean = self._to_clean, []
        return pages

    def taken_saves(self) -> list[tuple[int, int]]:
        """Return `StepPlan.saves` of the next plan, and clear the list."""
        return []

    # -- tiers below the device: there are none here ----------------------------------------

    @property
    def num_moving(self) -> int:
        """The number of transfers that have not ended."""
        return 0

    @property
    def has_moves(self) -> bool:
        """Return True if a transfer may start without any further plan or result."""
        return False

    def awaited(self, keys: PageKeys, before: int) -> int:
        """Return the ticket of another request's load that a waiting one should wait for, or 0.

        `before` is the ticket that the request has waited for, or 0.
        """
        return 0

    def taken_moves(self) -> Moves | None:
        """Return the transfers to start before the next plan is launched, and clear the list."""
        return None

    def moved(self, moved: Moved) -> tuple[int, bool]:
        """End a transfer. Return the request that waited for it, and True if its pages are there.

        The request is -1 if there is none, or if it has left.
        """
        raise ValueError(f"transfer {moved.ticket} is unknown")

    def arrived(self, request_id: int) -> Found | None:
        """Return the prefix of a request after its load. None if it cannot be used any more."""
        holding = self._holdings[request_id]
        return Found(holding.pages, holding.num_named * self.page_tokens)

    def started(self, request_id: int, num_prompt: int, num_cached: int, num_loaded: int) -> None:
        """Note the first start of a request whose prompt has `num_prompt` tokens.

        `num_cached` of them are cached. Of these, `num_loaded` came from tiers below the device.
        """

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step that computed prompts only."""

    def tier_stats(self, num_arriving: int, loaded_tokens: int) -> dict[str, float]:
        """Return wire.Stats.tiers."""
        return {}

    # -- registration for reuse -------------------------------------------------------------

    def cut(self, request_id: int, start: int, end: int, waiting: Texts) -> tuple[int, int, int]:
        """Return (end, checkpoint, position) of the chunk that begins at `start`.

        The chunk ends at `end` or earlier. The recurrent state after `position` tokens goes to the
        checkpoint; -1 means that no state is saved. `waiting` are the texts of the next requests.
        """
        return end, -1, start

    def expect(self, request_id: int, num_computed: int) -> None:
        """List the pages that the current plan fills, if it computes `num_computed` tokens in all.

        They are registered by publish(), since rows of one plan must not read each other's pages.
        """
        holding = self._holdings[request_id]
        for i in self._newly_full(holding, num_computed, is_issued=False):
            self._expected.setdefault(holding.keys.full(i), holding.pages[i])
        if num_computed == len(holding.keys.tokens) and self._copies_last(holding.keys):
            page = holding.pages[(num_computed - 1) // self.page_tokens]
            self._expected.setdefault(holding.keys.last(num_computed), page)

    def commit(self, request_id: int, num_computed: int) -> None:
        """Register the full pages among the first `num_computed` tokens.

        Issued plans compute all of these tokens. The call is cheap unless a page has just filled.
        """
        holding = self._holdings[request_id]
        for i in self._newly_full(holding, num_computed, is_issued=True):
            self._name(holding.keys.full(i), holding.pages[i])

    def _newly_full(self, holding: Holding, num_computed: int, *, is_issued: bool) -> range:
        """Return the indices of pages that have filled since the last call.

        `is_issued`: issued plans have filled them, and not the one under construction.
        """
        first, last = holding.num_named, num_computed // self.page_tokens if self.prefix else 0
        if last > first:
            holding.num_named = last
            if self.log is not None:
                self.log.filled(holding.keys, range(first, last))
        return range(first, last)

    def _name(self, key: Key, page: int) -> None:
        if key not in self._page_of:  # an equal page that was registered first stays
            self._page_of[key] = page
            self._keys_of[page] = (*self._keys_of.get(page, ()), key)
            if self.log is not None:
                self.log.registered(key)

    def publish(self) -> None:
        """Register the pages that the finished plan fills. Later plans may read them."""
        for key, page in self._expected.items():
            self._name(key, page)
        self._expected.clear()
        self._num_releases += bool(self._sources)
        self._drop(self._sources)
        self._sources.clear()

    # -- departures -------------------------------------------------------------------------

    def mark_unverified(self, request_id: int, written: range) -> None:
        """Zero the pages of tokens whose result will never be checked, before they are reused.

        Full pages stay registered: a request that reads NaN there would also compute NaN. A partly
        filled page is no longer registered, since its unchecked tokens follow the registered ones.
        """
        holding, size = self._holdings[request_id], self.page_tokens
        for i in range(written.start // size, self.num_pages_for(written.stop) if written else 0):
            self._dirty.add(holding.pages[i])
            if i >= holding.num_named:
                self._forget(holding.pages[i])

    def invalidate(self, request_id: int, start: int = 0) -> None:
        """Unregister a request's pages from token `start` on, and zero them before reuse.

        Called when the request's logits are NaN or infinite.
        """
        holding = self._holdings[request_id]
        self._invalidate(holding.pages[start // self.page_tokens :])

    def invalidate_by_keys(self, keys: PageKeys) -> None:
        """Do the same for a request that has already released its pages."""
        self._invalidate([self._page_of[key] for key in keys.computed if key in self._page_of])

    def _invalidate(self, pages: list[int]) -> None:
        self._dirty.update(pages)
        for page in pages:
            self._forget(page)
            self.pool.blank(page)

    def lend(self, request_id: int, num_pages: int, *, is_whole: bool = True) -> Lent:
        """Hold the first pages of a request once more. Return them, if all are registered.

        If the prompt is not whole, the pages may still have to be computed.
        """
        may_lend = self.has_computed(request_id, num_pages) if is_whole else self.prefix
        if num_pages < 1 or not may_lend:
            return Lent()
        holding = self._holdings[request_id]
        pages = tuple(holding.pages[:num_pages])
        for page in pages:
            self.pool.hold(page)
        return Lent(pages, holding.keys.full(num_pages - 1))

    def has_computed(self, request_id: int, num_pages: int) -> bool:
        """Return True if the first pages of a request are full and registered."""
        holding = self._holdings.get(request_id)
        return holding is not None and num_pages <= holding.num_named

    def take_back(self, pages: Sequence[int], state: int = -1) -> None:
        """Drop pages and a state that `lend` returned."""
        self._num_releases += 1
        self._drop(list(pages))

    def release(self, request_id: int) -> None:
        self._num_releases += 1
        self._drop(self._holdings.pop(request_id).pages)

    def _drop(self, pages: list[int]) -> None:
        for page in reversed(pages):  # the tail first: eviction begins at the leaves of a chain
            self.pool.drop(page, keep=page in self._keys_of)

    def _forget(self, page: int) -> None:
        if self.log is not None and page in self._keys_of:
            self.log.forgotten(self._keys_of[page])
        for key in self._keys_of.pop(page, ()):
            del self._page_of[key]

    def check(self) -> None:
        self.pool.check()
        named = {key: page for page, keys in self._keys_of.items() for key in keys}
        assert named == self._page_of
        assert not self._expected and not self._sources
        for holding in self._holdings.values():
            assert holding.num_named <= len(holding.keys.computed)
            assert holding.num_named <= len(holding.pages)
