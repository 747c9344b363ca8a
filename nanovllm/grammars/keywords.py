"""Constraints of a schema's own keywords, by type, without keywords that apply other schemas."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

from nanovllm.grammars.automata import MAX_EXPLORED, PatternError, TooLargeError
from nanovllm.grammars.document import Document
from nanovllm.grammars.facts import (
    ANYTHING,
    EVERYTHING,
    Array,
    Bound,
    Conj,
    Facts,
    Number,
    Object,
    PropertyLayer,
    String,
)
from nanovllm.grammars.formats import FORMATS
from nanovllm.grammars.regexes import found
from nanovllm.grammars.texts import weighed

MAX_CHARS = 4096  # characters of an expression
MAX_VALUES = 20_000  # values of one enum
MAX_LENGTH = 1 << 20
TYPES = ("string", "number", "object", "array", "integer", "boolean", "null")
STANDARD_FORMATS = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
Schema = dict[str, Any]


class Keywords:
    def __init__(self, reader: Document) -> None:
        self._reader = reader

    def own(self, schema: Schema, path: str) -> list[Facts]:
        """Return the constraints of all keywords but those that apply schemas to the value."""
        facts = EVERYTHING
        if (types := self.types(schema, path)) is not None:
            facts = facts.only(*types)
        for kind in (self._number, self._text, self._array, self._object):
            if (facts_of_kind := kind(schema, path)) is not None:
                facts = facts.and_(facts_of_kind)
        alternatives = [] if facts.is_empty() else [facts]
        for keyword in ("const", "enum"):
            if keyword in schema:
                values = [schema["const"]] if keyword == "const" else schema["enum"]
                fits = isinstance(values, list) and 0 < len(values) <= MAX_VALUES
                self._reader.expect(
                    fits, path, f"has an 'enum' that is not a list of 1 to {MAX_VALUES} values"
                )
                alternatives = self._reader.product(alternatives, self.valued(values, path), path)
        return alternatives

    def types(self, schema: Schema, path: str) -> list[str] | None:
        named = schema.get("type")
        if named is None:
            return None
        names = named if isinstance(named, list) else [named]
        are_known = bool(names) and all(name in TYPES for name in names)
        self._reader.expect(are_known, path, f"has a 'type' that is not of {', '.join(TYPES)}")
        return names

    def valued(self, values: list[Any], path: str) -> list[Facts]:
        """Return the constraints that allow exactly these values.

        Objects and arrays become constraints with one constant schema per part.
        """
        texts = tuple(dict.fromkeys(v for v in values if isinstance(v, str)))
        numbers = [value for value in values if is_number(value)]
        are_finite = all(is_finite(value) for value in numbers)
        self._reader.expect(are_finite, path, "has a number that is not finite as a value")
        fractions = tuple(dict.fromkeys(map(fraction, numbers)))
        booleans = tuple(v for v in (True, False) if any(v is value for value in values))
        alternatives = [
            Facts(
                null=any(v is None for v in values),
                booleans=booleans,
                number=Number(values=fractions) if fractions else None,
                text=String(values=texts) if texts else None,
            )
        ]
        for value in values:
            if isinstance(value, list):
                items = tuple(self._reader.constant(item, path) for item in value)
                alternatives.append(Facts(array=Array(((items, (1,)),), len(items), len(items))))
            elif isinstance(value, dict):
                named = {name: self._reader.constant(inner, path) for name, inner in value.items()}
                alternatives.append(
                    Facts(object=Object((PropertyLayer(named, rest=(1,)),), tuple(named)))
                )
        return [facts for facts in alternatives if not facts.is_empty()]

    def _text(self, schema: Schema, path: str) -> Facts | None:
        low, high = self.counts(schema, path, "minLength", "maxLength")
        pattern, form = schema.get("pattern"), schema.get("format")
        string = String(low=low, high=high)
        self._reader.expect(
            isinstance(form, str | None), path, "has a 'format' that is not a string"
        )
        if pattern is not None and self.pattern(pattern, path):
            string = replace(string, patterns=((pattern, True),))
        if form in FORMATS:
            string = replace(string, formats=(form,))
        elif form in STANDARD_FORMATS:
            self._reader.inexact(path, f"a 'format' that is not of {', '.join(FORMATS)}")
        return None if string == String() else replace(EVERYTHING, text=string.and_(String()))

    def pattern(self, pattern: object, path: str, keyword: str = "pattern") -> bool:
        """Return whether a pattern can be enforced."""
        if not isinstance(pattern, str):
            self._reader.refuse(path, f"has a '{keyword}' that is not a string")
        try:
            if len(pattern) > MAX_CHARS:
                raise PatternError(f"more than {MAX_CHARS} characters")
            if keyword == "pattern":
                heavy, num_states = weighed(pattern)
                self._reader.spend(num_states, path)
                if heavy:  # a pattern without other constraints needs no automaton
                    return True
            self._reader.spend(len(found(pattern).edges), path)
        except PatternError as error:
            self._reader.spend(MAX_EXPLORED if isinstance(error, TooLargeError) else 1, path)
            self._reader.inexact(path, f"a '{keyword}' with {error}")
            return False
        return True

    def _number(self, schema: Schema, path: str) -> Facts | None:
        low, high = self.bounds(schema, path)
        number = Number(low=low, high=high, multiples=self.multiple(schema, path))
        return None if number == Number() else replace(EVERYTHING, number=number.and_(Number()))

    def multiple(self, schema: Schema, path: str) -> frozenset[Fraction]:
        value = schema.get("multipleOf")
        if value is None:
            return frozenset()
        fits = is_number(value) and is_finite(value) and value > 0
        self._reader.expect(fits, path, "has no number above 0 as 'multipleOf'")
        return frozenset({fraction(value)})

    def bounds(self, schema: Schema, path: str) -> tuple[Bound | None, Bound | None]:
        bounds: list[list[Bound]] = [[], []]
        for side, names in enumerate(("minimum exclusiveMinimum", "maximum exclusiveMaximum")):
            for name in names.split():
                value = schema.get(name)
                if value is None or (isinstance(value, bool) and name.startswith("excl")):
                    continue  # draft 4 has a boolean here
                fits = is_number(value) and is_finite(value)
                self._reader.expect(fits, path, f"has no number as {name!r}")
                is_out = name.startswith("excl") or schema.get(f"exclusive{name.title()}") is True
                bounds[side].append((fraction(value), is_out))
        low = max(bounds[0], default=None)
        return low, min(bounds[1], default=None, key=lambda bound: (bound[0], not bound[1]))

    def _array(self, schema: Schema, path: str) -> Facts | None:
        low, high = self.counts(schema, path, "minItems", "maxItems")
        prefix, rest, place = schema.get("prefixItems"), schema.get("items"), "items"
        if isinstance(rest, list):  # a tuple in draft 7, and in the AI SDK's schemas from zod
            prefix, rest, place = rest, schema.get("additionalItems"), "additionalItems"
        self._reader.expect(isinstance(prefix, list | None), path, "has no list as 'prefixItems'")
        first = tuple(
            self._reader.conj(item, f"{path}/prefixItems/{i}")
            for i, item in enumerate(prefix or ())
        )
        after = None if rest is None else self._reader.conj(rest, f"{path}/{place}")
        layers = () if prefix is None and after is None else ((first, after),)
        is_unique = schema.get("uniqueItems", False) is not False
        if is_unique and (high is None or high > 1):
            self._reader.inexact(path, "'uniqueItems'")
        contains: tuple[Conj, ...] = ()
        if "contains" in schema:
            counts = {"minContains": 1} | schema
            least, most = self.counts(counts, path, "minContains", "maxContains")
            if least != 1 or most is not None:
                self._reader.inexact(path, "'minContains' or 'maxContains'")
            if least == 1:
                contains = (self._reader.conj(schema["contains"], f"{path}/contains"),)
        if not layers and not low and high is None and not contains:
            return None
        return replace(EVERYTHING, array=Array(layers, low, high, contains))

    def _object(self, schema: Schema, path: str) -> Facts | None:
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for keyword, value in (("properties", properties), ("patternProperties", patterns)):
            is_object = isinstance(value, dict)
            self._reader.expect(is_object, path, f"has {keyword!r} that are not an object")
        required = self.names(schema.get("required", []), path)
        low, high = self.counts(schema, path, "minProperties", "maxProperties")
        named = {n: self._reader.conj(s, f"{path}/properties/{n}") for n, s in properties.items()}
        needed = tuple(
            (pattern, self._reader.conj(inner, f"{path}/patternProperties/{pattern}"))
            for pattern, inner in patterns.items()
            if self.pattern(pattern, path, "patternProperties")
        )
        rest = schema.get("additionalProperties")
        after = None if rest is None else self._reader.conj(rest, f"{path}/additionalProperties")
        if len(needed) < len(patterns) and after is not None:
            after = ANYTHING if after != (1,) else after
        layers = (
            (PropertyLayer(named, needed, after),) if named or needed or after is not None else ()
        )
        names = self._reader.conj(schema.get("propertyNames", True), f"{path}/propertyNames")
        if not layers and not required and not low and high is None and names == ANYTHING:
            return None
        return replace(EVERYTHING, object=Object((), required, 0, None).and_(
            Object(layers=layers, required=required, low=low, high=high, names=names)))  # fmt: skip

    def counts(self, schema: Schema, path: str, least: str, most: str) -> tuple[int, int | None]:
        """Return the least and the greatest count from two keywords; None above MAX_LENGTH."""
        there = {keyword: schema[keyword] for keyword in (least, most) if keyword in schema}
        for keyword, value in there.items():
            fits = is_number(value) and value == value // 1 and value >= 0
            self._reader.expect(fits, path, f"has no integer from 0 as {keyword!r}")
        low, high = int(there.get(least, 0)), there.get(most)
        self._reader.expect(low <= MAX_LENGTH, path, f"has {least!r} above {MAX_LENGTH}")
        return low, None if high is None or high > MAX_LENGTH else int(high)

    def names(self, names: object, path: str) -> tuple[str, ...]:
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not is_list and not self._reader.exact:
            return ()
        self._reader.expect(is_list, path, "has no list of names as 'required'")
        return tuple(dict.fromkeys(names))  # type: ignore[call-overload]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: float) -> bool:
    """Return whether a number is finite. `math.isfinite` fails on integers of over 308 digits."""
    return isinstance(value, int) or math.isfinite(value)


def fraction(value: float) -> Fraction:
    """Return the decimal number that `value` was written as. Raise ValueError unless finite."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
