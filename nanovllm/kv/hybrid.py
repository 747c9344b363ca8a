"""HybridMemory: pages and recurrent states of one model. Beside KVMemory it deals in checkpoints.

A prefix is known as far as its pages are and a state was saved, always at the end of a page. States
are saved, if that spares a page of tokens:
- where prompts fork: where the known pages of a prompt end before others go on, or where it parts
  from a prompt that waits. So the next one with that prefix goes on from there;
- where the last page of a prompt begins, inside of the chunk that ends it. Not at its very end: an
  equal prompt has a token left to compute, and the last tokens of a prompt open the model's turn,
  often with a thought that the next turn's prompt leaves out;
- every `every` tokens: of a prompt where chunks end anyhow, of an output at the end of a page. Then
  the newest tokens are still on their way: the state gets its name when they have come.

A preempted request goes on from the last of these. Its newest state alone would be of no use: there
was no page left, so that the first one it gives up is taken at once, from its end.

Decision: a checkpoint may be given to another state while steps that read or write it are still in
flight, because plans execute in order on one stream. In one plan states that left their slots are
saved before admissions restore theirs, and chunks save after that: what a plan restores was
complete before, and what is overwritten was read. A checkpoint that a plan's chunks write cannot be
found before the next plan; one that its `saves` write can.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice

from nanovllm.config import Cache
from nanovllm.kv.checkpoints import Checkpoints
from nanovllm.kv.keys import Key, PageKeys
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.memory import Found, KVMemory, Texts

EVERY = 4096  # tokens: a step of so many takes several times as long as one of few
LOOKED_AT = 32  # waiting texts


@dataclass(slots=True)
class SavedText:
    """What a request in a slot has in checkpoints."""

    keys: PageKeys
    num_saved: int  # tokens of the newest one of its own, or of the one that it began with
    slot: int  # -1: not known, or not how many tokens its state has seen
    fork: int = 0  # tokens: where a state is to be saved
    place: int = -1  # of the state behind num_saved tokens, not all of which are known yet


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
        self.checkpoints, self.checkpoint_events = self.states.sizes, self.states.events
        self._texts: dict[int, SavedText] = {}
        self._unpublished: dict[Key, tuple[int, PageKeys, int]] = {}  # place, of what, tokens
        self._saves: dict[int, int] = {}  # since the last plan: checkpoint, slot

    # -- admission --------------------------------------------------------------------------

    def admit(self, request_id: int, keys: PageKeys, reserve: int, slot: int = -1) -> Found | None:
        found = super().admit(request_id, keys, reserve)
        if found is None:
            return None
        text = self._texts[request_id] = SavedText(keys, found.num_cached, slot)
        start = self.states.longest(keys, found.num_cached)
        if start is not None:
            self.states.restore(start)
        known = keys.num_known * self.page_tokens
        if self._is_worth(known - found.num_cached) and any(self.states.beyond(start, keys, known)):
            text.fork = known
        return found

    def _is_worth(self, spared: int) -> bool:
        return self.prefix and spared >= self.page_tokens

    def _copies_last(self, keys: PageKeys) -> bool:
        return False  # not without a state there

    def find(self, keys: PageKeys, *, copies: bool = True) -> Found:
        """The longest prefix with a state and all pages."""
        pages, size = super().find(keys, copies=copies).pages, self.page_tokens
        state = self.states.longest(keys, len(pages) * size)
        if state is None:
            return Found([], 0)
        return Found(pages[: state.num_tokens // size], state.num_tokens, 0, state.id)

    def reach(self, keys: PageKeys) -> tuple[int, int]:
        most, saved = len(keys.tokens) - 1, self._unpublished.items()
        then = max((n for key, (_, _, n) in saved if n <= most and keys.last(n) == key), default=0)
        now = self.find(keys).num_cached if then else 0
        return now, max(now, then)

    # -- saving -----------------------------------------------------------------------------

    def cut(self, request_id: int, start: int, end: int, waiting: Texts) -> tuple[int, int, int]:
        text, size = self._texts[request_id], self.page_tokens
        until, last = len(text.keys.tokens), self._most_shared(text.keys) * size
        stops = text.fork, self._parting(text, start, waiting)
        for stop in sorted(at for at in stops if start < at <= end and at < last):
            if (place := self._save(request_id, stop)) >= 0:
                return stop, place, stop
        if end < until and (whole := end // size * size) > start:
            end = whole
        if start < last <= end:
            return end, self._save(request_id, last), last
        if end % size or end - text.num_saved < self.every:
            return end, -1, start
        return end, self._save(request_id, end), end

    def _parting(self, text: SavedText, start: int, waiting: Texts) -> int:
        """Where a waiting text parts from this one, if it had better wait until it is there."""
        for other in islice(waiting, LOOKED_AT):
            shared = self._num_shared(text.keys, other) * self.page_tokens
            spared, left = shared - text.num_saved, len(other.tokens) - text.num_saved
            if shared > start and self._is_worth(spared) and 2 * spared >= left:
                return shared
        return 0

    def _num_shared(self, a: PageKeys, b: PageKeys) -> int:
        """How many leading pages two texts have in common; each has a token behind them."""
        most = min(self._most_shared(a), self._most_shared(b))
        return bisect_left(range(most), True, key=lambda index: a.full(index) != b.full(index))

    def _save(self, request_id: int, end: int) -> int:
        """A checkpoint for the state behind `end` tokens; -1: none."""
        text = self._texts[request_id]
        spared, key = end - text.num_saved, text.keys.last(end)
        if not self._is_worth(spared) or self.states.get(key) or key in self._unpublished:
            return -1
        if (place := self.states.take(spared)) >= 0:
            text.num_saved = end
            self._unpublished[key] = place, text.keys, end
        return place

    def publish(self) -> None:
        super().publish()
        self._num_releases += bool(self._unpublished)
        for place, keys, num_tokens in self._unpublished.values():
            self.states.put(place, keys, num_tokens)
        self._unpublished.clear()

    def extend(self, request_id: int, num_tokens: int) -> list[int] | None:
        """A request grows into a new page when its plans have filled the last one. So has its
        state, in a moment when nothing else needs to be known of it."""
        end = len(self._holdings[request_id].pages) * self.page_tokens
        pages, text = super().extend(request_id, num_tokens), self._texts[request_id]
        spared = end - text.num_saved
        wants = pages and self.prefix and text.slot >= 0 > text.place and spared >= self.every
        if wants and (place := self.states.take(spared)) >= 0:
            self._saves[place] = text.slot
            text.place, text.num_saved = place, end
        return pages

    def commit(self, request_id: int, num_computed: int) -> None:
        super().commit(request_id, num_computed)
        text = self._texts[request_id]
        if text.place >= 0 and num_computed >= text.num_saved:
            if text.keys.last(text.num_saved) in self._page_of:  # else it was condemned since
                self.states.put(text.place, text.keys, text.num_saved)
            else:
                self.states.give_back(text.place)
            text.place = -1
            self._num_releases += 1

    def taken_saves(self) -> list[tuple[int, int]]:
        saves, self._saves = self._saves, {}
        return [(slot, checkpoint) for checkpoint, slot in saves.items()]

    # -- departures -------------------------------------------------------------------------

    def condemn(self, request_id: int, start: int = 0) -> None:
        """States also where others named the pages that it wrote."""
        super().condemn(request_id, start)
        keys = self._holdings[request_id].keys
        for state in list(self.states.along(keys, len(keys.tokens))):
            if state.num_tokens > start:
                self.states.remove(state)

    def release(self, request_id: int) -> None:
        super().release(request_id)
        if (text := self._texts.pop(request_id)).place >= 0:
            self.states.give_back(text.place)

    def _forget(self, page: int) -> None:
        for key in self._keys_of.get(page, ()):
            if (state := self.states.get(key)) is not None:
                self.states.remove(state)
        super()._forget(page)


def memory_of(layout: CacheLayout, cache: Cache) -> KVMemory:
    """Who holds which page, and which state, of caches with that layout.

    `cache`: with numbers for its pages, their size and the checkpoints.
    """
    pages, page_tokens = int(cache.pages), int(cache.page_tokens)
    if layout.state is None:
        return KVMemory(pages, page_tokens, prefix=cache.prefix)
    return HybridMemory(pages, page_tokens, int(cache.checkpoints), prefix=cache.prefix)
