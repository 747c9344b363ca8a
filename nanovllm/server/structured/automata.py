"""Languages of texts as deterministic automata over code points: regular expressions, lists of
words and lengths, which intersect, exclude each other, and become rules of a grammar.

Decision: expressions are read by Python's own reader, whose dialect is nearly ECMA's; what the
classes mean is ECMA's (\\d is 0 to 9), and `$` is the very end. As in JSON Schema an expression is
searched for: without anchors it may stand anywhere.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from re import _constants as op, _parser as reader  # type: ignore[attr-defined]
from typing import Any

LAST = 0x10FFFF
MAX_CHARS = 4096  # of an expression
MAX_STATES = 3000  # of an automaton, and of what it is made from ten times as many
MAX_COPIES = 30 * MAX_STATES
MAX_TURNS = 40
MANY = 24  # from here on a repetition's upper limit is not counted by states
Ranges = tuple[tuple[int, int], ...]  # of code points, ascending and apart
Edge = tuple[int, int, int]  # from one code point to another, and the state behind
EVERY: Ranges = ((0, LAST),)

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))


class PatternError(ValueError):
    """Says what in the expression cannot be enforced."""


class TooLargeError(PatternError):
    """There would be too many states."""


@dataclass(frozen=True)
class Dfa:
    """State 0 is the first. Where no edge leads, nothing matches."""

    edges: tuple[tuple[Edge, ...], ...]
    finals: frozenset[int]

    def step(self, state: int, code: int) -> int | None:
        return next((to for low, high, to in self.edges[state] if low <= code <= high), None)

    def accepts(self, text: str) -> bool:
        state: int | None = 0
        for letter in text:
            if (state := self.step(state, ord(letter))) is None:
                return False
        return state in self.finals

    def is_empty(self) -> bool:
        """Sound because every automaton here is trimmed."""
        return not self.finals

    def is_everything(self) -> bool:
        return self == ANYTHING


ANYTHING = Dfa((((0, LAST, 0),),), frozenset({0}))
NOTHING = Dfa(((),), frozenset())


def explored(
    start: object,
    edges_of: Callable[[Any], Iterable[tuple[int, int, Any]]],
    is_final: Callable[[Any], bool],
) -> Dfa:
    """The smallest automaton of what `edges_of` says, whose states may be anything hashable. Its
    edges do not overlap. Raises TooLargeError."""
    numbers = {start: 0}
    edges: list[list[Edge]] = []
    finals = set()
    waiting = [start]
    while waiting:
        at = waiting.pop(0) if len(waiting) < 100 else waiting.pop()
        mine = []
        for low, high, to in edges_of(at):
            if to not in numbers:
                numbers[to] = len(numbers)
                waiting.append(to)
                if len(numbers) > 10 * MAX_STATES:
                    raise TooLargeError("too many cases")
            mine.append((low, high, numbers[to]))
        number = numbers[at]
        edges.extend([] for _ in range(number + 1 - len(edges)))
        edges[number] = mine
        if is_final(at):
            finals.add(number)
    return _smallest(edges, finals)


def _smallest(edges: list[list[Edge]], finals: set[int]) -> Dfa:
    """Without states that lead nowhere, and with equal ones as one."""
    before: list[list[int]] = [[] for _ in edges]
    for at, mine in enumerate(edges):
        for _, _, to in mine:
            before[to].append(at)
    alive, waiting = set(finals), list(finals)
    while waiting:
        for at in before[waiting.pop()]:
            if at not in alive:
                alive.add(at)
                waiting.append(at)
    if 0 not in alive:
        return NOTHING
    kinds = {at: int(at in finals) for at in alive}
    num_kinds = len(set(kinds.values()))
    for turn in itertools.count():
        seen: dict[object, int] = {}
        now = {}
        for at in alive:
            known = _joined([(a, b, kinds[to]) for a, b, to in edges[at] if to in alive])
            now[at] = seen.setdefault((kinds[at], tuple(known)), len(seen))
        kinds = now
        if len(seen) == num_kinds:
            break
        if turn > MAX_TURNS:  # long chains, in which hardly any two are equal
            kinds = {at: at for at in alive}
            break
        num_kinds = len(seen)
    return _numbered(edges, finals & alive, kinds)


def _numbered(edges: list[list[Edge]], finals: set[int], kinds: dict[int, int]) -> Dfa:
    """One state a kind, in the order in which they are reached."""
    one_of = {kind: at for at, kind in kinds.items()}
    order, number_of = [kinds[0]], {kinds[0]: 0}
    made: list[tuple[Edge, ...]] = []
    for kind in order:
        mine = []
        for low, high, to in edges[one_of[kind]]:
            if to not in kinds:
                continue
            if kinds[to] not in number_of:
                number_of[kinds[to]] = len(order)
                order.append(kinds[to])
            mine.append((low, high, number_of[kinds[to]]))
        made.append(tuple(_joined(mine)))
    if len(made) > MAX_STATES:
        raise TooLargeError("too many cases")
    return Dfa(
        tuple(made), frozenset(number_of[kinds[at]] for at in finals if kinds[at] in number_of)
    )


def _joined(edges: list[Edge]) -> list[Edge]:
    made: list[Edge] = []
    for low, high, to in sorted(edges):
        if made and made[-1][2] == to and made[-1][1] + 1 == low:
            made[-1] = (made[-1][0], high, to)
        else:
            made.append((low, high, to))
    return made


# -- one of two, both, or not ---------------------------------------------------------------------


def intersection(one: Dfa, other: Dfa) -> Dfa:
    if one.is_everything():
        return other
    return one if other.is_everything() else _product(one, other, lambda a, b: a and b)


def difference(one: Dfa, other: Dfa) -> Dfa:
    return _product(one, other, lambda a, b: a and not b)


def union(one: Dfa, other: Dfa) -> Dfa:
    return _product(one, other, lambda a, b: a or b)


def _product(one: Dfa, other: Dfa, keep: Callable[[bool, bool], bool]) -> Dfa:
    Pair = tuple[int | None, int | None]
    needs_one, needs_other = not keep(False, True), not keep(True, False)

    def edges_of(pair: Pair) -> Iterable[tuple[int, int, Pair]]:
        left = one.edges[pair[0]] if pair[0] is not None else ()
        right = other.edges[pair[1]] if pair[1] is not None else ()
        cuts = sorted({c for a, b, _ in (*left, *right) for c in (a, b + 1)})
        i = j = 0
        for low, after in zip(cuts, cuts[1:], strict=False):
            while i < len(left) and left[i][1] < low:
                i += 1
            while j < len(right) and right[j][1] < low:
                j += 1
            to_one = left[i][2] if i < len(left) and left[i][0] <= low else None
            to_other = right[j][2] if j < len(right) and right[j][0] <= low else None
            if (to_one is None and (needs_one or to_other is None)) or (
                to_other is None and needs_other
            ):
                continue
            yield low, after - 1, (to_one, to_other)

    def is_final(pair: Pair) -> bool:
        return keep(pair[0] in one.finals, pair[1] in other.finals)

    return explored((0, 0), edges_of, is_final)


def words(texts: Iterable[str]) -> Dfa:
    """These and no others."""
    trie: list[dict[int, int]] = [{}]
    finals = set()
    for text in texts:
        at = 0
        for letter in text:
            if (to := trie[at].get(ord(letter))) is None:
                to = trie[at][ord(letter)] = len(trie)
                trie.append({})
                if len(trie) > 10 * MAX_STATES:
                    raise TooLargeError("too many cases")
            at = to
        finals.add(at)
    return _smallest([sorted((c, c, to) for c, to in node.items()) for node in trie], finals)


def other_than(texts: Iterable[str], most_states: int) -> Dfa:
    """All texts but these. Where there would be too many states, texts that begin as one of these
    are left out as well."""
    trie: list[dict[int, int]] = [{}]
    finals = set()
    depth = [0]
    for text in sorted(texts):
        at = 0
        for letter in text:
            if (to := trie[at].get(ord(letter))) is None:
                to = trie[at][ord(letter)] = len(trie)
                trie.append({})
                depth.append(depth[at] + 1)
            at = to
        finals.add(at)
    last = max(depth)
    while last and sum(d <= last for d in depth) > most_states:
        last -= 1
    kept = [at for at, d in enumerate(depth) if d <= last]
    number = {at: i + 1 for i, at in enumerate(kept)} | {0: 0}
    sink = 1
    edges: list[tuple[Edge, ...]] = [(), ((0, LAST, sink),)]
    edges.extend(() for _ in kept[1:])
    for at in kept:
        mine = [(c, c, number[to]) for c, to in trie[at].items() if to in number]
        others = inverted(merged([(c, c) for c in trie[at]]))
        edges[number[at]] = tuple(sorted(mine + [(a, b, sink) for a, b in others]))
    return Dfa(tuple(edges), frozenset({sink, *(number[at] for at in kept if at not in finals)}))


def lengths(low: int, high: int | None) -> Dfa:
    """Texts of so many characters."""
    last = low if high is None else high
    if last > MAX_STATES:
        raise TooLargeError("too many cases")
    edges = [((0, LAST, at + 1),) for at in range(last)]
    edges.append(((0, LAST, last),) if high is None else ())
    return Dfa(tuple(edges), frozenset(range(low, last + 1)))


# -- regular expressions --------------------------------------------------------------------------


@lru_cache(maxsize=512)
def found(pattern: str) -> Dfa:
    """The texts in which the expression is found. Raises PatternError."""
    made = _Nfa()
    tree = list(parsed(pattern))
    texts = made.build([tree], made.state())
    return _deterministic(made, texts)


@lru_cache(maxsize=512)
def loosened(pattern: str) -> tuple[Dfa, int | None]:
    """The same without the upper limit of its one large repetition, where the limit is also one of
    the whole text's length: texts found, and of at most so many characters."""
    tree = list(parsed(pattern))
    if len(tree) < 3 or tree[0] != _BEGINNING or tree[-1] != _ENDING:
        return found(pattern), None
    inner = tree[1:-1]
    large = [i for i, (code, value) in enumerate(inner) if _is_large(code, value)]
    if len(large) != 1:
        return found(pattern), None
    others = [_width(item) for i, item in enumerate(inner) if i != large[0]]
    if None in others:
        return found(pattern), None
    code, (low, most, repeated) = inner[large[0]]
    inner[large[0]] = (code, (low, op.MAXREPEAT, repeated))
    made = _Nfa()
    loose = _deterministic(made, made.build([[tree[0], *inner, tree[-1]]], made.state()))
    return loose, most + sum(width for width in others if width is not None)


