"""Reader of clients' JSON Schemas: constraints by type (facts.py), as alternatives.

`allOf`, `$ref`, `not`, `if` and similar keywords are resolved. A value must match one of the
alternatives.

A keyword that cannot be enforced is refused with its place, or left out under best effort. Keywords
and formats that are not part of JSON Schema are ignored, as JSON Schema requires.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm.grammars.automata import PatternError
from nanovllm.grammars.document import (
    MAX_ALTERNATIVES,
    Addresses,
    Document,
    InexactError,
    UnknownReferenceError,
    pointer,
)
from nanovllm.grammars.facts import (
    EVERYTHING,
    Conj,
    Facts,
    Object,
    PropertyLayer,
    String,
)
from nanovllm.grammars.keywords import Keywords, Schema
from nanovllm.grammars.negation import Opposite
from nanovllm.grammars.regexes import found
from nanovllm.grammars.texts import automaton

MAX_NESTED = 64  # nesting depth of keywords that apply to the same value
UNENFORCED = ("unevaluatedItems", "$dynamicRef", "$recursiveRef")


class SchemaReader(Document):
    """Reader of one schema."""

    def __init__(self, root: object, where: str, *, exact: bool) -> None:
        super().__init__(where, exact=exact)
        self.keywords = Keywords(self)
        self._root = root
        self._names: Addresses | None = None
        self._known: dict[Conj, list[Facts]] = {}
        self._open: list[int] = []

    def facts(self, conj: Conj) -> list[Facts]:
        """Return the alternatives of a conjunction; an empty list if nothing matches."""
        if (known := self._known.get(conj)) is not None:
            return known
        alternatives = [EVERYTHING]
        for literal in conj:
            alternatives = self.product(alternatives, self._literal(literal), self.path((literal,)))
        self._known[conj] = alternatives
        return alternatives

    def settled(self, conj: Conj) -> list[Facts]:
        """Return the alternatives after handling negations that cannot be enforced.

        These are refused, or left out under best effort.
        """
        try:
            return self.facts(conj)
        except InexactError as error:
            self.inexact(self.path(conj), f"the opposite of a schema with {error}")
            return self.facts(tuple(literal for literal in conj if literal > 0))

    def _literal(self, literal: int) -> list[Facts]:
        key = (literal,)
        if (known := self._known.get(key)) is not None:
            return known
        schema, path = self.schema(literal)
        self.expect(literal not in self._open, path, "has a '$ref' that leads to itself")
        self.expect(len(self._open) < MAX_NESTED, path, f"is nested more than {MAX_NESTED} deep")
        self._open.append(literal)
        try:
            if schema is False:
                alternatives = [] if literal > 0 else [EVERYTHING]
            elif literal > 0:
                alternatives = self._alternatives(schema, path)
            else:
                alternatives = Opposite(self, schema, path).alternatives()
        finally:
            self._open.pop()
        self._known[key] = alternatives
        return alternatives

    # -- one schema -----------------------------------------------------------------------------

    def _alternatives(self, schema: Schema, path: str) -> list[Facts]:
        for keyword in UNENFORCED:
            if keyword in schema and schema[keyword] not in (True, {}):
                self.inexact(path, repr(keyword))
        alternatives = self.keywords.own(schema, path)
        for keyword, read in (
            ("$ref", self._reference),
            ("allOf", self._all),
            ("anyOf", self._any),
            ("oneOf", self._one),
            ("not", self._not),
            ("if", self._if),
            ("dependentRequired", self._dependent),
            ("dependentSchemas", self._dependent),
            ("dependencies", self._dependent),
        ):
            if keyword in schema:
                alternatives = read(schema, keyword, f"{path}/{keyword}", alternatives)
        if "unevaluatedProperties" in schema:
            rest = self.conj(schema["unevaluatedProperties"], f"{path}/unevaluatedProperties")
            alternatives = [
                facts
                if facts.object is None
                else replace(facts, object=facts.object.and_(
                    Object((PropertyLayer({}, rest=rest, beside=evaluated(facts.object)),))))
                for facts in alternatives
            ]  # fmt: skip
        return alternatives

    # -- keywords that apply schemas to the same value --------------------------------------------

    def _reference(
        self, schema: Schema, keyword: str, path: str, alternatives: list[Facts]
    ) -> list[Facts]:
        for conj in self.target(schema, path):
            alternatives = self.product(alternatives, self.facts(conj), path)
        return alternatives

    def target(self, schema: Schema, path: str) -> list[Conj]:
        """Return the target of `$ref`; an empty list under best effort if there is none."""
        reference = schema["$ref"]
        try:
            if self._names is None:
                self._names = Addresses(self._root)
            target, place = pointer(reference, self._root, self._names)
        except UnknownReferenceError:
            path = path.removesuffix("/$ref")
            self.inexact(path, f"a '$ref' to what is not in it ({reference!r})")
            return []
        return [self.conj(target, place)]

    def listed(self, branches: object, path: str) -> list[Conj]:
        if not isinstance(branches, list) or not branches:
            self.refuse(path, "must be a list of at least one schema")
        return [self.conj(branch, f"{path}/{i}") for i, branch in enumerate(branches)]

    def _all(
        self, schema: Schema, keyword: str, path: str, alternatives: list[Facts]
    ) -> list[Facts]:
        for conj in self.listed(schema["allOf"], path):
            alternatives = self.product(alternatives, self.facts(conj), path)
        return alternatives

    def _any(
        self, schema: Schema, keyword: str, path: str, alternatives: list[Facts]
    ) -> list[Facts]:
        branches = self.listed(schema["anyOf"], path)
        return self.product(alternatives, [f for conj in branches for f in self.facts(conj)], path)

    def _one(
        self, schema: Schema, keyword: str, path: str, alternatives: list[Facts]
    ) -> list[Facts]:
        """Merge the negations of the other branches into each branch that may overlap with them."""
        branches = self.listed(schema["oneOf"], path)
        matched = [self.product(alternatives, self.facts(conj), path) for conj in branches]
        alone = list(matched)
        if self.exact:
            for i in range(len(branches)):
                for j in range(len(branches)):
                    if j == i or self._are_apart(matched[i], matched[j]):
                        continue
                    try:
                        opposite = self.opposite(branches[j])
                    except InexactError:
                        self.inexact(path, "'oneOf' with branches that may match the same")
                        break
                    alone[i] = self.product(alone[i], opposite, path)
        shared = [facts for branch in alone for facts in branch]
        if len(shared) > MAX_ALTERNATIVES:
            self.inexact(path, f"more than {MAX_ALTERNATIVES} alternatives")
            return alternatives
        return shared

    def _are_apart(self, some: list[Facts], others: list[Facts], depth: int = 3) -> bool:
        """Return True if the two surely have no value in common. False if that is uncertain."""
        self.spend(len(some) * len(others), "#")
        return all(self._is_plainly_empty(a.and_(b), depth) for a in some for b in others)

    def _is_plainly_empty(self, facts: Facts, depth: int) -> bool:
        if facts.null or facts.booleans or facts.number or facts.array:
            return False
        if facts.text is not None and not is_no_text(facts.text):
            return False
        if facts.object is None:
            return True
        for name in facts.object.required if depth else ():
            conj: Conj = ()
            for layer in facts.object.layers:
                matching = frozenset(p for p, _ in layer.patterns if found(p).accepts(name))
                conj += layer.of(name, matching) or ()
            conj = tuple(dict.fromkeys(conj))
            if conj and not any(literal in self._open for literal in conj):
                try:
                    inner = self.facts(conj)
                except InexactError:
                    continue
                if all(self._is_plainly_empty(one, depth - 1) for one in inner):
                    return True
        return False

    def opposite(self, conj: Conj) -> list[Facts]:
        """Return the facts of all values that violate at least one schema. Raise InexactError."""
        return [silent(facts) for literal in conj for facts in self.facts((-literal,))]

    def _not(
        self, schema: Schema, keyword: str, path: str, alternatives: list[Facts]
    ) -> list[Facts]:
        try:
            return self.product(alternatives, self.opposite(self.conj(schema["not"], path)), path)
        except InexactError as error:
            self.inexact(path.removesuffix("/not"), f"'not' with {error}")
            return alternatives

    def _if(
        self, schema: Schema, keyword: str, path: str, alternatives: list[Facts]
    ) -> list[Facts]:
        if "then" not in schema and "else" not in schema:
            return alternatives
        place = path.removesuffix("/if")
        condition = self.conj(schema["if"], path)
        then = self.conj(schema.get("then", True), f"{place}/then")
        other = self.conj(schema.get("else", True), f"{place}/else")
        try:
            holds = self.product(self.facts(condition), self.facts(then), path)
            fails = self.product(self.opposite(condition), self.facts(other), path)
        except InexactError as error:
            self.inexact(place, f"'if' with {error}")
            return alternatives
        return self.product(alternatives, holds + fails, path)

    def _dependent(
        self, schema: Schema, keyword: str, path: str, alternatives: list[Facts]
    ) -> list[Facts]:
        """Allow either an object without the property, or one that satisfies the dependency."""
        needs = schema[keyword]
        if not isinstance(needs, dict):
            self.refuse(path, "must be an object")
        for name, needed in needs.items():
            there = replace(EVERYTHING, object=Object(required=(name,)))
            if isinstance(needed, list):
                names = self.keywords.names(needed, f"{path}/{name}")
                holds = [there.and_(replace(EVERYTHING, object=Object(required=names)))]
            else:
                inner = self.facts(self.conj(needed, f"{path}/{name}"))
                holds = self.product([there], inner, path)
            lacks = replace(EVERYTHING, object=Object((PropertyLayer({name: (1,)}, closes=False),)))
            holds = [replace(facts, null=False, booleans=(), number=None, text=None, array=None)
                     for facts in holds if facts.object]  # fmt: skip
            alternatives = self.product(alternatives, [lacks, *holds], path)
        return alternatives


def silent(facts: Facts) -> Facts:
    """Return the facts with property layers that do not close the object."""
    if facts.object is None:
        return facts
    layers = tuple(replace(layer, closes=False) for layer in facts.object.layers)
    return replace(facts, object=replace(facts.object, layers=layers))


def evaluated(facts: Object) -> tuple[PropertyLayer, ...]:
    """Return the layers of schemas that hold, without those from negations."""
    return tuple(layer for layer in facts.layers if layer.closes)


def is_no_text(text: String) -> bool:
    """Return True if no string matches. False if that cannot be found out cheaply."""
    try:
        return automaton(text).is_empty()
    except PatternError:
        return False
