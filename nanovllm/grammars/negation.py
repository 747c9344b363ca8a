"""Constraints on a value that does not match a schema: at least one of the keywords fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, Protocol

from nanovllm.grammars.document import InexactError
from nanovllm.grammars.facts import (
    EVERYTHING,
    KINDS,
    Array,
    Conj,
    Facts,
    Number,
    Object,
    PropertyLayer,
    String,
)
from nanovllm.grammars.keywords import Keywords


class SchemaReader(Protocol):
    """The part of the schema reader that negation uses (implemented in reader.py)."""

    keywords: Keywords

    def conj(self, schema: object, path: str) -> Conj: ...
    def facts(self, conj: Conj) -> list[Facts]: ...
    def opposite(self, conj: Conj) -> list[Facts]: ...
    def product(self, some: list[Facts], others: list[Facts], path: str) -> list[Facts]: ...
    def listed(self, branches: object, path: str) -> list[Conj]: ...
    def target(self, schema: dict[str, Any], path: str) -> list[Conj]: ...


NONE = Facts()


class Opposite:
    def __init__(self, reader: SchemaReader, schema: dict[str, Any], path: str) -> None:
        self._reader = reader
        self._given = schema
        self._path = path

    def alternatives(self) -> list[Facts]:
        """Return one alternative for each way to violate the schema. Raise InexactError."""
        alternatives: list[Facts] = []
        for keyword in self._given:
            read = KEYWORDS.get(keyword)
            if read is not None:
                alternatives += read(self)
            elif keyword in WITHOUT:
                raise InexactError(repr(keyword))
        return [facts for facts in alternatives if not facts.is_empty()]

    def _type(self) -> Iterator[Facts]:
        types = self._reader.keywords.types(self._given, self._path) or []
        excluded = {"number" if name == "integer" else name for name in types}
        yield EVERYTHING.only(*(kind for kind in KINDS if kind not in excluded))
        if "number" not in types and "integer" in types:
            yield Facts(number=Number(no_multiples=frozenset({Fraction(1)})))

    def _values(self) -> Iterator[Facts]:
        schema = self._given
        values = [schema["const"]] if "const" in schema else schema["enum"]
        known = self._reader.keywords.valued(values if isinstance(values, list) else [], self._path)
        if any(facts.array or facts.object for facts in known):
            raise InexactError("objects or arrays as values")
        plain = known[0] if known else NONE
        yield replace(
            EVERYTHING,
            null=not plain.null,
            booleans=tuple(v for v in (True, False) if v not in plain.booleans),
            number=Number(
                excluded=frozenset(plain.number.values or ()) if plain.number else frozenset()
            ),
            text=String(excluded=frozenset(plain.text.values or ()) if plain.text else frozenset()),
        )

    def _counts(self) -> Iterator[Facts]:
        """Negate the limits on lengths and on the numbers of items and properties."""
        schema, reader, path = self._given, self._reader.keywords, self._path
        low, high = reader.counts(schema, path, "minLength", "maxLength")
        if low:
            yield Facts(text=String(high=low - 1))
        if high is not None:
            yield Facts(text=String(low=high + 1))
        low, high = reader.counts(schema, path, "minItems", "maxItems")
        if low:
            yield Facts(array=Array(high=low - 1))
        if high is not None:
            yield Facts(array=Array(low=high + 1))
        low, high = reader.counts(schema, path, "minProperties", "maxProperties")
        if low:
            yield Facts(object=Object(high=low - 1))
        if high is not None:
            yield Facts(object=Object(low=high + 1))

    def _bounds(self) -> Iterator[Facts]:
        low, high = self._reader.keywords.bounds(self._given, self._path)
        if low:
            yield Facts(number=Number(high=(low[0], not low[1])))
        if high:
            yield Facts(number=Number(low=(high[0], not high[1])))

    def _multiple(self) -> Iterator[Facts]:
        number = self._reader.keywords.multiple(self._given, self._path)
        yield Facts(number=Number(no_multiples=number))

    def _pattern(self) -> Iterator[Facts]:
        pattern = self._given["pattern"]
        if not self._reader.keywords.pattern(pattern, self._path):
            raise InexactError("'pattern'")
        yield Facts(text=String(patterns=((pattern, False),)))

    def _properties(self) -> Iterator[Facts]:
        for name, inner in self._given["properties"].items():
            for literal in self._reader.conj(inner, f"{self._path}/properties/{name}"):
                layer = PropertyLayer({name: (-literal,)}, closes=False)
                yield Facts(object=Object((layer,), (name,)))

    def _required(self) -> Iterator[Facts]:
        for name in self._reader.keywords.names(self._given["required"], self._path):
            yield Facts(object=Object((PropertyLayer({name: (1,)}, closes=False),)))

    def _items(self) -> Iterator[Facts]:
        rest = self._given["items"]
        if isinstance(rest, list) or "prefixItems" in self._given:
            raise InexactError("'items'")
        for literal in self._reader.conj(rest, f"{self._path}/items"):
            yield Facts(array=Array(contains=((-literal,),)))

    def _contains(self) -> Iterator[Facts]:
        if "minContains" in self._given or "maxContains" in self._given:
            raise InexactError("'contains'")
        conj = self._reader.conj(self._given["contains"], f"{self._path}/contains")
        opposite = tuple(-literal for literal in conj) or (1,)
        yield Facts(array=Array((((), opposite),)))

    def _reference(self) -> Iterator[Facts]:
        for conj in self._reader.target(self._given, f"{self._path}/$ref"):
            yield from self._reader.opposite(conj)

    def _all(self) -> Iterator[Facts]:
        for conj in self._reader.listed(self._given["allOf"], f"{self._path}/allOf"):
            yield from self._reader.opposite(conj)

    def _any(self) -> Iterator[Facts]:
        alternatives = [EVERYTHING]
        for conj in self._reader.listed(self._given["anyOf"], f"{self._path}/anyOf"):
            alternatives = self._reader.product(
                alternatives, self._reader.opposite(conj), self._path
            )
        yield from alternatives

    def _one(self) -> Iterator[Facts]:
        """Yield the values that match no branch, and those that match two."""
        branches = self._reader.listed(self._given["oneOf"], f"{self._path}/oneOf")
        alternatives = [EVERYTHING]
        for conj in branches:
            alternatives = self._reader.product(
                alternatives, self._reader.opposite(conj), self._path
            )
        yield from alternatives
        for i, conj in enumerate(branches):
            for other in branches[:i]:
                yield from self._reader.facts(tuple(dict.fromkeys(conj + other)))

    def _not(self) -> Iterator[Facts]:
        yield from self._reader.facts(self._reader.conj(self._given["not"], f"{self._path}/not"))


KEYWORDS = {
    "type": Opposite._type,
    "const": Opposite._values,
    "enum": Opposite._values,
    **dict.fromkeys(("minLength", "minItems", "minProperties"), Opposite._counts),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), Opposite._counts),
    **dict.fromkeys(("minimum", "exclusiveMinimum"), Opposite._bounds),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), Opposite._bounds),
    "multipleOf": Opposite._multiple,
    "pattern": Opposite._pattern,
    "properties": Opposite._properties,
    "required": Opposite._required,
    "items": Opposite._items,
    "contains": Opposite._contains,
    "$ref": Opposite._reference,
    "allOf": Opposite._all,
    "anyOf": Opposite._any,
    "oneOf": Opposite._one,
    "not": Opposite._not,
}
WITHOUT = (
    *("format", "patternProperties", "additionalProperties", "propertyNames"),
    *("unevaluatedProperties", "unevaluatedItems", "prefixItems", "uniqueItems", "if"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
