"""Deterministic finite automata over code points, for sets of strings.

They are built from words, from lengths and from regular expressions (regexes.py), and can be
intersected, subtracted and united.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LAST = 0x10FFFF
MAX_STATES = 2000  # states of one finished automaton
MAX_EXPLORED = 8000  # states that may be explored while an automaton is built
MAX_TURNS = 40
Ranges = tuple[tuple[int, int], ...]  # of code points, ascending and disjoint
Edge = tuple[int, int, int]  # first and last code point, target state


class PatternError(ValueError):
    """A feature of an expression that cannot be enforced. The message names it."""


class TooLargeError(PatternError):
    """An automaton with too many states."""


@dataclass(frozen=True)
class Dfa:
    """A deterministic automaton. State 0 is the start; a character without an edge is rejected."""

    edges: tuple[tuple[Edge, ...], ...]
    finals: frozenset[int]

    def step(self, state: int, code: int) -> int | None:
        return next((to for low, high, to in self.edges[state] if low <= code <= high), None)

    def accepts(self, text: str) -> bool:
        state = 0
        for letter in text:
            if (to := self.step(state, ord(letter))) is None:
                return False
            state = to
        return state in self.finals

    def is_empty(self) -> bool:
        """Return True if no string matches. Exact because every automaton here is trimmed."""
        return not self.finals

    def few(self, most: int) -> list[str] | None:
        """Return the sorted strings of the language, or None if there are more than `most`."""
        texts: list[str] = []
        waiting = [(0, "")]
        while waiting:
            at, text = waiting.pop()
            if at in self.finals:
                texts.append(text)
            for low, high, to in self.edges[at]:
                waiting += [
                    (to, text + chr(code)) for code in range(low, min(high, low + most) + 1)
                ]
            if len(texts) > most or len(waiting) > most or len(text) > len(self.edges):
                return None
        return sorted(texts)

    def is_everything(self) -> bool:
        return self == ANYTHING


ANYTHING = Dfa((((0, LAST, 0),),), frozenset({0}))
NOTHING = Dfa(((),), frozenset())


def explored(
    start: object,
    edges_of: Callable[[Any], Iterable[tuple[int, int, Any]]],
    is_final: Callable[[Any], bool],
) -> Dfa:
    """Return the minimal automaton of a transition function.

    States may be any hashable values. The edges that `edges_of` returns for a state do not overlap.
    Raise TooLargeError.
    """
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
                if len(numbers) > MAX_EXPLORED:
                    raise TooLargeError("too many cases")
            mine.append((low, high, numbers[to]))
        number = numbers[at]
        edges.extend([] for _ in range(number + 1 - len(edges)))
        edges[number] = mine
        if is_final(at):
            finals.add(number)
    return _smallest(edges, finals)


def _smallest(edges: list[list[Edge]], finals: set[int]) -> Dfa:
    """Remove the states from which no final state is reachable, and merge equivalent ones."""
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
        if turn > MAX_TURNS:  # on long chains, which have hardly any equivalent states
            kinds = {at: at for at in alive}
            break
        num_kinds = len(seen)
    return _numbered(edges, finals & alive, kinds)


def _numbered(edges: list[list[Edge]], finals: set[int], kinds: dict[int, int]) -> Dfa:
    """Return an automaton with one state per kind, numbered in the order of discovery."""
    one_of = {kind: at for at, kind in kinds.items()}
    order, number_of = [kinds[0]], {kinds[0]: 0}
    numbered: list[tuple[Edge, ...]] = []
    for kind in order:
        mine = []
        for low, high, to in edges[one_of[kind]]:
            if to not in kinds:
                continue
            if kinds[to] not in number_of:
                number_of[kinds[to]] = len(order)
                order.append(kinds[to])
            mine.append((low, high, number_of[kinds[to]]))
        numbered.append(tuple(_joined(mine)))
    if len(numbered) > MAX_STATES:
        raise TooLargeError("too many cases")
    return Dfa(
        tuple(numbered), frozenset(number_of[kinds[at]] for at in finals if kinds[at] in number_of)
    )


def _joined(edges: list[Edge]) -> list[Edge]:
    joined_edges: list[Edge] = []
    for low, high, to in sorted(edges):
        if joined_edges and joined_edges[-1][2] == to and joined_edges[-1][1] + 1 == low:
            joined_edges[-1] = (joined_edges[-1][0], high, to)
        else:
            joined_edges.append((low, high, to))
    return joined_edges


# -- boolean operations ---------------------------------------------------------------------------


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
        for low, after in itertools.pairwise(cuts):
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


def _trie(texts: Iterable[str], most: float = math.inf) -> tuple[list[dict[int, int]], set[int]]:
    """Return the trie's edges by node, starting with node 0, and the nodes at which a text ends."""
    nodes: list[dict[int, int]] = [{}]
    ends = set()
    for text in texts:
        at = 0
        for letter in text:
            if (to := nodes[at].get(ord(letter))) is None:
                to = nodes[at][ord(letter)] = len(nodes)
                nodes.append({})
                if len(nodes) > most:
                    raise TooLargeError("too many cases")
            at = to
        ends.add(at)
    return nodes, ends


