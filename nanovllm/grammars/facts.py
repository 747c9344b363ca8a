"""Constraints of a schema on a value, by type, with all schemas that apply to the value merged.

Nested schemas (of properties and items) are not read here. A `Conj` names the schemas that apply
together, and is read when the grammar reaches it. Recursion therefore ends, and schemas that apply
twice are merged once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

Conj: TypeAlias = tuple[int, ...]  # numbers of schemas that all apply; -n is the negation of n
Bound: TypeAlias = tuple[Fraction, bool]  # value, and whether the bound is exclusive
ANYTHING: Conj = ()
KINDS = ("null", "boolean", "number", "string", "array", "object")


def both(one: Conj, other: Conj) -> Conj:
    """Return the conjunction of both."""
    return one + tuple(literal for literal in other if literal not in one)


def _least(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


@dataclass(frozen=True)
class Number:
    """Constraints on a number. `values`: the allowed numbers, or None for no such constraint."""

    is_integer: bool = False
    low: Bound | None = None
    high: Bound | None = None
    multiples: frozenset[Fraction] = frozenset()
    values: tuple[Fraction, ...] | None = None
    excluded: frozenset[Fraction] = frozenset()
    no_multiples: frozenset[Fraction] = frozenset()  # it is a multiple of none of these

    def and_(self, other: Number) -> Number | None:
        lows = [bound for bound in (self.low, other.low) if bound]
        highs = [bound for bound in (self.high, other.high) if bound]
        number = Number(
            is_integer=self.is_integer or other.is_integer,
            low=max(lows, default=None),
            high=min(highs, default=None, key=lambda bound: (bound[0], not bound[1])),
            multiples=self.multiples | other.multiples,
            values=_common(self.values, other.values),
            excluded=self.excluded | other.excluded,
            no_multiples=self.no_multiples | other.no_multiples,
        )
        if number.values is not None:
            allowed = tuple(value for value in number.values if number.has(value))
            return replace(number, values=allowed) if allowed else None
        if number.low and number.high:
            is_empty = number.low[0] > number.high[0] or (
                number.low[0] == number.high[0] and (number.low[1] or number.high[1])
            )
            return None if is_empty else number
        return number

    def has(self, value: Fraction) -> bool:
        """Return True if a number satisfies all constraints except `values`."""
        low, high = self.low, self.high
        return not (
            value in self.excluded
            or (self.is_integer and value.denominator != 1)
            or (low and (value < low[0] or (low[1] and value == low[0])))
            or (high and (value > high[0] or (high[1] and value == high[0])))
            or any(value % multiple for multiple in self.multiples)
            or any(value % multiple == 0 for multiple in self.no_multiples)
        )


@dataclass(frozen=True)
class String:
    patterns: tuple[tuple[str, bool], ...] = ()  # expression, whether it must be found
    formats: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    values: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()

    def and_(self, other: String) -> String | None:
        string = String(
            patterns=tuple(dict.fromkeys(self.patterns + other.patterns)),
            formats=tuple(dict.fromkeys(self.formats + other.formats)),
            low=max(self.low, other.low),
            high=_least(self.high, other.high),
            values=_common(self.values, other.values),
            excluded=self.excluded | other.excluded,
        )
        is_empty = string.values == () or (string.high is not None and string.high < string.low)
        return None if is_empty else string


def _common(one: tuple[object, ...] | None, other: tuple[object, ...] | None):  # type: ignore[no-untyped-def] # noqa: ANN202
    if one is None or other is None:
        return other if one is None else one
    common = set(other)
    return tuple(value for value in one if value in common)


@dataclass(frozen=True)
class Array:
    """Constraints on an array.

    `layers` has, per schema, the schemas of the first items and the schema of all later items
    (None: unconstrained).
    """

    layers: tuple[tuple[tuple[Conj, ...], Conj | None], ...] = ()
    low: int = 0
    high: int | None = None
    contains: tuple[Conj, ...] = ()

    def and_(self, other: Array) -> Array | None:
        array = Array(
            self.layers + other.layers,
            max(self.low, other.low),
            _least(self.high, other.high),
            self.contains + other.contains,
        )
        return None if array.high is not None and array.high < array.low else array


@dataclass(frozen=True, eq=False)
class PropertyLayer:
    """Constraints of one schema on properties.

    `rest` applies to properties that are not named, match no pattern and are not constrained by the
    layers in `beside` (None: unconstrained). If no layer constrains the other properties and one
    `closes`, other properties are not allowed.
    """

    properties: dict[str, Conj]
    patterns: tuple[tuple[str, Conj], ...] = ()
    rest: Conj | None = None
    beside: tuple[PropertyLayer, ...] = ()
    closes: bool = True

    def of(self, name: str | None, matching: frozenset[str]) -> Conj | None:
        """Return the schemas that apply to a property, or None if the layer does not constrain it.

        `name` is None for any unnamed property. `matching` has the patterns that the name matches.
        """
        conjunction: Conj | None = None
        if name is not None and name in self.properties:
            conjunction = self.properties[name]
        for pattern, conj in self.patterns:
            if pattern in matching:
                conjunction = both(conjunction or (), conj)
        if conjunction is not None or any(
            layer.of(name, matching) is not None for layer in self.beside
        ):
            return conjunction
        return self.rest


@dataclass(frozen=True, eq=False)
class Object:
    layers: tuple[PropertyLayer, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    names: Conj = ANYTHING

    def and_(self, other: Object) -> Object | None:
        obj = Object(
            layers=self.layers + other.layers,
            required=tuple(dict.fromkeys(self.required + other.required)),
            low=max(self.low, other.low),
            high=_least(self.high, other.high),
            names=both(self.names, other.names),
        )
        least = max(obj.low, len(obj.required))
        return None if obj.high is not None and obj.high < least else obj

    def simple(self) -> Object:
        """Return the constraints without property counts and name patterns (many rules)."""
        layers = tuple(
            PropertyLayer(
                properties=la.properties,
                patterns=(),
                rest=ANYTHING if la.patterns else la.rest,
                beside=(),
                closes=la.closes,
            )
            for la in self.layers
        )
        return Object(layers, self.required)


@dataclass(frozen=True, eq=False)
class Facts:
    """Constraints by type. None, False or empty means that no value of the type is allowed."""

    null: bool = False
    booleans: tuple[bool, ...] = ()
    number: Number | None = None
    text: String | None = None
    array: Array | None = None
    object: Object | None = None

    def and_(self, other: Facts) -> Facts:
        return Facts(
            null=self.null and other.null,
            booleans=tuple(value for value in self.booleans if value in other.booleans),
            number=self.number and other.number and self.number.and_(other.number),
            text=self.text and other.text and self.text.and_(other.text),
            array=self.array and other.array and self.array.and_(other.array),
            object=self.object and other.object and self.object.and_(other.object),
        )

    def is_empty(self) -> bool:
        return not (
            self.null or self.booleans or self.number or self.text or self.array or self.object
        )

    def only(self, *kinds: str) -> Facts:
        """Restrict the facts to these types, named as in JSON Schema."""
        number = self.number if {"number", "integer"} & set(kinds) else None
        if number and "number" not in kinds:
            number = number.and_(Number(is_integer=True))
        return Facts(
            null=self.null and "null" in kinds,
            booleans=self.booleans if "boolean" in kinds else (),
            number=number,
            text=self.text if "string" in kinds else None,
            array=self.array if "array" in kinds else None,
            object=self.object if "object" in kinds else None,
        )


EVERYTHING = Facts(
    null=True,
    booleans=(True, False),
    number=Number(),
    text=String(),
    array=Array(),
    object=Object(),
)
