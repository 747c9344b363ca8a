"""Regular expressions as grammar rules, part by part.

A text may then have more than one derivation, but counts need no states. The limit of a large
repetition is counted during generation.

xgrammar 0.2.8 precomputes which tokens fit at each place of a rule, but only up to the rule's end.
Tokens that may extend past it are tried again for each mask. So no rule ends with a wide class.
"""

from __future__ import annotations

import re
from re import _constants as op  # type: ignore[attr-defined]
from typing import Any

from nanovllm.grammars.automata import PatternError, TooLargeError
from nanovllm.grammars.regexes import MANY, anchored, class_of, num_wide, parsed
from nanovllm.grammars.rules import Rule, Rules, Sequence
from nanovllm.grammars.texts import SLACK, distances, ending_within

LEAST_SHARE = 8  # fewest characters for one unlimited repetition
LIMIT = re.compile("most([0-9]+)")  # name of a group with a limit of characters
MOST_COPIES = 500  # copies of repeated parts


def text_of(rules: Rules, pattern: str, high: int | None = None) -> str:
    """Return the rule for a JSON string, with quotes, in which the expression is found.

    `high`: the most characters; each unlimited repetition gets an equal share of them. Raise
    PatternError.
    """
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
        if share is not None and not (starts and ends):
            raise PatternError("a length beside an expression that may stand anywhere")
        after = parts.closing() if ends else rules.basic("value_chars")
        first = parts.then(tree[starts : len(tree) - ends], after)
        if not starts:
            first = parts.loop(rules.moves(((0, 0x10FFFF),)), first)
        body.append((r'"\""', first))
    return rules.add("text", body, end="value")


