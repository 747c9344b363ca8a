"""HybridMemory: pages and recurrent states of one model. Beside KVMemory it deals in checkpoints.

A prefix is known as far as its pages are and a state was saved. States are saved, if that spares
more than a page of tokens:
- where prompts fork: where the known pages of a prompt end before others go on, or where it parts
  from a prompt that waits. So the next one with that prefix goes on from there;
- at the end of prompts. A state is of no use without its tokens' keys and values, so the page with
  the last of them can be found by that many tokens, and is copied. A prompt that is long anyhow
  stops at its last page's start instead: then an equal one finds it, too;
- every `every` tokens, where chunks end anyhow;
- when a request is preempted. Its last tokens may not be known yet: the state stands for all that
  the plans so far compute, and gets its name when their results have come. Until then the pages
  that no result vouches for are kept as well.

Decision: a checkpoint may be given to another state while steps that read or write it are still in
flight, because plans execute in order on one stream. In one plan states that left their slots are
saved before admissions restore theirs, and chunks save at its very end: what a plan restores was
complete before, and what is overwritten was read. A checkpoint that a plan's chunks write cannot be
found before the next plan; one that its `saves` write can.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from nanovllm.config import Cache
from nanovllm.kv.checkpoints import Checkpoints
from nanovllm.kv.keys import Key, PageKeys
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.memory import Admission, Found, KVMemory

EVERY = 4096  # tokens: a step of so many takes several times as long as one of few
LOOKED_AT = 32  # waiting texts


@dataclass(slots=True)
class Text:
    """What a request in a slot has in checkpoints."""

    keys: PageKeys
    num_saved: int  # tokens of the newest one of its own, or of the one that it began with
    fork: int = 0  # tokens: where a state is to be saved


@dataclass(slots=True)
class Remains:
    """What is kept of a preempted request whose lines are still to come."""

    checkpoint: int
    end: int  # tokens: the state stands for no more
    first: int  # index of the first of `pages`
    pages: list[int]
    drafted: int  # tokens: no draft was fed beyond


class HybridMemory(KVMemory):
    """`every`: so many tokens of a prompt apart, states are saved."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        num_checkpoints: int,
        *,
        prefix: bool = True,
        every: int = EVERY,
    ) -> None:
        super().__init__(num_pages, page_tokens, prefix=prefix)
        self.every = every
        self.states = Checkpoints(num_checkpoints if prefix else 0, page_tokens)
        self._texts: dict[int, Text] = {}
        self._unpublished: dict[Key, tuple[int, PageKeys, int]] = {}  # place, of what, tokens
        self._remains: dict[int, Remains] = {}
        self._saves: dict[int, int] = {}  # since the last plan: checkpoint, slot

    # -- admission --------------------------------------------------------------------------

    def admit(self, request_id: int, keys: PageKeys, reserve: int) -> Admission | None:
        found = super().admit(request_id, keys, reserve)
        if found is None:
            return None
        text = self._texts[request_id] = Text(keys, found.num_cached)
        start = self.states.longest(keys, found.num_cached)
        if start is not None:
            assert start.id == found.checkpoint
            self.states.restore(start)
        known = keys.num_known * self.page_tokens
        if self._is_worth(known - found.num_cached) and self.states.goes_on(start, keys, known):
            text.fork = known
        return found

    def _is_worth(self, spared: int) -> bool:
        return self.prefix and spared > self.page_tokens

    def _copies_last(self, keys: PageKeys) -> bool:
        return False  # not without a state there

    def _find(self, keys: PageKeys, *, copies: bool = True) -> Found:
        """The longest prefix with a state and all pages, the last of which may be a copy."""
        pages: list[int] = []
        most, size = self._most_shared(keys), self.page_tokens
        best = Found([], 0)
        while True:
            for state in self.states.inside(keys, len(pages), len(keys.tokens) - 1):
                if copies and (source := self._page_of.get(state.key)):
                    best = Found([], state.num_tokens, source, state.id)
            if len(pages) == most or not (page := self._page_of.get(keys.full(len(pages)))):
                break
            pages.append(page)
            if (whole := self.states.get(keys.full(len(pages) - 1))) is not None:
                best = Found([], whole.num_tokens, 0, whole.id)
        keys.num_known = len(pages)
        return best._replace(pages=pages[: best.num_cached // size])

    def reach(self, keys: PageKeys) -> tuple[int, int]:
        most, then = len(keys.tokens) - 1, 0
        for key, (_, _, num_tokens) in self._unpublished.items():
            if then < num_tokens <= most and keys.last(num_tokens) == key:
                then = num_tokens
        now = self._find(keys).num_cached if then else 0
        return now, max(now, then)

    # -- saving -----------------------------------------------------------------------------

    def cut(
        self, request_id: int, start: int, end: int, waiting: Iterable[PageKeys]
    ) -> tuple[int, int]:
        text, size = self._texts[request_id], self.page_tokens
        until = len(text.keys.tokens)
        last = (until - 1) // size * size
        stops = [text.fork, self._parting(text, start, waiting)]
        if last - text.num_saved >= self.every:
            stops.append(last)
        for stop in sorted(at for at in stops if start < at <= end):
            if (place := self._save(request_id, stop)) >= 0:
                return stop, place
        if end < until:
            whole = end // size * size
            end = whole if whole > start else end
            if end % size or end - text.num_saved < self.every:
                return end, -1
        return end, self._save(request_id, end)

    def _parting(self, text: Text, start: int, waiting: Iterable[PageKeys]) -> int:
        """Where a waiting text parts from this one, if it had better wait until it is there."""
        for other in islice(waiting, LOOKED_AT):
            shared = self._num_shared(text.keys, other) * self.page_tokens
            spared, left = shared - text.num_saved, len(other.tokens) - text.num_saved
            if shared > start and self._is_worth(spared) and 2 * spared >= left:
                return shared
        return 0

    def _num_shared(self, a: PageKeys, b: PageKeys) -> int:
        """How many leading pages two texts have in common; each has a token behind them."""
        low, high = 0, min(self._most_shared(a), self._most_shared(b))
        if high and a.full(0) != b.full(0):
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if a.full(middle - 1) == b.full(middle - 1) else (low, middle - 1)
            )
        return low

    def _save(self, request_id: int, end: int) -> int:
        """A checkpoint for the state behind `end` tokens; -1: none."""
        text = self._texts[request_id]
        spared, key = end - text.num_saved, text.keys.last(end)
        if not self._is_worth(spared) or self.states.get(key) or key in self._unpublished:
            return -1
        if (place := self.states.take(spared)) >= 0:
            text.num_saved = end
            self._unpublished[key] = place, text.keys, end
            if end % self.page_tokens:
                page = self._holdings[request_id].pages[end // self.page_tokens]
                self._expected.setdefault(key, page)
        return place

    def publish(self) -> None:
        super().publish()
        self._num_releases += bool(self._unpublished)
        for place, keys, num_tokens in self._unpublished.values():
            self.states.put(place, keys, num_tokens)
        self._unpublished.clear()

    # -- departures -------------------------------------------------------------------------

    def preempt(
        self, request_id: int, slot: int, written: range, drafted: range, lines: int
    ) -> None:
        holding, size = self._holdings[request_id], self.page_tokens
        spared = written.stop - self._texts[request_id].num_saved
        named = lines or not written or written.stop % size == 0  # it would get a name
        place = self.states.take(spared) if named and self._is_worth(spared) else -1
        if place < 0:
            super().preempt(request_id, slot, written, drafted, lines)
            return
        self._saves[place] = slot
        first = written.start // size
        pages = holding.pages[first : self.num_pages_for(written.stop)]
        for i, page in enumerate(pages, first):
            self.pool.hold(page)
            if written and i >= holding.num_named:
                self._forget(page)
        self._remains[request_id] = Remains(place, written.stop, first, pages, drafted.stop)
        self.release(request_id)
        if not lines:
            self._settle(request_id, holding.keys, written.start)

    def settle(self, request_id: int, keys: PageKeys, *, is_over: bool = False) -> None:
        if request_id in self._remains:
            self._settle(request_id, keys, -1 if is_over else len(keys.tokens) - 1)

    def _settle(self, request_id: int, keys: PageKeys, vouched: int) -> None:
        """Results vouch for so many tokens; -1: for none, and nobody asks for its state."""
        left, size = self._remains.pop(request_id), self.page_tokens
        end = min(left.end, len(keys.tokens) - 1)
        for i, page in enumerate(left.pages, left.first):
            if (i + 1) * size <= min(vouched, end):
                self._name(keys.full(i), page)
            elif i * size < end <= vouched and left.drafted <= end:
                self._name(keys.last(end), page)
            else:
                self._dirty.add(page)
        if vouched >= 0 and keys.last(end) in self._page_of:
            self.states.put(left.checkpoint, keys, end)
        else:
            self.states.give_back(left.checkpoint)
        self._drop(left.pages)
        self._num_releases += 1

    def taken_saves(self) -> list[tuple[int, int]]:
        saves = [(slot, checkpoint) for checkpoint, slot in self._saves.items()]
        self._saves.clear()
        return saves

    def condemn(self, request_id: int, start: int = 0) -> None:
        super().condemn(request_id, start)
        self._lose(self._holdings[request_id].keys, start)

    def condemn_text(self, keys: PageKeys) -> None:
        super().condemn_text(keys)
        self._lose(keys, 0)

    def _lose(self, keys: PageKeys, start: int) -> None:
        for state in list(self.states.along(keys, len(keys.tokens))):
            if state.num_tokens > start:
                self.states.remove(state)

    def release(self, request_id: int) -> None:
        super().release(request_id)
        del self._texts[request_id]

    def _forget(self, page: int) -> None:
        for key in self._keys_of.get(page, ()):
            if (state := self.states.get(key)) is not None:
                self.states.remove(state)
        super()._forget(page)

    def check(self) -> None:
        super().check()
        self.states.check()
        assert not self._unpublished and set(self._texts) == set(self._holdings)


def memory_of(layout: CacheLayout, cache: Cache) -> KVMemory:
    """Who holds which page, and which state, of caches with that layout.

    `cache`: with numbers for its pages, their size and the checkpoints.
    """
    pages, page_tokens = int(cache.pages), int(cache.page_tokens)
    if layout.state is None:
        return KVMemory(pages, page_tokens, prefix=cache.prefix)
    return HybridMemory(pages, page_tokens, int(cache.checkpoints), prefix=cache.prefix)