_BEGINNING, _ENDING = (op.AT, op.AT_BEGINNING), (op.AT, op.AT_END)


def _is_large(code: Any, value: Any) -> bool:  # noqa: ANN401
    is_repeat = code in (op.MAX_REPEAT, op.MIN_REPEAT)
    return is_repeat and MANY < value[1] is not op.MAXREPEAT and value[2].getwidth() == (1, 1)


def _width(item: Any) -> int | None:  # noqa: ANN401
    """Of an item that is always as wide."""
    code, value = item
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        low, high = value[2].getwidth()
        return value[0] * low if low == high and value[0] == value[1] else None
    if code is op.SUBPATTERN:
        low, high = value[3].getwidth()
        return low if low == high else None
    return 1 if code in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN) else None


@lru_cache(maxsize=64)
def whole(pattern: str) -> Dfa:
    """The texts that the expression matches from end to end."""
    return found(f"^(?:{pattern})$")


def parsed(pattern: str) -> Any:  # noqa: ANN401 - the reader's
    if len(pattern) > MAX_CHARS:
        raise PatternError(f"more than {MAX_CHARS} characters")
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = reader.parse(pattern.replace("\\/", "/"))
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"a form that is not known ({error})") from None
    if tree.state.flags != re.UNICODE:
        raise PatternError("flags")
    return tree


