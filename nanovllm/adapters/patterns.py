"""Regular expressions of adapters, matched in bounded time.

Theory of operation: Python's own parser reads an expression. A part of it maps the set of places in
a name where a match of it may begin to the set of places where the match may end. Sets are bits of
an int. Nothing is tried twice for two ways to the same place, as Python's `re` does, which takes
exponential time for (a+)+$.

Decision: an adapter's own file has these expressions, so any of them may be hostile. Each step is
counted, and an adapter that takes more than MOST_STEPS is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from re import _constants as op, _parser as reader  # type: ignore[attr-defined]
from typing import Any

# ruff: noqa: ANN401 - items have the types of Python's parser

MOST_STEPS = 3_000_000  # of all matches of an adapter; they take about three seconds
MOST_CHARACTERS = 10_000  # of an expression
PLAIN = re.compile(r"[\w.-]*")
CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda character: character.isalnum() or character == "_",
}


class ExpressionError(ValueError):
    """An expression that is wrong, has an unsupported form, or takes too many steps."""


class Patterns:
    """The expressions of one adapter, and the steps that they may still take."""

    def __init__(self) -> None:
        self.left = MOST_STEPS
        self._parsed: dict[str, Any] = {}

    def is_whole(self, pattern: str, name: str) -> bool:
        """Return True if an expression matches a name from its beginning to its end."""
        return bool(self._ends(pattern, name, 1) >> len(name) & 1)

    def is_end(self, pattern: str, name: str) -> bool:
        """Return True if an expression matches all of a name, or what follows one of its dots."""
        self._count(1)
        if PLAIN.fullmatch(pattern) and len(pattern) < len(name):  # nearly all are
            if not name.endswith(pattern[pattern.rfind(".") + 1 :]):
                return False
            starts = int(name[-len(pattern) - 1] == ".") << len(name) - len(pattern)
        else:
            starts = 1 | sum(1 << at + 1 for at, one in enumerate(name) if one == ".")
        return bool(self._ends(pattern, name, starts) >> len(name) & 1)

    def _ends(self, pattern: str, name: str, starts: int) -> int:
        """Return the places in a name where a match from one of the `starts` may end."""
        if (items := self._parsed.get(pattern)) is None:
            items = self._parsed[pattern] = parsed(pattern)
        return Match(name, self._count).ends(items, starts)

    def _count(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise ExpressionError(
                "its regular expressions take too long to match; write them without nested "
                "repetitions, or list the names"
            )


class Match:
    """One name, and the sets of places in it. `count` is called with the number of steps."""

    def __init__(self, name: str, count: Callable[[int], None]) -> None:
        self.name, self.count = name, count
        self._matching: dict[int, int] = {}  # places of characters, by the id of an item
        self._around: dict[tuple[int, int], int] = {}  # ends, by the id of items and a place
        self.everywhere = (2 << len(name)) - 1

    def ends(self, items: Any, starts: int) -> int:
        """Return the places where a match of adjacent items from one of the `starts` may end."""
        for item in items:
            self.count(1)
            starts = self._item(item, starts)
        return starts

    def _item(self, item: Any, starts: int) -> int:
        code, value = item
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeated(starts, *value)
        if code is op.BRANCH:
            ends = 0
            for branch in value[1]:
                ends |= self.ends(branch, starts)
            return ends
        if code is op.SUBPATTERN and not any(value[1:3]):
            return self.ends(value[3], starts)
        if code is op.AT:
            return starts & self._places(value)
        if code in (op.ASSERT, op.ASSERT_NOT):
            return self._looked_around(starts, *value, is_wanted=code is op.ASSERT)
        if (places := self._matching.get(id(item))) is None:
            self.count(len(self.name) // 4)
            places = sum(1 << at for at, one in enumerate(self.name) if is_in(one, code, value))
            self._matching[id(item)] = places
        return (starts & places) << 1

    def _repeated(self, starts: int, low: int, most: int, inner: Any) -> int:
        for _ in range(low):
            before, starts = starts, self.ends(inner, starts)
            if starts == before:
                break
        ends, num_more = starts, low
        while num_more < most and starts:
            self.count(1)
            starts = self.ends(inner, starts) & ~ends
            ends |= starts
            num_more += 1
        return ends

    def _looked_around(self, starts: int, direction: int, inner: Any, *, is_wanted: bool) -> int:
        """Return those of the `starts` before or after which the items match, or do not match."""
        width, positions = inner.getwidth()[0] if direction < 0 else 0, 0
        for at in range(width, len(self.name) + 1):
            if not starts >> at & 1:
                continue
            if (ends := self._around.get((id(inner), at))) is None:
                ends = self._around[id(inner), at] = self.ends(inner, 1 << at - width)
            if ends:
                positions |= int(direction > 0 or ends >> at & 1) << at
        return positions if is_wanted else starts & ~positions

    def _places(self, kind: Any) -> int:
        if kind in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return 1
        if kind in (op.AT_END, op.AT_END_STRING):
            return 1 << len(self.name)
        is_word = [False, *map(CATEGORIES["WORD"], self.name), False]
        places = sum(1 << at for at in range(len(self.name) + 1) if is_word[at] != is_word[at + 1])
        return places if kind is op.AT_BOUNDARY else self.everywhere & ~places


def is_in(character: str, code: Any, value: Any) -> bool:
    """Return True if a parsed item has a character. Raise ExpressionError for other items."""
    if code is op.LITERAL:
        return bool(ord(character) == value)
    if code is op.NOT_LITERAL:
        return bool(ord(character) != value)
    if code is op.ANY:
        return character != "\n"
    if code is op.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    if code is op.CATEGORY:
        name = str(value).removeprefix("CATEGORY_")
        return CATEGORIES[name.removeprefix("NOT_")](character) != name.startswith("NOT_")
    is_inverted = value[0][0] is op.NEGATE
    return is_inverted != any(is_in(character, *part) for part in value[is_inverted:])


def parsed(pattern: str) -> Any:
    """Return the items of an expression. Raise ExpressionError."""
    shown = f"{pattern[:80]!r} is not a supported regular expression"
    if len(pattern) > MOST_CHARACTERS:
        raise ExpressionError(f"{shown}: it has more than {MOST_CHARACTERS} characters")
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = reader.parse(pattern)
        unsupported = [] if tree.state.flags == re.UNICODE else ["flags"]
        unsupported += unknown_items(tree)
    except (re.error, RecursionError, OverflowError) as error:
        raise ExpressionError(f"{shown}: {error}") from None
    if unsupported:
        raise ExpressionError(f"{shown}: {unsupported[0]}")
    return tree


def unknown_items(items: Any) -> list[str]:
    """Return the names of items that cannot be matched, such as references to groups."""
    unknown: list[str] = []
    for code, value in items:
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            unknown += unknown_items(value[2])
        elif code is op.BRANCH:
            unknown += [name for branch in value[1] for name in unknown_items(branch)]
        elif code is op.SUBPATTERN:
            unknown += [*(["flags"] if any(value[1:3]) else []), *unknown_items(value[3])]
        elif code in (op.ASSERT, op.ASSERT_NOT):
            unknown += unknown_items(value[1])
        elif code not in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN, op.AT):
            unknown.append(str(code).lower())
    return unknown
