"""Regular expressions as rules, part by part. There are more ways than one to read a text then, but
no states for every count: the limit of a large repetition is counted while it is written.
"""

from __future__ import annotations

import re
from re import _constants as op  # type: ignore[attr-defined]
from typing import Any

from nanovllm.server.structured.automata import PatternError, TooLargeError
from nanovllm.server.structured.productive import Rule, Sequence
from nanovllm.server.structured.regexes import MANY, anchored, class_of, parsed
from nanovllm.server.structured.rules import Rules
from nanovllm.server.structured.texts import SLACK, distances, ending_within

LEAST_SHARE = 8  # characters of one repetition
LIMIT = re.compile("most([0-9]+)")  # names a group of at most so many characters
MOST_COPIES = 500  # of parts that repeat


def text_of(rules: Rules, pattern: str, high: int | None = None) -> str:
    """The rule for a JSON string, quotes included, in which the expression is found. `high`: the
    most characters, of which each repetition without a limit gets the same share. Raises
    PatternError."""
    share = None
    if high is not None:
        width, loops = _widths(parsed(pattern))
        share = (high - width) // max(1, loops)
        if share < LEAST_SHARE:
            raise PatternError(f"a length of at most {high} beside what it says else")
    whole = parsed(pattern)
    parts = _Parts(rules, share, whole.state.groupdict)
    body: Rule = []
    for tree in _alternatives(list(whole)):
        starts = tree[:1] == [(op.AT, op.AT_BEGINNING)]
        ends = tree[-1:] == [(op.AT, op.AT_END)]
        inner = parts.sequence(tree[starts : len(tree) - ends])
        free = "" if starts and ends else parts.loop(parts.character(((0, 0x10FFFF),)))
        before, behind = () if starts else (free,), () if ends else (free,)
        if share is not None and free:
            raise PatternError("a length beside an expression that may stand anywhere")
        body.append((r'"\""', *before, *inner, *behind, r'"\""'))
    return rules.add("text", body)


def _widths(items: Any) -> tuple[int, int]:  # noqa: ANN401
    """The most characters of all but the repetitions without a limit, and how many of those there
    are. Raises PatternError where those repeat more than single characters."""
    width = loops = 0
    for code, value in items:
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, inner = value
            more, inside = _widths(inner)
            if (inside and most != 1) or (most is op.MAXREPEAT and inner.getwidth() != (1, 1)):
                raise PatternError("repetitions of more than single characters")
            width += more * (low if most is op.MAXREPEAT else most)
            loops += inside + (most is op.MAXREPEAT)
        elif code in (op.BRANCH, op.SUBPATTERN):
            branches = value[1] if code is op.BRANCH else [value[3]]
            both = [_widths(branch) for branch in branches]
            width += max(one[0] for one in both)
            loops += max(one[1] for one in both)
        elif code is not op.AT:
            width += 1
    return width, loops


def _alternatives(tree: list[Any]) -> list[list[Any]]:
    """Each with anchors of its own."""
    if len(tree) == 1 and tree[0][0] is op.BRANCH:
        return [one for branch in tree[0][1][1] for one in _alternatives(list(branch))]
    if len(tree) == 1 and tree[0][0] is op.SUBPATTERN and not any(tree[0][1][1:3]):
        return _alternatives(list(tree[0][1][3]))
    return [tree]


class _Parts:
    def __init__(self, rules: Rules, share: int | None, names: dict[str, int]) -> None:
        self._rules = rules
        self._share = share
        most = {number: LIMIT.fullmatch(name) for name, number in names.items()}
        self._most = {number: int(found[1]) for number, found in most.items() if found}
        self._known: dict[str, str] = {}
        self._num_copies = 0

    def sequence(self, items: Any) -> Sequence:  # noqa: ANN401 - the reader's
        return tuple(part for code, value in items for part in self._item(code, value))

    def _item(self, code: Any, value: Any) -> Sequence:  # noqa: ANN401
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeated(*value)
        if code is op.SUBPATTERN and value[0] in self._most:
            return (self._counted(value[3], self._most[value[0]]),)
        if code is op.SUBPATTERN and not any(value[1:3]):
            return (self._branches([value[3]]),)
        if code is op.BRANCH:
            return (self._branches(value[1]),)
        return (self.character(class_of(code, value)),)

    def _counted(self, inner: Any, most: int) -> str:  # noqa: ANN401
        """A rule of at most so many characters, counted while they are written: an automaton
        whose texts can always end soon."""
        dfa = anchored(list(inner))
        slack = max(distances(dfa)) + SLACK
        body = self._rules.dfa(ending_within(dfa, slack))
        return self._rules.add("body", [(body,)], mark=f"max_chars={most - slack}")

    def _branches(self, branches: Any) -> str:  # noqa: ANN401
        if len(branches) == 1 and len(branches[0]) == 1:
            only = self._item(*branches[0][0])
            if len(only) == 1:
                return only[0]
        key = str(branches)
        if key not in self._known:
            body: Rule = [self.sequence(branch) or ('""',) for branch in branches]
            self._known[key] = self._rules.add("part", body)
        return self._known[key]

    def _repeated(self, low: int, most: Any, inner: Any) -> Sequence:  # noqa: ANN401
        one = self._branches([inner])
        is_one = inner.getwidth() == (1, 1)
        least = (one,) * low
        if most is op.MAXREPEAT:
            self._count(low)
            if self._share is not None:
                return (self._limited(one, low, low + self._share),)
            return (*least, self.loop(one))
        if is_one and most - low > MANY:
            self._count(low)
            return (self._limited(one, low, most),)
        self._count(most)
        more = ""
        for _ in range(most - low):
            more = self._rules.add("more", [('""',), (one, more) if more else (one,)])
        return (*least, more) if more else least

    def _limited(self, one: str, low: int, most: int) -> str:
        """So many of one character, counted while they are written."""
        self._count(low)
        key = f"{one} {low} {most}"
        if key not in self._known:
            body = (one,) * low
            mark = f"max_chars={most}"
            self._known[key] = self._rules.add("body", [(*body, self.loop(one))], mark=mark)
        return self._known[key]

    def _count(self, copies: int) -> None:
        self._num_copies += copies
        if self._num_copies > MOST_COPIES:
            raise TooLargeError("repetitions that come to too many parts")

    def loop(self, one: str) -> str:
        key = f"{one}*"
        if key not in self._known:
            name = self._known[key] = self._rules.name("loop")
            self._rules.bodies[name] = [('""',), (one, name)]
        return self._known[key]

    def character(self, ranges: Any) -> str:  # noqa: ANN401
        return self._rules.character(ranges)
