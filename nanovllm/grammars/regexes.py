"""Regular expressions as automata.

Decision: Python's own parser reads the expressions, since its dialect is nearly ECMA's. Classes
have ECMA's meaning (\\d is 0 to 9), and `$` matches only at the very end. An expression without
anchors may match anywhere in the text, as in JSON Schema.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from re import _constants as op, _parser as reader  # type: ignore[attr-defined]
from typing import Any

from nanovllm.grammars.automata import (
    LAST,
    Dfa,
    PatternError,
    Ranges,
    TooLargeError,
    explored,
    inverted,
    merged,
)

MAX_COUNT = 128  # of one repetition outside JSON
MAX_VETTED = 1000  # states of an expression outside JSON; each takes 2 to 20 ms to compile
MAX_COPIES = 40_000  # states of an expression, with repetitions expanded
MAX_MEMBERS = 400_000  # members of all state sets together; takes about a second
WIDE = 30  # characters; a class of at least this size is wide
MANY = 24  # a larger upper limit of a repetition is not counted by states
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))


@lru_cache(maxsize=512)
def found(pattern: str) -> Dfa:
    """Return the automaton of texts that contain a match. Raise PatternError."""
    nfa = _Nfa()
    return _deterministic(nfa, nfa.build([list(parsed(pattern))], nfa.state()))


def anchored(items: list[Any]) -> Dfa:
    """Return the automaton of texts that these parts match from end to end."""
    nfa = _Nfa()
    return _deterministic(nfa, nfa.build([[_BEGINNING, *items, _ENDING]], nfa.state()))


@lru_cache(maxsize=512)
def loosened(pattern: str) -> tuple[Dfa, int | None]:
    """Return the automaton of texts that contain a match, and a limit of their length or None.

    If the expression has one large repetition whose limit also limits the whole text, the automaton
    omits that limit.
    """
    tree = list(parsed(pattern))
    if len(tree) < 3 or tree[0] != _BEGINNING or tree[-1] != _ENDING:
        return found(pattern), None
    inner = tree[1:-1]
    large = [i for i, (code, value) in enumerate(inner) if _is_large(code, value)]
    others = [_width(item) for i, item in enumerate(inner) if [i] != large]
    if len(large) != 1 or None in others:
        return found(pattern), None
    code, (low, most, repeated) = inner[large[0]]
    inner[large[0]] = (code, (low, op.MAXREPEAT, repeated))
    return anchored(inner), most + sum(width for width in others if width is not None)


_BEGINNING, _ENDING = (op.AT, op.AT_BEGINNING), (op.AT, op.AT_END)


def _is_large(code: Any, value: Any) -> bool:  # noqa: ANN401
    is_repeat = code in (op.MAX_REPEAT, op.MIN_REPEAT)
    return is_repeat and MANY < value[1] is not op.MAXREPEAT and value[2].getwidth() == (1, 1)


def _width(item: Any) -> int | None:  # noqa: ANN401
    """Return the number of characters of an item, or None if it varies."""
    code, value = item
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        low, high = value[2].getwidth()
        return value[0] * low if low == high and value[0] == value[1] else None
    if code is op.SUBPATTERN:
        low, high = value[3].getwidth()
        return low if low == high else None
    return 1 if code in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN) else None


def num_wide(items: Any) -> int:  # noqa: ANN401 - the reader's
    """Return the number of wide classes, with repetitions expanded."""
    count = 0
    for code, value in items:
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, inner = value
            count += max(1, low if most is op.MAXREPEAT else most) * num_wide(inner)
        elif code in (op.BRANCH, op.SUBPATTERN):
            branches = value[1] if code is op.BRANCH else [value[3]]
            count += sum(map(num_wide, branches))
        elif code in (op.IN, op.NOT_LITERAL, op.ANY):
            count += sum(high - low + 1 for low, high in class_of(code, value)) >= WIDE
    return count


def whole(pattern: str) -> Dfa:
    """Return the automaton of texts that the expression matches from end to end."""
    return found(f"^(?:{pattern})$")


def parsed(pattern: str) -> Any:  # noqa: ANN401 - the reader's
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = reader.parse(pattern.replace("\\/", "/"))
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"a form that is not known ({error})") from None
    if tree.state.flags != re.UNICODE:
        raise PatternError("flags")
    return tree


class _Nfa:
    """Nondeterministic automaton.

    Some of its empty moves are allowed only before the first or after the last character.
    """

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.at_start: dict[int, list[int]] = {}
        self.at_end: dict[int, list[int]] = {}
        self.by_class: list[list[tuple[Ranges, int]]] = []

    def state(self) -> int:
        self.free.append([])
        self.by_class.append([])
        if len(self.free) > MAX_COPIES:
            raise TooLargeError("repetitions that come to too many characters")
        return len(self.free) - 1

    def build(self, branches: Any, start: int) -> int:  # noqa: ANN401
        end = self.state()
        for branch in branches:
            at = self.state()
            self.free[start].append(at)
            for code, value in branch:
                at = self._item(code, value, at)
            self.free[at].append(end)
        return end

    def _item(self, code: Any, value: Any, at: int) -> int:  # noqa: ANN401
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, inner = value
            return self._repeated(low, most, inner, at)
        if code is op.SUBPATTERN and not any(value[1:3]):
            return self.build([value[3]], at)
        if code is op.BRANCH:
            return self.build(value[1], at)
        to = self.state()
        if code is op.AT and value in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            self.at_start.setdefault(at, []).append(to)
        elif code is op.AT and value in (op.AT_END, op.AT_END_STRING):
            self.at_end.setdefault(at, []).append(to)
        else:
            self.by_class[at].append((class_of(code, value), to))
        return to

    def _repeated(self, low: int, most: Any, inner: Any, at: int) -> int:  # noqa: ANN401
        for _ in range(low):
            at = self.build([inner], at)
        if most is op.MAXREPEAT:
            loop, end = self.state(), self.state()
            self.free[at].append(loop)
            self.free[self.build([inner], loop)].append(loop)
            self.free[loop].append(end)
            return end
        end = self.state()
        for _ in range(low, most):
            self.free[at].append(end)
            at = self.build([inner], at)
        self.free[at].append(end)
        return end


def class_of(code: Any, value: Any) -> Ranges:  # noqa: ANN401
    """Return the characters that a parsed item matches. Raise PatternError."""
    if code is op.LITERAL:
        return ((value, value),)
    if code is op.NOT_LITERAL:
        return inverted(((value, value),))
    if code is op.ANY:
        return inverted(_LINE_ENDS)
    if code is op.RANGE:
        return (value,)
    if code is op.CATEGORY:
        name = str(value).removeprefix("CATEGORY_")
        ranges = {"D": _DIGIT, "W": _WORD, "S": _SPACE}[name.removeprefix("NOT_")[0]]
        return inverted(ranges) if name.startswith("NOT_") else ranges
    if code is op.IN:
        is_inverted = value[0][0] is op.NEGATE
        parts = [class_of(*part) for part in value[is_inverted:]]
        ranges = merged([pair for part in parts for pair in part])
        return inverted(ranges) if is_inverted else ranges
    name = str(code).lower().replace("assert", "look-around").replace("groupref", "reference")
    raise PatternError(f"{name}, a form that is not known")


StateSet = frozenset[int]
_DONE: StateSet = frozenset({-1})  # already matched; any text may follow


def _deterministic(nfa: _Nfa, end: int) -> Dfa:
    """Return an automaton of the texts that contain a match."""
    subsets = _Subsets(nfa, end)
    return explored(subsets.first(), subsets.edges_of, subsets.is_final)


class _Subsets:
    """Sets of possible states, with a flag for the start of the text."""

    def __init__(self, nfa: _Nfa, end: int) -> None:
        self._nfa = nfa
        self._end = end
        self._left = MAX_MEMBERS
        self._again = self._closed([0])
        targets = {to for moves in nfa.by_class for _, to in moves}
        self._free = {at: self._closed([at]) for at in targets}

    def _closed(self, states: Iterable[int], *extra: dict[int, list[int]]) -> StateSet:
        known = set(states)
        waiting = list(known)
        while waiting:
            at = waiting.pop()
            others = (to for moves in extra for to in moves.get(at, ()))
            new = {to for to in (*self._nfa.free[at], *others) if to not in known}
            known |= new
            waiting += new
        return frozenset(known)

    def first(self) -> tuple[bool, StateSet]:
        return True, self._settled(self._closed([0], self._nfa.at_start))

    def _settled(self, states: StateSet) -> StateSet:
        return _DONE if self._end in states else states

    def is_final(self, at: tuple[bool, StateSet]) -> bool:
        is_first, states = at
        if states == _DONE or self._end in self._closed(states, self._nfa.at_end):
            return True
        return is_first and self._end in self._closed([0], self._nfa.at_start, self._nfa.at_end)

    def edges_of(
        self, at: tuple[bool, StateSet]
    ) -> Iterable[tuple[int, int, tuple[bool, StateSet]]]:
        if at[1] == _DONE:
            yield 0, LAST, (False, _DONE)
            return
        self._left -= len(at[1])
        if self._left < 0:
            raise TooLargeError("too many places where a text may be at once")
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for ranges, to in (move for state in at[1] for move in self._nfa.by_class[state]):
            for low, high in ranges:
                starts.setdefault(low, []).append(to)
                ends.setdefault(high + 1, []).append(to)
        live: Counter[int] = Counter()
        for low, after in pairwise(sorted({0, LAST + 1, *starts, *ends})):
            live.subtract(ends.get(low, ()))
            live.update(starts.get(low, ()))
            there = self._again.union(*(self._free[to] for to, n in live.items() if n > 0))
            yield low, after - 1, (False, self._settled(there))


# -- expressions outside JSON ----------------------------------------------------------------------


def vet(pattern: str) -> None:
    """Check a pattern for whole texts, which xgrammar itself compiles. Raise PatternError.

    xgrammar 0.2.8 ignores look-around, flags and inner anchors, and fails at large counts.
    """
    items = list(parsed(pattern))
    starts, ends = items[:1] == [(op.AT, op.AT_BEGINNING)], items[-1:] == [(op.AT, op.AT_END)]
    _num_states(items[starts : len(items) - ends])


def _num_states(items: Any) -> int:  # noqa: ANN401 - the reader's: a list of (code, value)
    """Return an estimate of the number of states."""
    states = 0
    for code, value in items:
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, repeated = value
            high = 0 if most is op.MAXREPEAT else most
            if max(low, high) > MAX_COUNT:
                raise PatternError(f"a repetition of more than {MAX_COUNT} times")
            states += max(low, high or 1) * _num_states(repeated)
        elif code in (op.BRANCH, op.SUBPATTERN) and not (code is op.SUBPATTERN and any(value[1:3])):
            states += sum(map(_num_states, value[1] if code is op.BRANCH else [value[3]]))
        else:
            class_of(code, value)
            states += 1
        if states > MAX_VETTED:
            raise PatternError(f"repetitions that come to more than {MAX_VETTED} characters")
    return states