class _Nfa:
    """With free moves, some of them only before the first character or behind the last."""

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
            return self._repeated(*value, at)
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
    """The characters of one item of the reader's. Raises PatternError."""
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


def merged(ranges: list[tuple[int, int]]) -> Ranges:
    made: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], high))
        else:
            made.append((low, high))
    return tuple(made)


def inverted(ranges: Ranges) -> Ranges:
    made, begin = [], 0
    for low, high in ranges:
        if low > begin:
            made.append((begin, low - 1))
        begin = high + 1
    return (*made, (begin, LAST)) if begin <= LAST else tuple(made)


def _deterministic(nfa: _Nfa, end: int) -> Dfa:
    """Of texts in which it is found: anything may stand before and behind."""

    def closed(states: Iterable[int], *more: dict[int, list[int]]) -> frozenset[int]:
        known = set(states)
        waiting = list(known)
        while waiting:
            at = waiting.pop()
            for to in (*nfa.free[at], *(to for moves in more for to in moves.get(at, ()))):
                if to not in known:
                    known.add(to)
                    waiting.append(to)
        return frozenset(known)

    done = frozenset({-1})
    again = closed([0])
    free = {at: closed([at]) for at in {to for m in nfa.by_class for _, to in m}}

    def settled(states: frozenset[int]) -> frozenset[int]:
        return done if end in states else states

    def edges_of(states: frozenset[int]) -> Iterable[tuple[int, int, frozenset[int]]]:
        if states is done or states == done:
            return [(0, LAST, done)]
        moves = [(r, to) for at in states for r, to in nfa.by_class[at]]
        cuts = sorted({0, LAST + 1, *(c for r, _ in moves for a, b in r for c in (a, b + 1))})
        ends: dict[int, list[int]] = {}
        starts: dict[int, list[int]] = {}
        for ranges, to in moves:
            for a, b in ranges:
                starts.setdefault(a, []).append(to)
                ends.setdefault(b + 1, []).append(to)
        live: dict[int, int] = {}
        made = []
        for low, after in zip(cuts, cuts[1:], strict=False):
            for to in ends.get(low, ()):
                live[to] -= 1
            for to in starts.get(low, ()):
                live[to] = live.get(to, 0) + 1
            there = again.union(*(free[to] for to, count in live.items() if count > 0))
            made.append((low, after - 1, settled(there)))
        return made

    def is_final(states: frozenset[int]) -> bool:
        return states == done or end in closed(states, nfa.at_end)

    first = settled(closed([0], nfa.at_start))
    alone = closed([0], nfa.at_start, nfa.at_end)
    made = explored((0, first), lambda s: ((a, b, (1, t)) for a, b, t in edges_of(s[1])),
                    lambda s: is_final(s[1]) or (s[0] == 0 and end in alone))  # fmt: skip
    return made
