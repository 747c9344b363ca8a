"""Store of saved recurrent states (checkpoints), with eviction. Independent of pages and requests.

A checkpoint is the state at the end of a page of some text. The checkpoints of texts that share
prefixes form a tree: the parent is the longest earlier checkpoint of the same text.

Decision: a checkpoint is worth the tokens that must be computed again without it, counted
from its parent, divided by its age since the last use. A long text is thus thinned out evenly, and
the fork of a shared prefix outlives the ends of many prompts. Plain least-recently-used eviction
would drop the fork's state first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nanovllm.kv.keys import Key, PageKeys


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One saved state. `keys` are those of a text that begins with its tokens and may be longer."""

    id: int
    key: Key
    num_tokens: int
    keys: PageKeys
    parent: Checkpoint | None  # the longest checkpoint of a prefix
    children: set[Checkpoint]


class Checkpoints:
    """A fixed number of places for states, with ids 0..count - 1."""

    def __init__(self, count: int, page_tokens: int) -> None:
        self.count = count
        self.page_tokens = page_tokens
        self.sizes = {"places": count, "kept": 0}
        self.events = {"saved": 0, "restored": 0, "evicted": 0}  # since the start
        self._by_key: dict[Key, Checkpoint] = {}
        # By the key of the page that follows the parent.
        self._after: dict[Key, set[Checkpoint]] = {}
        self._by_id: list[Checkpoint | None] = [None] * count
        self._blank = list(range(count))[::-1]
        # Tokens to compute again; inf where a place has no state.
        self._costs_C = np.full(count, np.inf)
        self._used_C = np.zeros(count)
        self._num_holders_C = np.zeros(count, np.int64)
        self._orphans: set[int] = set()  # places that are held and whose state was removed
        self._now = 0  # clock: incremented by each use and each take()

    def get(self, key: Key) -> Checkpoint | None:
        return self._by_key.get(key)

    def along(self, keys: PageKeys, most: int) -> Iterator[Checkpoint]:
        """Yield the checkpoints of the first `most` tokens of a text, the longest first."""
        for index in reversed(range(most // self.page_tokens)):
            if (checkpoint := self._by_key.get(keys.full(index))) is not None:
                yield checkpoint

    def longest(self, keys: PageKeys, most: int) -> Checkpoint | None:
        return next(self.along(keys, most), None)

    def beyond(self, start: Checkpoint | None, keys: PageKeys, end: int) -> Iterator[Checkpoint]:
        """Yield the children of `start` that are longer than `end` tokens and share these tokens.

        `start` is the longest checkpoint with fewer than `end` tokens. No checkpoint has exactly
        `end` tokens.
        """
        index = end // self.page_tokens
        for other in self._after.get(self._page_after(start, keys), ()):
            if other.num_tokens > end and other.keys.before(index) == keys.before(index):
                yield other

    # -- keeping ------------------------------------------------------------------------------

    def may_take(self, spared: int) -> bool:
        """Return True if `take` would return a place."""
        return bool(self._blank) or self._cheapest(self._now + 1, spared) is not None

    def take(self, spared: int) -> int:
        """Return a place for a state that saves `spared` tokens; -1 if all others are worth more.

        If no place is blank, evict the checkpoint of the least value that is not held.
        """
        self._now += 1
        if self._blank:
            return self._blank.pop()
        if (evicted := self._cheapest(self._now, spared)) is None:
            return -1
        self.events["evicted"] += 1
        self.remove(evicted)
        return self._blank.pop()

    def _cheapest(self, now: int, spared: int) -> Checkpoint | None:
        """Return the checkpoint of the least value if that is less than `spared`."""
        if not self.count:
            return None
        values_C = self._costs_C / (now - self._used_C + 1)
        values_C[self._num_holders_C > 0] = np.inf
        worst = int(values_C.argmin())
        return self._by_id[worst] if values_C[worst] < spared else None

    def hold(self, place: int) -> None:
        """Keep the state in a place unchanged until `drop`, also if it is removed meanwhile."""
        self._num_holders_C[place] += 1

    def drop(self, place: int) -> None:
        self._num_holders_C[place] -= 1
        if place in self._orphans and not self._num_holders_C[place]:
            self._orphans.remove(place)
            self._blank.append(place)

    @property
    def num_held(self) -> int:
        return int(np.count_nonzero(self._num_holders_C))

    def give_back(self, place: int) -> None:
        """Return a place that was taken and not used."""
        self._blank.append(place)

    def put(self, place: int, keys: PageKeys, num_tokens: int) -> None:
        """Register the state in a taken place: that of a text's first `num_tokens` tokens."""
        key = keys.last(num_tokens)
        if key in self._by_key:  # another request saved the same prefix first
            self._blank.append(place)
            return
        parent = self.longest(keys, num_tokens - 1)
        new = Checkpoint(
            id=place, key=key, num_tokens=num_tokens, keys=keys, parent=parent, children=set()
        )
        for other in list(self.beyond(parent, keys, num_tokens)):
            self._unlink(other)
            self._set_parent(other, new)
        self._set_parent(new, parent)
        self._by_key[key] = self._by_id[place] = new
        self.events["saved"] += 1
        self.sizes["kept"] += 1
        self._used_C[place] = self._now

    def restore(self, checkpoint: Checkpoint) -> None:
        """Count a use of the checkpoint."""
        self.events["restored"] += 1
        self._now += 1
        self._used_C[checkpoint.id] = self._now

    def remove(self, checkpoint: Checkpoint) -> None:
        self._unlink(checkpoint)
        for one in list(checkpoint.children):
            self._unlink(one)
            self._set_parent(one, checkpoint.parent)
        del self._by_key[checkpoint.key]
        self.sizes["kept"] -= 1
        self._by_id[checkpoint.id] = None
        self._costs_C[checkpoint.id] = np.inf
        if self._num_holders_C[checkpoint.id]:
            self._orphans.add(checkpoint.id)
        else:
            self._blank.append(checkpoint.id)

    def _set_parent(self, checkpoint: Checkpoint, parent: Checkpoint | None) -> None:
        checkpoint.parent, first = parent, 0
        if parent is not None:
            parent.children.add(checkpoint)
            first = parent.num_tokens
        self._after.setdefault(self._page_after(parent, checkpoint.keys), set()).add(checkpoint)
        self._costs_C[checkpoint.id] = checkpoint.num_tokens - first

    def _unlink(self, checkpoint: Checkpoint) -> None:
        if checkpoint.parent is not None:
            checkpoint.parent.children.remove(checkpoint)
        page = self._page_after(checkpoint.parent, checkpoint.keys)
        self._after[page].remove(checkpoint)
        if not self._after[page]:
            del self._after[page]

    def _page_after(self, parent: Checkpoint | None, keys: PageKeys) -> Key:
        """Return the key of the page that follows `parent` in a text. Few texts share it."""
        return keys.full(parent.num_tokens // self.page_tokens if parent is not None else 0)
