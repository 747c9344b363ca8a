"""Objects as rules. Named properties come in the schema's order, then any others that are allowed.

The other properties have names that differ from the named ones.
"""

from __future__ import annotations

import json
from functools import reduce
from typing import NamedTuple

from nanovllm.grammars.automata import (
    ANYTHING as ALL_TEXTS,
    NOTHING,
    Dfa,
    difference,
    intersection,
    other_than,
    union,
)
from nanovllm.grammars.document import InexactError
from nanovllm.grammars.facts import ANYTHING, Conj, Object, both
from nanovllm.grammars.reader import SchemaReader
from nanovllm.grammars.regexes import found
from nanovllm.grammars.rules import Rule, Rules, Sequence, is_plain, literal
from nanovllm.grammars.texts import automaton

STRIDE = 8  # properties among which one rule chooses
MAX_CASES = 20_000  # properties times property counts
MAX_NAMES = 30  # a pattern with at most this many names is expanded into properties
MAX_KINDS = 40  # kinds of other properties, by the patterns that their names match
MAX_NAME_STATES = 400  # states of an object's name automaton; beyond it, more names are excluded


class Property(NamedTuple):
    """A named property: the schemas of its value, and whether it is required."""

    name: str
    conj: Conj
    is_required: bool


class Members(NamedTuple):
    """The members that an object may have.

    `others` has the kinds of unnamed properties: their names and the schemas of their values. `low`
    and `high` limit the number of members; 0 and None if it need not be counted.
    """

    properties: tuple[Property, ...]
    others: tuple[tuple[Dfa, Conj], ...]
    may_be_empty: bool
    low: int
    high: int | None


class Objects:
    """The objects of one schema."""

    def __init__(self, reader: SchemaReader) -> None:
        self._reader = reader
        self._room = 4 * MAX_NAME_STATES
        self._starts: dict[tuple[str, ...], Dfa] = {}

    def members(self, facts: Object, path: str) -> Members:
        """Return the members of an object. Raise InexactError."""
        properties, others = self.parts(facts, path)
        num_required = len(facts.required)
        low = facts.low if facts.low > num_required else 0
        if others and low > 1:
            raise InexactError("'minProperties' beside properties that it does not name")
        counts = low > 0 and not (low == 1 and not num_required)
        high = facts.high
        if high is not None and not others and high >= len(properties):
            high = None
        cap = high + 1 if high is not None else low if counts else 0
        if (cap + 1) * max(1, len(properties)) > MAX_CASES:
            raise InexactError("'minProperties' or 'maxProperties' of too many properties")
        return Members(
            tuple(properties),
            tuple(others),
            may_be_empty=not num_required and not low,
            low=low if counts else 0,
            high=high,
        )

    def parts(self, facts: Object, path: str) -> tuple[list[Property], list[tuple[Dfa, Conj]]]:
        """Return the named properties and the kinds of other properties. Raise InexactError."""
        names = list(
            dict.fromkeys([n for la in facts.layers for n in la.properties] + list(facts.required))
        )
        allowed = self._names(facts.names)
        patterns = list(dict.fromkeys(p for layer in facts.layers for p, _ in layer.patterns))
        dfas = {pattern: found(pattern) for pattern in patterns}
        for dfa in dfas.values():
            names += [name for name in dfa.few(MAX_NAMES) or () if name not in names]
        parts = []
        for name in names:
            matching = frozenset(p for p in patterns if dfas[p].accepts(name))
            by_layer = [layer.of(name, matching) or () for layer in facts.layers]
            conj = reduce(both, by_layer, ANYTHING) if allowed.accepts(name) else (1,)
            parts.append(Property(name, conj, name in facts.required))
        return parts, self._others(facts, names, allowed, dfas, path)

    def _names(self, conj: Conj) -> Dfa:
        if conj == ANYTHING:
            return ALL_TEXTS
        known = [facts.text for facts in self._reader.settled(conj) if facts.text]
        return reduce(union, map(automaton, known), NOTHING) if known else NOTHING

    def _others(
        self, facts: Object, names: list[str], allowed: Dfa, dfas: dict[str, Dfa], path: str
    ) -> list[tuple[Dfa, Conj]]:
        """Return the kinds of unnamed properties, by the patterns that their names match."""
        is_said = any(layer.rest is not None for layer in facts.layers)
        is_closed = not is_said and any(layer.closes for layer in facts.layers)
        if is_closed and not dfas:
            return []
        start = ALL_TEXTS
        if names:
            if (key := tuple(names)) not in self._starts:
                self._starts[key] = other_than(names, max(1, min(MAX_NAME_STATES, self._room)))
            start = self._starts[key]
            self._room -= len(start.edges)
        kinds: list[tuple[Dfa, frozenset[str]]] = [(intersection(allowed, start), frozenset())]
        for pattern, dfa in dfas.items():
            split = []
            for kind, matching in kinds:
                both_match = intersection(kind, dfa)
                if both_match.is_empty():
                    split.append((kind, matching))
                    continue
                split.append((both_match, matching | {pattern}))
                split.append((difference(kind, dfa), matching))
                self._reader.spend(len(both_match.edges) + len(split[-1][0].edges), path)
            kinds = [(kind, matching) for kind, matching in split if not kind.is_empty()]
            if len(kinds) > MAX_KINDS:
                raise InexactError("'patternProperties' that overlap in too many ways")
        others = []
        for kind, matching in kinds:
            by_layer = [layer.of(None, matching) for layer in facts.layers]
            conj = reduce(both, (part for part in by_layer if part), ANYTHING)
            if not kind.is_empty() and conj != (1,) and (matching or not is_closed):
                others.append((kind, conj))
        return others


