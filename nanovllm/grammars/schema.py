"""Clients' JSON Schemas as grammars for xgrammar that enforce the whole schema.

A schema is read (reader.py), merged by type (facts.py) and written as rules (rules.py).

A keyword that cannot be enforced is refused with its place. Best effort (`strict: false`) leaves it
out and keeps the rest. Properties come in the order of the schema, then those of the schemas that
it merges. Others follow if `additionalProperties` or `patternProperties` allow them.

Decision: a grammar may be narrower than its schema, because its outputs are still valid. An object
whose schemas name properties but do not mention other properties has no others.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

from nanovllm.grammars import numbers, parts, texts
from nanovllm.grammars.automata import MAX_EXPLORED, PatternError
from nanovllm.grammars.document import InexactError
from nanovllm.grammars.facts import (
    ANYTHING,
    EVERYTHING,
    Array,
    Conj,
    Facts,
    Number,
    Object,
    String,
    both,
)
from nanovllm.grammars.objects import MemberRules, Members, Objects, key_text
from nanovllm.grammars.reader import SchemaReader
from nanovllm.grammars.regexes import parsed
from nanovllm.grammars.rules import Rule, Rules, Sequence, TooManyRulesError, literal

MAX_BYTES = 1 << 20
MAX_TEXT = 1 << 20  # of a grammar
MAX_SPACE = 8  # white space between two JSON tokens
OBJECT = {"type": "object"}
MAX_STATES = 2000  # of all automata for strings and names together; limits the compile time
MAX_PREFIX = 1000  # array items with a rule of their own


def read(schema: object, where: str, *, exact: bool) -> SchemaReader:
    """Return the reader of a schema. `where`: the request's field. Raise SchemaError."""
    reader = SchemaReader(schema, where, exact=exact)
    try:
        size = len(json.dumps(schema))
    except ValueError:  # Python refuses to write integers of more than 4300 digits
        reader.refuse("#", "has a number of too many digits")
    reader.expect(size <= MAX_BYTES, "#", f"has more than {MAX_BYTES} bytes")
    reader.expect(isinstance(schema, bool | dict), "#", "is not an object")
    return reader


def compiled(
    schema: object,
    where: str,
    *,
    exact: bool,
    max_space: int = MAX_SPACE,
    is_object: bool = False,
) -> str:
    """Return the grammar of a schema, with the rule `root`. Raise SchemaError.

    `is_object`: allow only objects, as for a function's parameters.
    """
    reader = read(schema, where, exact=exact)
    conj = reader.conj(schema, "#")
    if is_object:
        conj += reader.conj(OBJECT, "#")
    text = Grammar(reader, max_space).text(conj)
    if text is None:
        reader.refuse("#", "must be an object's" if is_object else "allows nothing")
    reader.expect(len(text) <= MAX_TEXT, "#", "comes to too large a grammar")
    return text


