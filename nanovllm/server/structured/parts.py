"""Regular expressions as rules, part by part. There are more ways than one to read a text then, but
no states for every count: the limit of a large repetition is counted while it is written.
"""

from __future__ import annotations

from re import _constants as op  # type: ignore[attr-defined]
from typing import Any

from nanovllm.server.structured.automata import TooLargeError
from nanovllm.server.structured.regexes import MANY, class_of, parsed
from nanovllm.server.structured.rules import Rule, Rules, Sequence

MOST_COPIES = 500  # of parts that repeat


def text_of(rules: Rules, pattern: str) -> str:
    """The rule for a JSON string, quotes included, in which the expression is found. Raises
    PatternError."""
    parts = _Parts(rules)
    body: Rule = []
    for tree in _alternatives(list(parsed(pattern))):
        starts = tree[:1] == [(op.AT, op.AT_BEGINNING)]
        ends = tree[-1:] == [(op.AT, op.AT_END)]
        inner = parts.sequence(tree[starts : len(tree) - ends])
        free = "" if starts and ends else parts.loop(parts.character(((0, 0x10FFFF),)))
        before, behind = () if starts else (free,), () if ends else (free,)
        body.append((r'"\""', *before, *inner, *behind, r'"\""'))
    return rules.add("text", body)


def _alternatives(tree: list[Any]) -> list[list[Any]]:
    """Each with anchors of its own."""
    if len(tree) == 1 and tree[0][0] is op.BRANCH:
        return [one for branch in tree[0][1][1] for one in _alternatives(list(branch))]
    if len(tree) == 1 and tree[0][0] is op.SUBPATTERN and not any(tree[0][1][1:3]):
        return _alternatives(list(tree[0][1][3]))
    return [tree]


class _Parts:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: dict[str, str] = {}
        self._num_copies = 0

    def sequence(self, items: Any) -> Sequence:  # noqa: ANN401 - the reader's
        return tuple(part for code, value in items for part in self._item(code, value))

    def _item(self, code: Any, value: Any) -> Sequence:  # noqa: ANN401
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeated(*value)
        if code is op.SUBPATTERN and not any(value[1:3]):
            return (self._branches([value[3]]),)
        if code is op.BRANCH:
            return (self._branches(value[1]),)
        return (self.character(class_of(code, value)),)

    def _branches(self, branches: Any) -> str:  # noqa: ANN401
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
            return (*least, self.loop(one))
        if is_one and most - low > MANY:
            self._count(low)
            key = f"{one} {most - low}"
            if key not in self._known:
                mark = f"max_chars={most - low}"
                self._known[key] = self._rules.add("body", [(self.loop(one),)], mark=mark)
            return (*least, self._known[key])
        self._count(most)
        more = ""
        for _ in range(most - low):
            more = self._rules.add("more", [('""',), (one, more) if more else (one,)])
        return (*least, more) if more else least

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
