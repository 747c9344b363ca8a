"""KVMemory: the only face of the cache the scheduler sees.

It answers four questions: what is already known of this prompt (admit), may it grow (extend), what
may others reuse (expect, commit), and who is done (release). It deals in page ids and checkpoint
ids; the bytes live on the device.

Decision: a request is admitted with pages for all of its prompt at once. Chunks then never compete
for pages, so only a decode row that outgrows its last page can cause a preemption.

Decision: the page with a prompt's last tokens is found by equal prompts, too, although it is not
full and its owner goes on writing to it. They get a copy, and compute one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.kv.keys import Key, PageKeys
from nanovllm.kv.pages import PagePool

Texts = Iterable[PageKeys]


@dataclass(slots=True)
class Holding:
    """What one request holds. The first `num_named` pages are full and others may find them."""

    keys: PageKeys
    pages: list[int]
    num_named: int


class Found(NamedTuple):
    """What is known of a text. Of an admitted one, the pages behind the known ones are blank."""

    pages: list[int]
    num_cached: int  # tokens
    source: int = 0  # is copied to the page of the last of these tokens before it is read; 0 = none
    checkpoint: int = -1  # their state; -1 = the zero state


class KVMemory:
    """`prefix` False turns all reuse off."""

    def __init__(self, num_pages: int, page_tokens: int, *, prefix: bool = True) -> None:
        self.page_tokens = page_tokens
        self.prefix = prefix
        self.pool = PagePool(num_pages, self._forget)
        self._page_of: dict[Key, int] = {}
        self._keys_of: dict[int, tuple[Key, ...]] = {}  # full, and up to a prompt's last token
        self._expected: dict[Key, int] = {}  # pages the plan being built computes
        self._sources: list[int] = []  # pages it copies from
        self._holdings: dict[int, Holding] = {}
        self._dirty: set[int] = set()  # NaN may be in there: nobody's next without being cleaned
        self._to_clean: list[int] = []  # handed out since the last plan
        self._num_releases = 0  # so often something has become free
        self.checkpoints: dict[str, int] = {}  # both as in wire.Stats
        self.checkpoint_events: dict[str, int] = {}

    @property
    def usage(self) -> float:
        """Share of pages that running requests hold, 0..1."""
        return 1 - self.pool.num_free / self.pool.num_pages

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def fits(self, num_tokens: int) -> bool:
        return self.num_pages_for(num_tokens) <= self.pool.num_pages

    def holds(self, request_id: int) -> bool:
        """Whether the request has pages, also if it has left its slot."""
        return request_id in self._holdings

    # -- admission --------------------------------------------------------------------------

    def admit(self, request_id: int, keys: PageKeys, reserve: int, slot: int = -1) -> Found | None:
        """Hold the longest known prefix and blank pages for the rest of the known tokens.

        One token is always left to compute. None, and nothing held, unless `reserve` pages would
        stay free for the requests already running. `slot`: where it will be if it is admitted and
        feeds no drafts, so that each grant of a page says how far its plans reach; else -1.
        """
        total = self.num_pages_for(len(keys.tokens))
        if not self._may_fit(keys, total + reserve):
            return None
        found = self.find(keys)
        blank = self._hold(found, total, reserve)
        if blank is None and found.source:  # it may be the very page that is missing
            found = self.find(keys, copies=False)
            blank = self._hold(found, total, reserve)
        if blank is None:
            keys.refused_at = self._num_releases
            return None
        self._holdings[request_id] = Holding(keys, found.pages + blank, len(found.pages))
        return found._replace(pages=found.pages + blank)

    def _hold(self, found: Found, total: int, reserve: int) -> list[int] | None:
        """Hold what was found, and blank pages for the rest, which it returns; None: nothing."""
        held = [*found.pages, found.source] if found.source else found.pages
        missing = total - len(found.pages)
        for page in held:
            self.pool.hold(page)
        blank = self._take(missing) if missing + reserve <= self.pool.num_free else None
        if blank is None:
            self._drop(held)
        elif found.source:
            self._sources.append(found.source)
        return blank

    def find(self, keys: PageKeys, *, copies: bool = True) -> Found:
        """The most that may be used. `copies`: also a page with all the rest."""
        pages: list[int] = []
        most = self._most_shared(keys)
        while len(pages) < most and (page := self._page_of.get(keys.full(len(pages)))):
            pages.append(page)
        keys.num_known = len(pages)
        whole = copies and len(pages) == most and self._copies_last(keys)
        if whole and (source := self._page_of.get(keys.last(len(keys.tokens)))):
            return Found(pages, len(keys.tokens) - 1, source)
        return Found(pages, len(pages) * self.page_tokens)

    def _most_shared(self, keys: PageKeys) -> int:
        """Leading pages that a request may share with others: one token is left to compute."""
        return (len(keys.tokens) - 1) // self.page_tokens

    def _copies_last(self, keys: PageKeys) -> bool:
        """Whether a copy of a last page could spare tokens."""
        return self.prefix and (len(keys.tokens) - 1) % self.page_tokens > 0

    def _may_fit(self, keys: PageKeys, wanted: int) -> bool:
        """Whether to try at all: a request that waits for pages is asked about in every step.

        Since it was last refused, something must have become free, or known of its text.
        """
        before = keys.num_known
        if wanted - self._count_known(keys) > self.pool.num_free:
            return False
        return keys.num_known > before or keys.refused_at != self._num_releases

    def _count_known(self, keys: PageKeys) -> int:
        """At most so many leading pages can be found; fewer if some were evicted since."""
        most = self._most_shared(keys)
        while keys.num_known < most and keys.full(keys.num_known) in self._page_of:
            keys.num_known += 1
        return keys.num_known

    def reach(self, keys: PageKeys) -> tuple[int, int]:
        """How many tokens are known now, and how many will be when the plan being built is issued.

        An estimate: pages that were evicted since the request was last refused may still count.
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
        """Make room for `num_tokens` in all. Returns the new pages, or None if there is no room."""
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
        """Pages that must be cleaned by the plan that is about to be issued; tells each once."""
        pages, self._to_clean = self._to_clean, []
        return pages

    def taken_saves(self) -> list[tuple[int, int]]:
        """StepPlan.saves of the plan that is about to be issued; tells each once."""
        return []

    # -- what others may find ---------------------------------------------------------------

    def cut(self, request_id: int, start: int, end: int, waiting: Texts) -> tuple[int, int, int]:
        """Where a chunk from `start` on ends, at `end` at the latest, what receives the state, and
        behind how many of the text's tokens.

        That is a checkpoint, or -1. `waiting`: the texts of those that may come next.
        """
        return end, -1, start

    def expect(self, request_id: int, num_computed: int) -> None:
        """The plan being built computes the first `num_computed` known tokens.

        Nobody finds them before publish(): rows of one plan must not read each other's pages.
        """
        holding = self._holdings[request_id]
        for i in self._newly_full(holding, num_computed):
            self._expected.setdefault(holding.keys.full(i), holding.pages[i])
        if num_computed == len(holding.keys.tokens) and self._copies_last(holding.keys):
            page = holding.pages[(num_computed - 1) // self.page_tokens]
            self._expected.setdefault(holding.keys.last(num_computed), page)

    def commit(self, request_id: int, num_computed: int) -> None:
        """Let others find the full pages among the first `num_computed` known tokens.

        Some issued plan computes all of them. Costs nothing unless a page has just filled up.
        """
        holding = self._holdings[request_id]
        for i in self._newly_full(holding, num_computed):
            self._name(holding.keys.full(i), holding.pages[i])

    def _newly_full(self, holding: Holding, num_computed: int) -> range:
        """Indices of the pages that have become full since this was last asked; none twice."""
        first, last = holding.num_named, num_computed // self.page_tokens if self.prefix else 0
        if last > first:
            holding.num_named = last
        return range(first, last)

    def _name(self, key: Key, page: int) -> None:
        if key not in self._page_of:  # else: an equal page got there first, this one stays private
            self._page_of[key] = page
            self._keys_of[page] = (*self._keys_of.get(page, ()), key)

    def publish(self) -> None:
        """The plan is complete: later plans may read what it computes."""
        for key, page in self._expected.items():
            self._name(key, page)
        self._expected.clear()
        self._num_releases += bool(self._sources)
        self._drop(self._sources)
        self._sources.clear()

    # -- departures -------------------------------------------------------------------------

    def suspect(self, request_id: int, written: range) -> None:
        """No result vouches for these tokens: clean their pages before the next owner gets them.

        What they say may still be found where it is a full page: whoever reads NaN there would
        have computed NaN. But not beyond the tokens of a page that is found by its first ones.
        """
        holding, size = self._holdings[request_id], self.page_tokens
        for i in range(written.start // size, self.num_pages_for(written.stop) if written else 0):
            self._dirty.add(holding.pages[i])
            if i >= holding.num_named:
                self._forget(holding.pages[i])

    def condemn(self, request_id: int, start: int = 0) -> None:
        """What the request wrote from token `start` on is wrong, or what it read there was.

        None of these pages can be found any more; each is cleaned before its next owner gets it.
        """
        holding = self._holdings[request_id]
        self._condemn(holding.pages[start // self.page_tokens :])

    def condemn_text(self, keys: PageKeys) -> None:
        """Does what condemn() does, for a request that has released its pages since it wrote
        them."""
        self._condemn([self._page_of[key] for key in keys.computed if key in self._page_of])

    def _condemn(self, pages: list[int]) -> None:
        self._dirty.update(pages)
        for page in pages:
            self._forget(page)
            self.pool.blank(page)

    def release(self, request_id: int) -> None:
        self._num_releases += 1
        self._drop(self._holdings.pop(request_id).pages)

    def _drop(self, pages: list[int]) -> None:
        for page in reversed(pages):  # tail first: a chain is evicted from its leaves
            self.pool.drop(page, keep=page in self._keys_of)

    def _forget(self, page: int) -> None:
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