class Grammar:
    """The grammar of a schema that has been read: one rule for each conjunction of schemas."""

    def __init__(self, reader: SchemaReader, max_space: int) -> None:
        self.reader = reader
        self.rules = Rules(max_space)
        self.room = MAX_STATES
        self._objects = Objects(reader)
        self._members: dict[Members, Rule] = {}
        self._names: dict[Conj, str] = {}
        self._texts: dict[String, str] = {}
        self._waiting: deque[Conj] = deque()

    def text(self, conj: Conj, words: Iterable[str] = ()) -> str | None:
        """Return the grammar of the schemas and of `words`, or None if nothing matches."""
        root = self.value(conj)
        others = [(f'"{word}"',) for word in words]
        if root == "any" or others:
            root = self.rules.add("value", [(root,), *others])
        try:
            while self._waiting:
                self._write(self._waiting.popleft())
            return self.rules.text(root)
        except TooManyRulesError:
            self.reader.refuse("#", "comes to too large a grammar")

    def value(self, conj: Conj) -> str:
        """Return the name of the rule for a conjunction."""
        if conj == ANYTHING:
            return self.rules.basic("any")
        if conj not in self._names:
            self._names[conj] = self.rules.add("value", [])
            self._waiting.append(conj)
        return self._names[conj]

    def _write(self, conj: Conj) -> None:
        body = self.rules.bodies[self._names[conj]]
        alternatives = self.reader.settled(conj)
        if any(facts is EVERYTHING for facts in alternatives):
            alternatives = [EVERYTHING]
        for facts in alternatives:
            body += self.typed(facts, self.reader.path(conj))
        body[:] = list(dict.fromkeys(body))

    def typed(self, facts: Facts, path: str) -> Rule:
        if facts is EVERYTHING:
            return [(self.rules.basic("any"),)]
        rule: Rule = [('"null"',)] if facts.null else []
        rule += [('"true"' if value else '"false"',) for value in facts.booleans]
        rule += [(self.number(facts.number, path),)] if facts.number else []
        rule += [(self.string(facts.text, path),)] if facts.text else []
        if facts.array:
            try:
                rule += self.array(facts.array)
            except InexactError as error:
                self.reader.inexact(path, str(error))
                rule += self.array(replace(facts.array, contains=()))
        if facts.object:
            try:
                rule += self.object(facts.object, path)
            except (InexactError, PatternError) as error:
                self.reader.inexact(path, str(error))
                rule += self.object(facts.object.simple(), path)
        return rule

    def number(self, number: Number, path: str) -> str:
        if number.values is not None:
            shown = [text for v in number.values if number.has(v) for text in numbers.written(v)]
            return self.rules.add("number", [(literal(text),) for text in shown])
        if number == Number():
            return self.rules.basic("number")
        if number == Number(is_integer=True):
            return self.rules.basic("integer")
        try:
            dfa = numbers.automaton(number)
            self.reader.spend(len(dfa.edges), path)
            return self.rules.dfa(dfa, in_json=False)
        except PatternError as error:
            self.reader.inexact(path, f"a number with {error}")
            self.reader.spend(MAX_EXPLORED, path)
            return self.rules.basic("integer" if number.is_integer else "number")

    def string(self, text: String, path: str) -> str:
        if text not in self._texts:
            self._texts[text] = self._string(text, path)
        return self._texts[text]

    def _string(self, text: String, path: str) -> str:
        try:
            if (rule := self._alone(text)) is not None:
                return rule
            if text.values is not None:
                return self.rules.words(texts.words_of(text))
            if not text.patterns and not text.formats and not text.excluded:
                if not text.low and text.high is None:
                    return self.rules.basic("string")
                if text.low <= texts.MOST_COUNTED:
                    return self.rules.lengthy(text.low, text.high, "value")
            dfa, high = texts.loose(text, most_cases=min(texts.MOST_CASES, self.room))
            self.room -= len(dfa.edges)
            self.reader.spend(len(dfa.edges), path)
        except PatternError as error:
            self.reader.inexact(path, f"a string with {error}")
            self.reader.spend(MAX_EXPLORED, path)
            return self.rules.basic("string")
        if high is None:
            return self.rules.add("text", [(r'"\""', self.rules.dfa(dfa, "value"))])
        body = self.rules.add("body", [(self.rules.dfa(dfa),)], mark=f"max_chars={high}")
        return self.rules.add("text", [(r'"\""', body, r'"\""')])

    def _alone(self, text: String) -> str | None:
        """Return a rule made directly from the string's only pattern or format, or None.

        Such a rule replaces an automaton that is slow to compile, or a maximum length that must be
        counted together with the pattern. Return None if the automaton suffices, if `texts.alone`
        finds other constraints, or if the pattern has no such rule.
        """
        pattern = texts.alone(text)
        if pattern is None:
            return None
        high = text.high
        if high is not None and parsed(pattern).getwidth()[1] <= high:
            high = None
        if not texts.weighed(pattern)[0] and (high is None or not texts.is_cut_short(text)):
            return None
        try:
            return parts.text_of(self.rules, pattern, high)
        except PatternError:
            return None

    def object(self, facts: Object, path: str) -> Rule:
        """Return the alternatives for an object. Raise InexactError."""
        members = self._objects.members(facts, path)
        if members not in self._members:
            pairs: list[Sequence] = [
                (key_text(one.name), "colon", self.value(one.conj)) for one in members.properties
            ]
            others: list[Sequence] = [
                (self.rules.dfa(names, "key"), "colon", self.value(conj))
                for names, conj in members.others
            ]
            self._members[members] = MemberRules(self.rules, members, pairs, others).body()
        return self._members[members]

    def array(self, array: Array) -> Rule:
        first = min(MAX_PREFIX, max((len(prefix) for prefix, _ in array.layers), default=0))
        is_said = any(rest is not None for _, rest in array.layers) or not array.layers
        rest = reduce(both, (rest for _, rest in array.layers if rest), ANYTHING)
        if not is_said and array.low <= first:
            rest = (1,)
        if array.contains:
            return self._containing(array, rest, first)
        items = []
        for i in range(first):
            parts = (p[i] if i < len(p) else r or () for p, r in array.layers)
            items.append(self.value(reduce(both, parts, ANYTHING)))
        other = self.value(rest)
        low, high = array.low, array.high
        rule: Rule = [] if low else [('"["', "ws", '"]"')]
        if high == 0:
            return rule
        tail = self._tail(max(first, 1), other, low, high)
        for i in range(first - 1, 0, -1):
            if high is not None and i >= high:
                tail = self.rules.add("tail", [('""',)])
                continue
            following: Rule = [("comma", items[i], tail)]
            tail = self.rules.add("tail", following if i < low else [('""',), *following])
        return [*rule, ('"["', "ws", items[0] if items else other, tail, "ws", '"]"')]

    def _tail(self, there: int, other: str, low: int, high: int | None) -> str:
        next_items = self.rules.add("item", [("comma", other)])
        least = max(0, low - there)
        if high is not None and high <= there:
            return self.rules.add("tail", [('""',)])
        if high is not None:
            return self.rules.add("tail", [(f"{next_items}{{{least},{high - there}}}",)])
        loop = self.rules.name("loop")
        self.rules.bodies[loop] = [('""',), (next_items, loop)]
        return (
            self.rules.add("tail", [(f"{next_items}{{{least},{least}}}", loop)]) if least else loop
        )

    def _containing(self, array: Array, rest: Conj, first: int) -> Rule:
        if len(array.contains) > 1 or first or array.low > 1 or array.high is not None:
            raise InexactError("'contains' beside other keywords of arrays")
        other = self.value(rest)
        contained = self.value(both(rest, array.contains[0]))
        before, behind = self.rules.name("loop"), self.rules.name("loop")
        self.rules.bodies[before] = [('""',), (other, "comma", before)]
        self.rules.bodies[behind] = [('""',), ("comma", other, behind)]
        return [('"["', "ws", before, contained, behind, "ws", '"]"')]
