"""Page allocation and prefix reuse for models that also have recurrent states.

Adds to TieredMemory:

    1. find             ends a prefix at the longest checkpoint
    2. cut, extend      choose where a prompt's and an output's states are saved
    3. publish, commit  register saved states
    4. taken_moves      also stores a state for the disk
    5. lend             lends a state with the pages before it
    6. _forget          removes the state after a page that has left all tiers

A prefix can be reused up to the last page end where all pages are cached and a state was saved.
States are saved only if that saves at least a page of tokens:
- At forks: where the cached pages of a prompt end and a longer checkpoint shares them, or where a
  prompt differs from that of a waiting request. The next prompt with that prefix starts there.
- At the start of a prompt's last page, inside its last chunk. The very end would be useless: an
  equal prompt must compute one token. The last tokens also open the model's turn, often with
  reasoning that the next turn's prompt leaves out.
- Every `every` tokens: at the ends of a prompt's chunks, and of an output at the end of a page. The
  tokens of such an output page are still in flight, so its state is registered when they arrive.

A preempted request resumes from the last saved state. Saving its current state would not help:
preemption means that no page is free, so its last page is reused at once.

With a tier of host memory, a checkpoint stays as long as its page is on any tier. Pages are loaded
only up to a checkpoint. It may be evicted during the load; the request then begins anew.

A disk has pages and states. When a request is released, states after its pages are stored, one at a
time: from the checkpoint to host slots, and from there to the disk. A load brings pages up to such
a state, and the state itself. A checkpoint is not changed while it is stored.

Pages of another engine come with the state after the last one, as one load. A prefill engine lends
both: the state is held in its place, like the pages, until the lease has ended.

Decision: this is a subclass, not an object that the memory calls. Such an object would need some 20
methods and the memory's table of pages. `find` and `reach` follow other rules here, which an
object without states could not leave empty. The other methods would be calls without effect for all
models without states.

Decision: a checkpoint may be reassigned while steps that read or write it are in flight, because
plans run in order on one stream. Within a plan, running states are saved first, then admissions
restore, then chunks save. A plan thus restores complete states and overwrites states after their
last read. A checkpoint written by a chunk can be found from the next plan on; one written by
`saves` at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from nanovllm.config import Cache
from nanovllm.kv.below import Below
from nanovllm.kv.checkpoints import Checkpoints
from nanovllm.kv.costs import DISK_RATE, HOST_RATE, TransferCosts
from nanovllm.kv.keys import Key, PageKeys
from nanovllm.kv.layout import CacheLayout
from nanovllm.kv.memory import Found, Holding, KVMemory, Texts
from nanovllm.kv.split import EVERY, Split, host_page_bytes
from nanovllm.kv.tiered import TieredMemory
from nanovllm.kv.tiers import AHEAD, MOST_STORING, HostTier
from nanovllm.plan import Lent, Moved, Moves

LOOKED_AT = 32  # maximum number of waiting requests that are compared


@dataclass(slots=True)
class SavedText:
    """Checkpoints of a request that holds pages."""

    keys: PageKeys
    num_saved: int  # tokens of its latest checkpoint, or of the one it started from
    slot: int  # -1 if its state's number of tokens is unknown (drafts)
    fork: int = 0  # position (tokens) where a state must be saved; 0 = none
    place: int = -1  # a state of num_saved tokens, saved before all these tokens were sampled


class HybridMemory(TieredMemory):
    """Pages and checkpoints of all requests. `every`: tokens between states of one prompt."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        num_checkpoints: int,
        *,
        prefix: bool = True,
        every: int = EVERY,
        tier: HostTier | None = None,
    ) -> None:
        super().__init__(num_pages, page_tokens, prefix=prefix, tier=tier)
        self.tier.forget = self._forget_state
        self.every = every
        self.states = Checkpoints(num_checkpoints if prefix else 0, page_tokens)
        self.checkpoints, self.checkpoint_events = self.states.sizes, self.states.events
        self._texts: dict[int, SavedText] = {}
        self._unpublished: dict[Key, tuple[int, PageKeys, int]] = {}  # place, page keys, tokens
        self._saves: dict[int, int] = {}  # for the next plan: slot by checkpoint
        # Page keys and tokens of states that loads bring, by ticket.
        self._fetches: dict[int, tuple[PageKeys, int]] = {}
        self._unissued: set[Key] = set()  # of states that the plan under construction saves
        self._to_store: dict[Key, None] = {}  # pages whose states are not on the disk, in order
        self._storing: dict[int, int] = {}  # held checkpoints, by the ticket of their store

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
        prefix = super().admit(request_id, keys, reserve, may_load=may_load)
        if prefix is None:
            return None
        text = self._texts[request_id] = SavedText(keys, prefix.num_cached, slot)
        start = self.states.longest(keys, prefix.num_cached)
        if start is not None and not prefix.ticket:
            self.states.restore(start)
        known = keys.num_known * self.page_tokens
        is_worth = self._is_worth(known - prefix.num_cached)
        if is_worth and any(self.states.beyond(start, keys, known)):
            text.fork = known
        if not prefix.ticket:
            return prefix
        if prefix.checkpoint < 0:
            self._fetches[prefix.ticket] = keys, prefix.num_cached
        # Only the pages on the device are cached before the load has ended.
        named = self._holdings[request_id].num_named
        return prefix._replace(num_cached=named * self.page_tokens)

    def _is_worth(self, spared: int) -> bool:
        return self.prefix and spared >= self.page_tokens

    def _copies_last(self, keys: PageKeys) -> bool:
        return False  # no state is saved inside a page

    def find(self, keys: PageKeys, *, copies: bool = True) -> Found:
        """Return the longest prefix whose pages are cached and whose state was saved."""
        return self._up_to_state(keys, self._cached_pages(keys))

    def _up_to_state(self, keys: PageKeys, pages: list[int]) -> Found:
        """Return the leading `pages` of a text up to the longest checkpoint."""
        size = self.page_tokens
        state = self.states.longest(keys, len(pages) * size)
        if state is None:
            return Found([], 0)
        return Found(pages[: state.num_tokens // size], state.num_tokens, 0, state.id)

    def _find_on_tiers(self, keys: PageKeys) -> tuple[Found, list[Key]]:
        """Return the longest prefix that ends at a checkpoint, here or on the tier below."""
        pages, size = self._cached_pages(keys), self.page_tokens
        prefix = self._up_to_state(keys, pages)
        below = self.tier.following(keys, len(pages), self._most_shared(keys))
        known = len(pages) + len(below)
        state = self.states.longest(keys, known * size)
        own = 0 if state is None else state.num_tokens // size
        for end in range(known, own, -1) if self.tier.below is not None else ():
            loads = below[: max(end - len(pages), 0)]
            if parts := self.tier.state_keys(keys.full(end - 1), len(loads)):
                spared = end * size - prefix.num_cached
                if self.states.may_take(end * size) and self._worthwhile([*loads, *parts], spared):
                    return Found(pages[:end], end * size), loads
                break
        if state is None or state.num_tokens <= len(pages) * size:
            return prefix, []
        loads = below[: state.num_tokens // size - len(pages)]
        if not self._worthwhile(loads, state.num_tokens - prefix.num_cached):
            return prefix, []
        return Found(pages, state.num_tokens, checkpoint=state.id), loads

    def _state_to_fetch(self, prefix: Found, keys: PageKeys) -> tuple[int, list[Key]]:
        """Return the checkpoint for a state that a load brings, and the keys of its parts.

        A thread of the disk may have evicted a part since it was found. The load then fails.
        """
        if prefix.checkpoint >= 0 or not prefix.num_cached:
            return -1, []
        assert self.tier.below is not None
        end = keys.full(prefix.num_cached // self.page_tokens - 1)
        return self.states.take(prefix.num_cached), self.tier.below.keys_of_parts(end)

    def moved(self, moved: Moved) -> tuple[int, bool]:
        load = self.tier.loads.get(moved.ticket)
        request_id, ok = super().moved(moved)
        if load is not None and load.state_to >= 0:
            keys, num_tokens = self._fetches.pop(moved.ticket)
            if ok and keys.last(num_tokens) in self._page_of:
                self.states.put(load.state_to, keys, num_tokens)
            else:
                self.states.give_back(load.state_to)
        if (place := self._storing.pop(moved.ticket, -1)) >= 0:
            self.states.drop(place)
        return request_id, ok

    # -- states on their way to the disk ------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        return super().has_moves or (bool(self._to_store) and self.tier.may_store_state)

    def taken_moves(self) -> Moves | None:
        """Also start the store of a state. The present plan has not been launched yet.

        So a state that this plan saves is not stored. A later request may do that.
        """
        while self._to_store and self.tier.may_store_state:
            key = next(iter(self._to_store))
            del self._to_store[key]
            if key in self._unissued:
                continue
            state = self.states.get(key)
            if state is None or self.tier.has_state(key):
                continue
            self.states.hold(state.id)  # before slots are freed, which may remove this state
            if ticket := self.tier.start_state_store(key, state.id):
                self._storing[ticket] = state.id
            else:
                self.states.drop(state.id)
        self._unissued.clear()
        return super().taken_moves()

    def arrived(self, request_id: int) -> Found | None:
        arrived, keys = super().arrived(request_id), self._holdings[request_id].keys
        state = None if arrived is None else self.states.get(keys.last(arrived.num_cached))
        if arrived is None or state is None:
            return None
        self.states.restore(state)
        return arrived._replace(checkpoint=state.id)

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
        """Return the length in tokens of a prefix that a waiting request shares, or 0.

        The prefix consists of full pages and ends after `start`. A checkpoint at its end must spare
        the waiting request at least one page and half of its tokens after this request's latest
        checkpoint. The first such request decides.
        """
        for other in islice(waiting, LOOKED_AT):
            shared = self._num_shared(text.keys, other) * self.page_tokens
            spared, left = shared - text.num_saved, len(other.tokens) - text.num_saved
            if shared > start and self._is_worth(spared) and 2 * spared >= left:
                return shared
        return 0

    def _num_shared(self, a: PageKeys, b: PageKeys) -> int:
        """Return the number of leading pages that two requests share.

        Both requests have tokens after these pages.
        """
        most = min(self._most_shared(a), self._most_shared(b))
        return bisect_left(range(most), True, key=lambda index: a.full(index) != b.full(index))

    def _save(self, request_id: int, end: int) -> int:
        """Return a checkpoint for the state after `end` tokens, or -1."""
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
        self._unissued = set(self._unpublished)
        self._unpublished.clear()

    def extend(self, request_id: int, num_tokens: int) -> list[int] | None:
        """Also save the state, if due. The plans so far end exactly with the last page, so the
        state's number of tokens is known."""
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
            # Otherwise its pages were invalidated meanwhile.
            if text.keys.last(text.num_saved) in self._page_of:
                self.states.put(text.place, text.keys, text.num_saved)
            else:
                self.states.give_back(text.place)
            text.place = -1
            self._num_releases += 1

    def taken_saves(self) -> list[tuple[int, int]]:
        saves, self._saves = self._saves, {}
        return [(slot, checkpoint) for checkpoint, slot in saves.items()]

    # -- departures -------------------------------------------------------------------------

    def lend(self, request_id: int, num_pages: int, *, is_whole: bool = True) -> Lent:
        """Lend the pages before the longest saved state, and hold this state.

        At most half of the places hold states for other engines. The state is saved last, so no
        pages of a prompt are lent before it is whole.
        """
        holding = self._holdings.get(request_id)
        if holding is None or not is_whole or 2 * self.states.num_held >= self.states.count:
            return Lent()
        state = self.states.longest(holding.keys, num_pages * self.page_tokens)
        if state is None:
            return Lent()
        lent = super().lend(request_id, state.num_tokens // self.page_tokens)
        if lent.pages:
            self.states.hold(state.id)
        return replace(lent, state=state.id) if lent.pages else lent

    def take_back(self, pages: Sequence[int], state: int = -1) -> None:
        super().take_back(pages)
        if state >= 0:
            self.states.drop(state)

    def invalidate(self, request_id: int, start: int = 0) -> None:
        """Also remove states, including those that other requests saved on these pages."""
        super().invalidate(request_id, start)
        keys = self._holdings[request_id].keys
        for state in list(self.states.along(keys, len(keys.tokens))):
            if state.num_tokens > start:
                self.states.remove(state)

    def _note_checked(self, holding: Holding) -> None:
        super()._note_checked(holding)
        if self.tier.disk is None:
            return
        for state in self.states.along(holding.keys, holding.num_named * self.page_tokens):
            if not self.tier.has_state(state.key):
                self._to_store[state.key] = None
        while len(self._to_store) > self.states.count:
            del self._to_store[next(iter(self._to_store))]

    def release(self, request_id: int) -> None:
        super().release(request_id)
        if (text := self._texts.pop(request_id)).place >= 0:
            self.states.give_back(text.place)

    def _forget(self, page: int) -> None:
        keys = self._keys_of.get(page, ())
        super()._forget(page)
        for key in keys:
            self._forget_state(key)

    def _forget_state(self, key: Key) -> None:
        """Remove the state after a page that has left the device or host memory, if it was last."""
        is_kept = key in self._page_of or key in self.tier
        if not is_kept and (state := self.states.get(key)) is not None:
            self.states.remove(state)


def memory_of(layout: CacheLayout, cache: Cache, disk: Below | None = None) -> KVMemory:
    """Return the memory for a cache layout. `cache` has numbers where a recipe may have "auto".

    `disk` is the tier below host memory.
    """
    pages, page_tokens, prefix = int(cache.pages), int(cache.page_tokens), cache.prefix
    tier: HostTier | None = None
    if host_pages := Split(pages, cache, layout, page_tokens).host_pages:
        page_bytes = host_page_bytes(layout, page_tokens)
        has_disk = disk is not None and disk.writable is not None
        tier = HostTier(
            host_pages,
            page_bytes=page_bytes,
            costs=TransferCosts(page_s=page_bytes / HOST_RATE, disk_page_s=page_bytes / DISK_RATE),
            ahead=None if has_disk else max(1, round(host_pages * AHEAD)),
            most_queued=pages,
            below=disk,
            most_storing=max(1, min(MOST_STORING, pages // 8)),
        )
    if layout.state is not None:
        checkpoints = int(cache.checkpoints)
        return HybridMemory(pages, page_tokens, checkpoints, prefix=prefix, tier=tier)
    if tier is not None:
        return TieredMemory(pages, page_tokens, prefix=prefix, tier=tier)
    return KVMemory(pages, page_tokens, prefix=prefix)
