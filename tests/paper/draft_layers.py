"""Simulated layers of a draft model, in the pages of the target, for the simulated GPU.

The cell of a token depends on the tokens that a real layer's key would depend on. A model of its
own (lag 0) stores a hash of its prefix. A head of one layer (lag 1) stores a hash of its pair: the
next token, and the target's cell or, in later passes, its own state. A guess is right if all cells
that it reads have the values that follow from the text, else it is wrong. `faults` lists the
unexpected ones.

Places beyond the pages of a slot are in the padding page 0, which all slots share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

VOCAB = 50
POISON = VOCAB
NAN = -7
BLANK = -1


def advance(state: int, token: int) -> int:
    if state == NAN or token == POISON:
        return NAN
    return (state * 1_000_003 + token + 1) % (1 << 61)


def pair(token: int, hidden: int) -> int:
    return NAN if hidden == NAN or token == POISON else hash((token, hidden))


class Row(Protocol):
    """The used part of a slot of the simulated GPU."""

    pages: list[int]
    tokens: list[int]
    length: int  # index of the latest token
    num_cached: int


@dataclass
class DraftLayers:
    lag: int
    page_tokens: int
    memory: list[list[int]]
    faults: list[int] = field(default_factory=list)  # places of unexpected cells with a page
    homeless: list[int] = field(default_factory=list)  # lengths of guesses that lacked a page

    def page(self, row: Row, place: int) -> list[int]:
        at = place // self.page_tokens
        return self.memory[row.pages[at] if at < len(row.pages) else 0]

    def cells(self, row: Row, count: int) -> list[int]:
        """Return the first cells of a row. A NaN anywhere in their pages reaches all of them."""
        size = self.page_tokens
        whole = [cell for at in range(0, count, size) for cell in self.page(row, at)]
        num_own = len(row.pages) * size
        return [NAN] * count if NAN in whole[:num_own] else whole[:count]

    def feed(self, row: Row, place: int, token: int, hidden: int) -> None:
        before = self.page(row, place - 1)[(place - 1) % self.page_tokens] if place else 0
        cell = pair(token, hidden) if self.lag else advance(before, token)
        self.page(row, place)[place % self.page_tokens] = cell

    def first(self, row: Row, start: int, old: list[int], cell_of: Callable[[int], int]) -> None:
        """Feed a row of the step, from place `start` on, after its tokens were drawn.

        `old` are the tokens that the slot had there: those that the row fed, and one more. Of them,
        rejected drafts are still there. `cell_of` returns the target's cell of a place.
        """
        new = row.tokens[start:]
        tokens = [*new, *old[len(new) :]][: len(old)]
        for i, token in enumerate(tokens[self.lag :]):
            self.feed(row, start + i, token, cell_of(start + i) if self.lag else 0)

    def propose(self, row: Row, most: int, truth: Callable[[list[int]], int]) -> list[int]:
        """Return drafts after a row's latest token. `truth` returns the token after a text."""
        text, expected, state = row.tokens.copy(), self.expected(row.tokens), 0
        for nth in range(most):
            count = row.length + nth + 1 - self.lag
            if nth:
                self.feed(row, count - 1, text[-1], state)
                cell = pair(text[-1], state) if self.lag else advance(expected[-1], text[-1])
                expected.append(cell)
            cells = self.cells(row, count)
            state = hash(tuple(cells))
            is_right = cells == expected
            if count > len(row.pages) * self.page_tokens:
                self.homeless.append(count)
            elif not is_right:
                self._report(row, cells, expected)
            token = truth(text)
            text.append(token if is_right else (token + 1) % VOCAB)
        return text[len(row.tokens) :]

    def expected(self, tokens: list[int]) -> list[int]:
        """Return the cells that follow from a text."""
        prefixes = [0]
        for token in tokens:
            prefixes.append(advance(prefixes[-1], token))
        if not self.lag:
            return prefixes[1:]
        return [
            pair(token, prefix) for token, prefix in zip(tokens[1:], prefixes[1:], strict=False)
        ]

    def _report(self, row: Row, cells: list[int], expected: list[int]) -> None:
        """List unexpected cells, except those of poisoned texts and at page ends of a prefix.

        The last pair of a cached page may have the next token of another text, even a poisoned one.
        """
        if NAN in expected or (self.lag and NAN in cells):
            return
        places = [i for i, (a, b) in enumerate(zip(cells, expected, strict=True)) if a != b]
        for place in places:
            at_end = (place + 1) % self.page_tokens == 0 or place == row.num_cached - 1
            if not (self.lag and at_end and place < row.num_cached):
                self.faults.append(place)
