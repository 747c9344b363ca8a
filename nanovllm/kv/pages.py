"""Reference-counted pool of KV-cache pages. Independent of tokens, requests and tensors."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable


class PagePool:
    """Pages 1..num_pages with reference counts. Page 0 is for the writes of padding rows.

    Every page is in exactly one state: held (count above 0), cached (count 0, content registered
    for reuse) or blank. Cached pages in `ready` are evicted before all others.
    """

    def __init__(self, num_pages: int, forget: Callable[[int], None]) -> None:
        self.num_pages = num_pages
        self._holders = [0] * (num_pages + 1)
        self._blank = deque(range(1, num_pages + 1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.ready: OrderedDict[int, None] = OrderedDict()  # in the order of their eviction
        self._forget = forget  # called before a cached page is overwritten

    @property
    def num_free(self) -> int:
        return self.num_ready + len(self.cached)

    @property
    def num_ready(self) -> int:
        """The number of pages that are blank or in `ready`."""
        return len(self._blank) + len(self.ready)

    @property
    def num_cached(self) -> int:
        return len(self.ready) + len(self.cached)

    def take(self, count: int) -> list[int] | None:
        """Hold and return `count` pages with undefined content. Return None if too few are free."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.popleft()
            else:
                page, _ = (self.ready or self.cached).popitem(last=False)
                self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def hold(self, page: int) -> None:
        if self._holders[page] == 0:
            del self._place_of(page)[page]
        self._holders[page] += 1

    def _place_of(self, page: int) -> OrderedDict[int, None]:
        return self.ready if page in self.ready else self.cached

    def make_ready(self, page: int) -> None:
        """Move a cached page to the end of `ready`. Do nothing if it is not one."""
        if page in self.cached:
            del self.cached[page]
            self.ready[page] = None

    def drop(self, page: int, *, keep: bool) -> None:
        """Decrement the count. A page whose count becomes 0 is cached if `keep`, else blank."""
        self._holders[page] -= 1
        assert self._holders[page] >= 0, f"page {page} dropped more often than held"
        if self._holders[page] == 0:
            if keep:
                self.cached[page] = None
            else:
                self._blank.append(page)

    def blank(self, page: int) -> None:
        """Make a cached page blank. Do nothing if it is held."""
        if page in self._place_of(page):
            del self._place_of(page)[page]
            self._blank.append(page)

    @property
    def held(self) -> set[int]:
        return {page for page, count in enumerate(self._holders) if count}

    def check(self) -> None:
        held = self.held
        blank, cached = set(self._blank), {*self.ready, *self.cached}
        assert len(cached) == self.num_cached, "a page is cached twice"
        assert len(self._blank) == len(blank), "a page is blank twice"
        assert held | blank | cached == set(range(1, self.num_pages + 1)), "a page is lost"
        assert not (held & blank or held & cached or blank & cached), "a page is in two places"