def _widths(items: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return the most characters outside unlimited repetitions, and the number of these.

    Raise PatternError if they repeat more than single characters.
    """
    width = loops = 0
    for code, value in items:
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, inner = value
            inner_width, inside = _widths(inner)
            if (inside and most != 1) or (most is op.MAXREPEAT and inner.getwidth() != (1, 1)):
                raise PatternError("repetitions of more than single characters")
            width += inner_width * (low if most is op.MAXREPEAT else most)
            loops += inside + (most is op.MAXREPEAT)
        elif code in (op.BRANCH, op.SUBPATTERN):
            branches = value[1] if code is op.BRANCH else [value[3]]
            widths = [_widths(branch) for branch in branches]
            width += max(one[0] for one in widths)
            loops += max(one[1] for one in widths)
        elif code is not op.AT:
            width += 1
    return width, loops


def _alternatives(tree: list[Any]) -> list[list[Any]]:
    """Return the top-level alternatives, each with its own anchors."""
    if len(tree) == 1 and tree[0][0] is op.BRANCH:
        return [one for branch in tree[0][1][1] for one in _alternatives(list(branch))]
    if len(tree) == 1 and tree[0][0] is op.SUBPATTERN and not any(tree[0][1][1:3]):
        return _alternatives(list(tree[0][1][3]))
    return [tree]


class _Parts:
    """Writer of an expression's rules, from its end to its beginning.

    Each rule reads one part and continues with the next rule. The rule that reads a wide class then
    does not end after it, so xgrammar can check tokens before the first mask. Parts without wide
    classes are separate rules, which other rules share.
    """

    def __init__(self, rules: Rules, share: int | None, names: dict[str, int]) -> None:
        self._rules = rules
        self._share = share
        most = {number: LIMIT.fullmatch(name) for name, number in names.items()}
        self._most = {number: int(found[1]) for number, found in most.items() if found}
        self._known: dict[str, str] = {}
        self._num_copies = 0

    def closing(self) -> str:
        """Return the rule for the closing quote."""
        return self._named("closing", [(r'"\""',)])

    def _named(self, key: str, body: Rule) -> str:
        if key not in self._known:
            self._known[key] = self._rules.add("part", body, end="value")
        return self._known[key]

    def then(self, items: Any, after: str) -> str:  # noqa: ANN401 - the reader's
        """Return the rule that reads the items and continues with rule `after`."""
        for code, value in reversed(items):
            after = self._named(f"{code} {value} {after}", self._item(code, value, after))
        return after

    def _item(self, code: Any, value: Any, after: str) -> Rule:  # noqa: ANN401
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, inner = value
            return self._repeated(low, most, inner, after)
        if code is op.SUBPATTERN and value[0] in self._most:
            return [(self._counted(value[3], self._most[value[0]]), after)]
        if code is op.SUBPATTERN and not any(value[1:3]):
            return self._either([value[3]], after)
        if code is op.BRANCH:
            return self._either(value[1], after)
        return self._rules.moves(class_of(code, value), after)

    def _either(self, branches: Any, after: str) -> Rule:  # noqa: ANN401
        if _is_shared(branches):
            return [(self._shared(branches), after)]
        sequences = [sequence for branch in branches for sequence in self._first(branch, after)]
        return list(dict.fromkeys(sequences))

    def _first(self, items: Any, after: str) -> Rule:  # noqa: ANN401
        """Return the body of the rule that `then` would return."""
        if not items:
            return [(after,)]
        (code, value), *others = items
        return self._item(code, value, self.then(others, after))

    def _repeated(self, low: int, most: Any, inner: Any, after: str) -> Rule:  # noqa: ANN401
        least, width = inner.getwidth()
        limit = None if most is op.MAXREPEAT else most
        if limit is None and self._share is not None:
            limit = low + self._share
        if limit is not None and (least, width) == (1, 1) and limit - low > MANY:
            return [(self._limited(low, limit, inner), after)]
        self._count(low if limit is None else limit)
        if least == 0 and limit is None:  # the part may be empty: loop over a rule for it
            one = self._shared([inner])
            loop = self._rules.name("loop")
            self._rules.bodies[loop] = [('""',), (one, loop)]
            return [(loop, after)]
        if limit is None:
            key = f"loop {inner} {after}"
            if key not in self._known:
                loop = self._known[key] = self._rules.name("loop")
                self._rules.annotate(loop, "value")
                self._rules.bodies[loop] = [*self._first(inner, loop), (after,)]
            more = self._known[key]
        else:
            more = after
            for _ in range(limit - low):
                more = self._named(f"at most {inner} {more} {after}",
                                   [*self._first(inner, more), (after,)])  # fmt: skip
        for _ in range(low):
            more = self.then(inner, more)
        return list(self._rules.bodies[more])

    def loop(self, one: Rule, after: str) -> str:
        """Return the rule for any number of these characters, followed by rule `after`."""
        name = self._rules.name("loop")
        self._rules.annotate(name, "value")
        self._rules.bodies[name] = [*((*sequence, name) for sequence in one), (after,)]
        return name

    def _limited(self, low: int, most: int, inner: Any) -> str:  # noqa: ANN401
        """Return a rule for `low` to `most` of one character, counted during generation."""
        key = f"limited {low} {most} {inner}"
        if key not in self._known:
            self._count(low)
            one = self._characters(inner)
            name = self._rules.name("loop")
            self._rules.bodies[name] = [('""',), *((*sequence, name) for sequence in one)]
            for _ in range(low):
                name = self._rules.add("least", [(*sequence, name) for sequence in one])
            self._known[key] = self._rules.add("body", [(name,)], mark=f"max_chars={most}")
        return self._known[key]

    def _characters(self, inner: Any) -> Rule:  # noqa: ANN401
        """Return the bodies that match one character of a single-character expression."""
        empty = self._named("nothing", [('""',)])
        return [sequence[:-1] for sequence in self._first(inner, empty)]

    def _counted(self, inner: Any, most: int) -> str:  # noqa: ANN401
        """Return a rule for at most `most` characters, counted during generation.

        Its automaton is restricted to texts that can always end soon.
        """
        dfa = anchored(list(inner))
        slack = max(distances(dfa)) + SLACK
        body = self._rules.dfa(ending_within(dfa, slack))
        return self._rules.add("body", [(body,)], mark=f"max_chars={most - slack}")

    def _count(self, copies: int) -> None:
        self._num_copies += copies
        if self._num_copies > MOST_COPIES:
            raise TooLargeError("repetitions that come to too many parts")

    # -- parts that are rules of their own ------------------------------------------------------

    def _shared(self, branches: Any) -> str:  # noqa: ANN401
        key = f"shared {branches}"
        if key not in self._known:
            body: Rule = [self._sequence(branch) or ('""',) for branch in branches]
            self._known[key] = self._rules.add("part", body)
        return self._known[key]

    def _sequence(self, items: Any) -> Sequence:  # noqa: ANN401
        return tuple(part for code, value in items for part in self._called(code, value))

    def _called(self, code: Any, value: Any) -> Sequence:  # noqa: ANN401
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, inner = value
            return self._several(low, most, self._shared([inner]))
        if code is op.SUBPATTERN and not any(value[1:3]) and value[0] not in self._most:
            return (self._shared([value[3]]),)
        if code is op.BRANCH:
            return (self._shared(value[1]),)
        if code is op.SUBPATTERN:
            return self._item(code, value, "")[0][:1]
        return (self._rules.character(class_of(code, value)),)

    def _several(self, low: int, most: Any, one: str) -> Sequence:  # noqa: ANN401
        least = (one,) * low
        self._count(low if most is op.MAXREPEAT else most)
        if most is op.MAXREPEAT:
            key = f"{one}*"
            if key not in self._known:
                name = self._known[key] = self._rules.name("loop")
                self._rules.bodies[name] = [('""',), (one, name)]
            return (*least, self._known[key])
        more = ""
        for _ in range(most - low):
            more = self._rules.add("more", [('""',), (one, more) if more else (one,)])
        return (*least, more) if more else least


def _is_shared(branches: Any) -> bool:  # noqa: ANN401
    """Return True if no branch has a wide class or a large repetition."""
    return all(not num_wide(branch) for branch in branches) and not _has_large(branches)


def _has_large(branches: Any) -> bool:  # noqa: ANN401
    """Return True if a repetition is unlimited or is counted during generation."""
    inner: list[Any] = []
    for code, value in (item for branch in branches for item in branch):
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, repeated = value
            if most is op.MAXREPEAT or most - low > MANY:
                return True
            inner.append(repeated)
        elif code is op.BRANCH:
            inner += value[1]
        elif code is op.SUBPATTERN:
            inner.append(value[3])
    return bool(inner) and _has_large(inner)
