"""Strings under constraints, as words, as automata, or with a length counted during generation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, reduce

from nanovllm.grammars.automata import (
    ANYTHING,
    MAX_EXPLORED,
    Dfa,
    TooLargeError,
    difference,
    explored,
    intersection,
    lengths,
    words,
)
from nanovllm.grammars.facts import String
from nanovllm.grammars.formats import FORMATS, SHORTER, WRITTEN
from nanovllm.grammars.regexes import MANY, WIDE, found, loosened, num_wide, parsed, whole

MOST_COUNTED = 256  # largest minLength that is counted by states
MOST_CASES = 1000  # states times lengths; beyond it, long texts are not allowed
LEAST_CASES = 60
MOST_WIDE = 160  # states with a wide choice; an automaton with more is slow to compile
DWELLING = 10  # least number of possible next characters of a text that goes on
SLACK = 3  # characters beyond the least that a text needs to end


def automaton(text: String) -> Dfa:
    """Return the automaton of all matching strings. Raise PatternError."""
    dfa = loose(replace(text, values=None, low=0, high=None), exact=True)[0]
    if text.values is not None:
        return words(v for v in words_of(text) if dfa.accepts(v))
    if text.low or text.high is not None:
        dfa = intersection(dfa, lengths(text.low, text.high))
    return dfa


def alone(text: String) -> str | None:
    """Return the one expression that the constraints consist of, or None if there is more.

    Limits of the length are allowed in addition, if the expression implies the least length.
    """
    expressions = [f"^(?:{WRITTEN.get(name, FORMATS[name])})$" for name in text.formats]
    expressions += [pattern for pattern, is_found in text.patterns if is_found]
    num_said = len(text.formats) + len(text.patterns)
    if num_said != 1 or not expressions or text.values is not None or text.excluded:
        return None
    return expressions[0] if text.low <= parsed(expressions[0]).getwidth()[0] else None


@lru_cache(maxsize=512)
def weighed(pattern: str) -> tuple[bool, int]:
    """Return whether an automaton is slow to compile, and the number of states examined.

    It is slow if most letters may follow most of its states. Raise PatternError for an invalid
    expression.
    """
    if "(?P<most" in pattern or num_wide(parsed(pattern)) > 2 * MOST_WIDE:
        return True, MOST_WIDE
    try:
        dfa, _ = loosened(pattern)
    except TooLargeError:
        return True, MAX_EXPLORED
    widths = (sum(high - low + 1 for low, high, _ in edges) for edges in dfa.edges)
    return sum(width >= WIDE for width in widths) > MOST_WIDE, len(dfa.edges)


def words_of(text: String) -> list[str]:
    """Return the allowed values that match the other constraints, not narrowed as by `loose`."""
    high = text.high
    words = [
        v for v in text.values or () if text.low <= len(v) <= (len(v) if high is None else high)
    ]
    dfas = [(found(pattern), is_found) for pattern, is_found in text.patterns]
    return [
        value
        for value in words
        if value not in text.excluded
        and all(dfa.accepts(value) == right for dfa, right in dfas)
        and all(re.fullmatch(FORMATS[name], value) for name in text.formats)
    ]


def loose(
    text: String, *, exact: bool = False, most_cases: int = MOST_CASES
) -> tuple[Dfa, int | None]:
    """Return the automaton of matching strings, and a limit to count during generation or None.

    Every text as long as the limit may end there, so the count alone enforces it. Raise
    PatternError.
    """
    highs = [] if text.high is None else [text.high]
    dfas = [whole(SHORTER.get(name, FORMATS[name])) for name in text.formats]
    for pattern, is_found in text.patterns:
        if not is_found or exact:
            dfas.append(found(pattern) if is_found else difference(ANYTHING, found(pattern)))
        else:
            dfa, high = loosened(pattern)
            dfas.append(dfa)
            highs += [] if high is None else [high]
    joined = reduce(intersection, dfas, ANYTHING)
    if text.excluded:
        joined = difference(joined, words(text.excluded))
    num_states = len(joined.edges)
    if text.low:
        if text.low > MOST_COUNTED:
            raise TooLargeError(f"a length of at least {text.low}")
        joined = intersection(joined, lengths(text.low, None))
    high = min(highs, default=None)
    longest = longest_of(joined)
    if high is None or (longest is not None and longest <= high):
        return joined, None
    if high > MANY and may_end_at(joined, high):
        return joined, high
    cases = max(LEAST_CASES, most_cases) // num_states
    slack = max(distances(joined)) + SLACK
    if cases < high and slack < high // 2 and dwells(joined):
        return ending_within(joined, slack), high - slack
    return intersection(joined, lengths(0, min(high, cases + shortest(joined)))), None


def distances(dfa: Dfa) -> list[int]:
    """Return the number of characters from each state to the nearest final state."""
    before: list[list[int]] = [[] for _ in dfa.edges]
    for at, edges in enumerate(dfa.edges):
        for _, _, to in edges:
            before[to].append(at)
    known = dict.fromkeys(dfa.finals, 0)
    waiting = list(dfa.finals)
    for at in waiting:
        for other in before[at]:
            if other not in known:
                known[other] = known[at] + 1
                waiting.append(other)
    return [known[at] for at in range(len(dfa.edges))]


def ending_within(dfa: Dfa, most: int) -> Dfa:
    """Return the automaton of texts that can end within `most` characters at every point."""
    away = distances(dfa)

    def edges_of(at: tuple[int, int]) -> Iterator[tuple[int, int, tuple[int, int]]]:
        for low, high, to in dfa.edges[at[0]]:
            since = 0 if to in dfa.finals else at[1] + 1
            if since + away[to] <= most:
                yield low, high, (to, since)

    return explored((0, 0), edges_of, lambda at: at[0] in dfa.finals)


def dwells(dfa: Dfa) -> bool:
    """Return True if texts may go on for long and end anywhere, as words do.

    Texts that need a suffix cannot.
    """
    return any(
        to in dfa.finals and high - low >= DWELLING
        for at in dfa.finals
        for low, high, to in dfa.edges[at]
    )


def shortest(dfa: Dfa) -> int:
    now, count = {0}, 0
    while now and not now & dfa.finals:
        now, count = {to for at in now for _, _, to in dfa.edges[at]}, count + 1
    return count


def is_cut_short(text: String) -> bool:
    """Return True if the length must be counted together with the other constraints."""
    dfa, _ = loose(replace(text, high=None))
    longest, high = longest_of(dfa), text.high or 0
    is_kept = longest is not None and longest <= high
    return high > MANY and not is_kept and not may_end_at(dfa, high)


def longest_of(dfa: Dfa) -> int | None:
    """Return the length of the longest text, or None if there is no limit."""
    now, count = {0}, 0
    while now:
        now = {to for at in now for _, _, to in dfa.edges[at]}
        count += 1
        if count > len(dfa.edges):
            return None
    return count - 1


def may_end_at(dfa: Dfa, length: int) -> bool:
    """Return True if every text of `length` characters that may go on may also end."""
    now = frozenset({0})
    seen: dict[frozenset[int], int] = {}
    for at in range(length):
        if now in seen:  # from here on the sets repeat
            period = at - seen[now]
            rest = (length - at) % period
            for _ in range(rest):
                now = frozenset(to for state in now for _, _, to in dfa.edges[state])
            break
        seen[now] = at
        now = frozenset(to for state in now for _, _, to in dfa.edges[state])
    return now <= dfa.finals