def key_text(name: str) -> str:
    """Return the terminal for a property's name, without its opening quote."""
    return literal(json.dumps(name, ensure_ascii=not is_plain(name))[1:])


class MemberRules:
    """Rules for the members of an object.

    A rule is identified by the number of named properties that precede it in the schema's order.
    If the schema limits the count, the number of properties written so far is also part of its key.
    """

    def __init__(
        self, rules: Rules, members: Members, pairs: list[Sequence], others: list[Sequence]
    ) -> None:
        """`pairs`, `others`: items after the opening quote of named and of other properties."""
        self._rules = rules
        self._members = members
        self._low, self._high = members.low, members.high
        self._pairs = pairs
        self._others = others
        required = [i for i, one in enumerate(members.properties) if one.is_required]
        self._last_required = required[-1] if required else -1
        self._is_required = {*required}
        self._made: dict[tuple[int, int], str] = {}
        self._tails: dict[tuple[int, int], str] = {}
        self._pair_names: dict[int, str] = {}
        self._needed: list[tuple[int, int]] = []

    def body(self) -> Rule:
        """Return the alternatives for the object."""
        first = self.choice(0, 0)
        while self._needed:
            at, written = self._needed.pop()
            self._rules.bodies[self._made[at, written]] = self._next(at, written)
        rule: Rule = [('"{"', "ws", '"}"')] if self._members.may_be_empty else []
        if self._high == 0:
            return rule
        return [*rule, ('"{"', "ws", r'"\""', first, "ws", '"}"')]

    def choice(self, at: int, written: int) -> str:
        """Return the rule for the next property and all later ones, after its opening quote."""
        key = (at, written)
        if key not in self._made:
            self._made[key] = self._rules.name("part")
            self._needed.append(key)
        return self._made[key]

    def _next(self, at: int, written: int) -> Rule:
        if self._high is not None and written >= self._high:
            return []
        body: Rule = []
        for i in range(at, min(at + STRIDE, len(self._pairs))):
            if i not in self._pair_names:
                self._pair_names[i] = self._rules.add("pair", [self._pairs[i]])
            body.append((self._pair_names[i], self._after(i + 1, written)))
            if i in self._is_required:
                return body
        if at + STRIDE < len(self._pairs):
            return [*body, (self.choice(at + STRIDE, written),)]
        for other in self._others:
            body.append((*other, self._after(len(self._pairs), written)))
        return body

    def _after(self, at: int, written: int) -> str:
        """Return the rule after a property: the end of the object, or a comma and a property."""
        counted = self._high is not None or self._low > 0
        most = self._low if self._high is None else self._high
        now = min(written + 1, most) if counted else 0
        key = (at, now)
        if key not in self._tails:
            self._tails[key] = self._rules.name("tail")
            body: Rule = [('""',)] if self._last_required < at and now >= self._low else []
            if (at < len(self._pairs) or self._others) and (self._high is None or now < self._high):
                body.append(("next", self.choice(at, now)))
            self._rules.bodies[self._tails[key]] = body
        return self._tails[key]
