"""Which recurrent states are kept, each behind how many pages of which text, and which goes first.

Decision: a checkpoint is worth the tokens that its loss would have others compute again, those from
the nearest earlier checkpoint of the same text, and the less the longer nobody used it. So a long
text is thinned out evenly, the fork of a prefix that all share outlives many ends of prompts, and
what nobody comes back to goes. Plain least-recently-used would drop the fork's state first.

Knows no pages and no requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nanovllm.kv.keys import Key, PageKeys


@dataclass(slots=True, eq=False)
class Checkpoint:
    """`keys` are those of some text that begins with the checkpoint's tokens, and may be longer."""

    id: int
    key: Key
    num_tokens: int
    keys: PageKeys
    before: Checkpoint | None  # the nearest one whose tokens are the first of these
    behind: set[Checkpoint]


class Checkpoints:
    """`count` places for states, named 0..count - 1."""

    def __init__(self, count: int, page_tokens: int) -> None:
        self.count = count
        self.page_tokens = page_tokens
        self.sizes = {"places": count, "kept": 0}
        self.events = {"saved": 0, "restored": 0, "evicted": 0}  # since the start
        self._of: dict[Key, Checkpoint] = {}
        self._after: dict[Key, set[Checkpoint]] = {}  # by the page after the one before
        self._by_id: list[Checkpoint | None] = [None] * count
        self._blank = list(range(count))[::-1]
        self._costs_C = np.full(count, np.inf)  # tokens to compute again; inf: none to be evicted
        self._used_C = np.zeros(count)
        self._now = 0  # counts uses, and states that want a place

    def get(self, key: Key) -> Checkpoint | None:
        return self._of.get(key)

    def along(self, keys: PageKeys, most: int) -> Iterator[Checkpoint]:
        """All checkpoints of the first `most` tokens of a text, the longest first."""
        for index in reversed(range(most // self.page_tokens)):
            if (found := self._of.get(keys.full(index))) is not None:
                yield found

    def longest(self, keys: PageKeys, most: int) -> Checkpoint | None:
        return next(self.along(keys, most), None)

    def beyond(self, start: Checkpoint | None, keys: PageKeys, end: int) -> Iterator[Checkpoint]:
        """The nearest behind more than the first `end` tokens of a text, whoever goes on with them.

        `start`: the longest behind fewer of them. There is none behind just as many.
        """
        index = end // self.page_tokens
        for other in self._after.get(self._page_after(start, keys), ()):
            if other.num_tokens > end and other.keys.before(index) == keys.before(index):
                yield other

    # -- keeping ------------------------------------------------------------------------------

    def take(self, spared: int) -> int:
        """A place for a state that spares so many tokens, for which a worse one may have to go.

        -1: all others are better.
        """
        self._now += 1
        if self._blank:
            return self._blank.pop()
        values_C = self._costs_C / (self._now - self._used_C + 1)
        if not self.count or values_C[worst := int(values_C.argmin())] >= spared:
            return -1
        self.events["evicted"] += 1
        evicted = self._by_id[worst]
        assert evicted is not None
        self.remove(evicted)
        return self._blank.pop()

    def give_back(self, place: int) -> None:
        """A place that was taken and is not used."""
        self._blank.append(place)

    def put(self, place: int, keys: PageKeys, num_tokens: int) -> None:
        """The place that was taken has the state behind so many tokens of a text."""
        key = keys.last(num_tokens)
        if key in self._of:  # somebody else was as quick
            self._blank.append(place)
            return
        before = self.longest(keys, num_tokens - 1)
        new = Checkpoint(place, key, num_tokens, keys, before, set())
        for other in list(self.beyond(before, keys, num_tokens)):
            self._unlink(other)
            self._set_before(other, new)
        self._set_before(new, before)
        self._of[key] = self._by_id[place] = new
        self.events["saved"] += 1
        self.sizes["kept"] += 1
        self._used_C[place] = self._now

    def restore(self, checkpoint: Checkpoint) -> None:
        """Somebody goes on from there."""
        self.events["restored"] += 1
        self._now += 1
        self._used_C[checkpoint.id] = self._now

    def remove(self, checkpoint: Checkpoint) -> None:
        self._unlink(checkpoint)
        for one in list(checkpoint.behind):
            self._unlink(one)
            self._set_before(one, checkpoint.before)
        del self._of[checkpoint.key]
        self.sizes["kept"] -= 1
        self._by_id[checkpoint.id] = None
        self._costs_C[checkpoint.id] = np.inf
        self._blank.append(checkpoint.id)

    def _set_before(self, checkpoint: Checkpoint, before: Checkpoint | None) -> None:
        checkpoint.before, first = before, 0
        if before is not None:
            before.behind.add(checkpoint)
            first = before.num_tokens
        self._after.setdefault(self._page_after(before, checkpoint.keys), set()).add(checkpoint)
        self._costs_C[checkpoint.id] = checkpoint.num_tokens - first

    def _unlink(self, checkpoint: Checkpoint) -> None:
        if checkpoint.before is not None:
            checkpoint.before.behind.remove(checkpoint)
        page = self._page_after(checkpoint.before, checkpoint.keys)
        self._after[page].remove(checkpoint)
        if not self._after[page]:
            del self._after[page]

    def _page_after(self, before: Checkpoint | None, keys: PageKeys) -> Key:
        """The page with which a text goes on behind a checkpoint: few others go on with it."""
        return keys.full(before.num_tokens // self.page_tokens if before is not None else 0)
