"""Seeded random choices, with a held-out part of every pool, wording and number range.

One value, name or wording in ten is reserved by its own hash. Training never draws it; evaluation
draws only from the reserved ones. This module is independent of the texts' subjects.

Decision: a template with few wordings is used on both sides, with held-out values. Holding out its
only wording would test a form that the model has never seen.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Node = str | list["Node"] | tuple["Node", ...]  # text, sequence, alternatives
ONE_IN = 10
FEW = 12  # wordings; a template with fewer is used on both sides of the split


def reserved(text: str) -> bool:
    """Return True if the text is reserved for evaluation. Ignore case and final punctuation."""
    return zlib.crc32(text.lower().rstrip(" ?.!").encode()) % ONE_IN == 0


class Pool:
    """Values, split once into those for training and those for evaluation."""

    def __init__(self, text: str) -> None:
        values = [value.strip() for value in text.replace("\n", " ").split(",") if value.strip()]
        self.all = values
        self.train = [value for value in values if not reserved(value)]
        self.held = [value for value in values if reserved(value)]
        least = 3 if len(values) > 12 else 1
        while len(self.held) < least:
            self.held.append(self.train.pop())


@cache
def parse(template: str) -> Node:
    """Parse a template. `(a|b)` are alternatives and may nest; everything else is text."""
    alternatives: list[Node] = []
    sequence: list[Node] = []
    stack: list[tuple[list[Node], list[Node]]] = []
    for piece in re.split(r"([(|)])", template):
        if piece == "(":
            stack.append((alternatives, sequence))
            alternatives, sequence = [], []
        elif piece == "|" and stack:
            alternatives.append(sequence)
            sequence = []
        elif piece == ")" and stack:
            group = (*alternatives, sequence)
            alternatives, sequence = stack.pop()
            sequence.append(group)
        elif piece:
            sequence.append(piece)
    if stack:
        raise ValueError(f"unclosed ( in {template!r}")
    return sequence


@cache
def ways(template: str) -> int:
    """Return the number of texts that the template can expand to."""

    def count(node: Node) -> int:
        if isinstance(node, str):
            return 1
        if isinstance(node, tuple):
            return sum(map(count, node))
        return math.prod(map(count, node))

    return count(parse(template))


class Draw:
    """Source of seeded choices. `held` selects the side of the split: True for evaluation."""

    def __init__(self, seed: int, held: bool = False) -> None:
        self.random = random.Random(seed)
        self.held = held

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.random.random() * len(options))]

    def number(self, low: int, high: int) -> int:
        return low + int(self.random.random() * (high - low + 1))

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Return `count` different options in random order."""
        return self.random.sample(options, count)

    def value(self, pool: Pool) -> str:
        return self.pick(pool.held if self.held else pool.train)

    def from_split(self, make: Callable[[], T], key: Callable[[T], str] = str) -> T:
        """Return the first result of `make` on this side of the split, or the 200th if none is."""
        for _ in range(200):
            thing = make()
            if reserved(key(thing)) == self.held:
                break
        return thing

    def wording(self, templates: Sequence[str]) -> str:
        """Return a wording: a template with its alternatives chosen and its {fields} left in."""
        template = self.pick(templates)
        if ways(template) < FEW:
            return self.expand(template)
        return self.from_split(lambda: self.expand(template))

    def expand(self, template: str) -> str:
        return self._choose(parse(template))

    def _choose(self, node: Node) -> str:
        if isinstance(node, str):
            return node
        if isinstance(node, tuple):
            return self._choose(self.pick(node))
        return "".join([self._choose(part) for part in node])