def words(texts: Iterable[str]) -> Dfa:
    """Return the automaton of exactly these texts."""
    trie, finals = _trie(texts, MAX_EXPLORED)
    return _smallest([sorted((c, c, to) for c, to in node.items()) for node in trie], finals)


def other_than(texts: Iterable[str], most_states: int) -> Dfa:
    """Return the automaton of all strings except these.

    If it would have more than `most_states` states, it also excludes strings that start like one of
    the texts.
    """
    trie, finals = _trie(sorted(texts))
    depth = [0] * len(trie)
    for at, node in enumerate(trie):  # a node precedes its children
        for to in node.values():
            depth[to] = depth[at] + 1
    last = max(depth)
    while last and sum(d <= last for d in depth) > most_states:
        last -= 1
    live = [at for at, d in enumerate(depth) if d <= last]
    number = {at: i + 1 for i, at in enumerate(live)} | {0: 0}
    sink = 1
    edges: list[tuple[Edge, ...]] = [(), ((0, LAST, sink),)]
    edges.extend(() for _ in live[1:])
    for at in live:
        mine = [(c, c, number[to]) for c, to in trie[at].items() if to in number]
        others = inverted(merged([(c, c) for c in trie[at]]))
        edges[number[at]] = tuple(sorted(mine + [(a, b, sink) for a, b in others]))
    return Dfa(tuple(edges), frozenset({sink, *(number[at] for at in live if at not in finals)}))


def lengths(low: int, high: int | None) -> Dfa:
    """Return the automaton of all strings of `low` to `high` characters."""
    last = low if high is None else high
    if last > MAX_STATES:
        raise TooLargeError("too many cases")
    edges: list[tuple[Edge, ...]] = [((0, LAST, at + 1),) for at in range(last)]
    edges.append(((0, LAST, last),) if high is None else ())
    return Dfa(tuple(edges), frozenset(range(low, last + 1)))


# -- sets of code points ------------------------------------------------------------------------


def merged(ranges: list[tuple[int, int]]) -> Ranges:
    merged_ranges: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged_ranges and low <= merged_ranges[-1][1] + 1:
            merged_ranges[-1] = (merged_ranges[-1][0], max(merged_ranges[-1][1], high))
        else:
            merged_ranges.append((low, high))
    return tuple(merged_ranges)


def inverted(ranges: Ranges) -> Ranges:
    gaps, begin = [], 0
    for low, high in ranges:
        if low > begin:
            gaps.append((begin, low - 1))
        begin = high + 1
    return (*gaps, (begin, LAST)) if begin <= LAST else tuple(gaps)
