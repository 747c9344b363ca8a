"""JSON Schemas of clients, read: what each says about each type (facts.py), with `allOf`, `$ref`,
`not`, `if` and the like resolved, as alternatives of which one must hold.

What can't be enforced is refused with its keyword and place; best effort leaves it out. Keywords
and formats that JSON Schema does not have mean nothing, as in JSON Schema itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any, NoReturn

from nanovllm.server.errors import ApiError
from nanovllm.server.parsers.json_types import json_type
from nanovllm.server.structured.automata import PatternError, found
from nanovllm.server.structured.facts import (
    ANYTHING,
    EVERYTHING,
    Array,
    Bound,
    Conj,
    Facts,
    Layer,
    Number,
    Object,
    Text,
)
from nanovllm.server.structured.negation import InexactError, Opposite
from nanovllm.server.structured.patterns import FORMATS
from nanovllm.server.structured.references import Addresses, UnknownReferenceError, pointer

MAX_PARTS = 20_000  # schemas within one
MAX_ALTERNATIVES = 200  # of one value
MAX_WORK = 50_000  # mergings
MAX_NESTED = 64  # keywords that speak of the same value
MAX_VALUES = 5000  # of one enum
MAX_LENGTH = 1 << 20
TYPES = ("string", "number", "object", "array", "integer", "boolean", "null")
STANDARD_FORMATS = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
UNENFORCED = ("unevaluatedItems", "$dynamicRef", "$recursiveRef")
Schema = dict[str, Any]


class Reader:
    """Of one schema. Every place is a JSON pointer."""

    def __init__(self, root: object, where: str, *, exact: bool) -> None:
        self._root = root
        self._where = where
        self.exact = exact
        self._names: Addresses | None = None
        self._schemas: list[tuple[Any, str]] = [(False, "#")]  # numbered from 1 on
        self._numbers: dict[int, int] = {}
        self._constants: dict[str, Conj] = {}
        self._known: dict[Conj, list[Facts]] = {}
        self._open: list[int] = []
        self._work = 0

    # -- what goes wrong ----------------------------------------------------------------------

    def refuse(self, path: str, text: str) -> NoReturn:
        text = f"{self._where}: the schema {text}, at {path}"
        raise ApiError(400, text, param=self._where, code="invalid_schema")

    def expect(self, holds: bool, path: str, otherwise: str) -> None:
        if not holds:
            self.refuse(path, otherwise)

    def inexact(self, path: str, what: str) -> None:
        """Under best effort, nothing: go on without."""
        text = f"has {what}, which cannot be enforced; leave it out or ask for strict: false"
        self.expect(not self.exact, path, text)

    # -- schemas by number --------------------------------------------------------------------

    def conj(self, schema: object, path: str) -> Conj:
        if schema is True or schema == {}:
            return ANYTHING
        if schema is False:
            return (1,)
        if not isinstance(schema, dict):
            self.refuse(path, "is no object")
        number = self._numbers.get(id(schema))
        if number is None:
            self._schemas.append((schema, path))
            number = self._numbers[id(schema)] = len(self._schemas)
            self.expect(number <= MAX_PARTS, path, f"has more than {MAX_PARTS} parts")
        return (number,)

    def path(self, conj: Conj) -> str:
        return self._schemas[abs(conj[0]) - 1][1] if conj else "#"

    def constant(self, value: object, path: str) -> Conj:
        key = json.dumps(value, sort_keys=True)
        if key not in self._constants:
            self._constants[key] = self.conj({"const": value}, path)
        return self._constants[key]

    def facts(self, conj: Conj) -> list[Facts]:
        """The alternatives; none if nothing matches."""
        if (known := self._known.get(conj)) is not None:
            return known
        made = [EVERYTHING]
        for literal in conj:
            made = self.product(made, self._literal(literal), self.path((literal,)))
        self._known[conj] = made
        return made

    def product(self, some: list[Facts], others: list[Facts], path: str) -> list[Facts]:
        self._work += len(some) * len(others)
        self.expect(self._work <= MAX_WORK, path, "has too many combinations of alternatives")
        if some == [EVERYTHING]:
            return others
        made = [both for a in some for b in others if not (both := a.and_(b)).is_empty()]
        if len(made) > MAX_ALTERNATIVES:
            self.inexact(path, f"more than {MAX_ALTERNATIVES} combinations of alternatives")
            return some
        return made

    def _literal(self, literal: int) -> list[Facts]:
        key = (literal,)
        if (known := self._known.get(key)) is not None:
            return known
        schema, path = self._schemas[abs(literal) - 1]
        self.expect(literal not in self._open, path, "has a '$ref' that leads to itself")
        self.expect(len(self._open) < MAX_NESTED, path, f"is nested more than {MAX_NESTED} deep")
        self._open.append(literal)
        try:
            if schema is False:
                made = [] if literal > 0 else [EVERYTHING]
            elif literal > 0:
                made = self._alternatives(schema, path)
            else:
                made = Opposite(self, schema, path).alternatives()
        finally:
            self._open.pop()
        self._known[key] = made
        return made

    # -- one schema -----------------------------------------------------------------------------

    def _alternatives(self, given: Schema, path: str) -> list[Facts]:
        for keyword in UNENFORCED:
            if keyword in given and given[keyword] not in (True, {}):
                self.inexact(path, repr(keyword))
        made = self.own(given, path)
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
            if keyword in given:
                made = read(given, keyword, f"{path}/{keyword}", made)
        if given.get("unevaluatedProperties", True) not in (True, {}):
            rest = self.conj(given["unevaluatedProperties"], f"{path}/unevaluatedProperties")
            made = [
                facts
                if facts.object is None
                else replace(facts, object=facts.object.and_(
                    Object((Layer({}, rest=rest, beside=facts.object.layers),))))
                for facts in made
            ]  # fmt: skip
        return made

    def own(self, given: Schema, path: str) -> list[Facts]:
        """What it says itself, without the schemas that speak of the same value."""
        facts = EVERYTHING
        if (types := self.types(given, path)) is not None:
            facts = facts.only(*types)
        for kind in (self._number, self._text, self._array, self._object):
            if (more := kind(given, path)) is not None:
                facts = facts.and_(more)
        made = [] if facts.is_empty() else [facts]
        for keyword in ("const", "enum"):
            if keyword in given:
                values = [given["const"]] if keyword == "const" else given["enum"]
                fits = isinstance(values, list) and 0 < len(values) <= MAX_VALUES
                self.expect(
                    fits, path, f"has an 'enum' that is no list of 1 to {MAX_VALUES} values"
                )
                made = self.product(made, self.valued(values, path), path)
        return made

    def types(self, given: Schema, path: str) -> list[str] | None:
        named = given.get("type")
        if named is None:
            return None
        names = named if isinstance(named, list) else [named]
        are_known = names and all(name in TYPES for name in names)
        self.expect(bool(are_known), path, f"has a 'type' that is not of {', '.join(TYPES)}")
        return names

    def valued(self, values: list[Any], path: str) -> list[Facts]:
        """Objects and arrays as schemas of their parts."""
        texts = tuple(dict.fromkeys(v for v in values if isinstance(v, str)))
        numbers = tuple(dict.fromkeys(fraction(v) for v in values if json_type(v) == "number"))
        booleans = tuple(v for v in (True, False) if any(v is value for value in values))
        made = [
            Facts(
                null=any(v is None for v in values),
                booleans=booleans,
                number=Number(values=numbers) if numbers else None,
                text=Text(values=texts) if texts else None,
            )
        ]
        for value in values:
            if isinstance(value, list):
                items = tuple(self.constant(item, path) for item in value)
                made.append(Facts(array=Array(((items, (1,)),), len(items), len(items))))
            elif isinstance(value, dict):
                named = {name: self.constant(inner, path) for name, inner in value.items()}
                made.append(Facts(object=Object((Layer(named, rest=(1,)),), tuple(named))))
        return [facts for facts in made if not facts.is_empty()]

    # -- schemas that speak of the same value -----------------------------------------------------

    def _reference(self, given: Schema, keyword: str, path: str, made: list[Facts]) -> list[Facts]:
        for conj in self.target(given, path):
            made = self.product(made, self.facts(conj), path)
        return made

    def target(self, given: Schema, path: str) -> list[Conj]:
        """Of its `$ref`; under best effort nothing for one that leads nowhere."""
        reference = given["$ref"]
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

    def _all(self, given: Schema, keyword: str, path: str, made: list[Facts]) -> list[Facts]:
        for conj in self.listed(given["allOf"], path):
            made = self.product(made, self.facts(conj), path)
        return made

    def _any(self, given: Schema, keyword: str, path: str, made: list[Facts]) -> list[Facts]:
        branches = self.listed(given["anyOf"], path)
        return self.product(made, [f for conj in branches for f in self.facts(conj)], path)

    def _one(self, given: Schema, keyword: str, path: str, made: list[Facts]) -> list[Facts]:
        """Where two branches may both match, the others' opposites are merged into each."""
        branches = self.listed(given["oneOf"], path)
        matched = [self.product(made, self.facts(conj), path) for conj in branches]
        alone = list(matched)
        if self.exact:
            for i, conj in enumerate(branches):
                for j in range(len(branches)):
                    if j == i or self._are_apart(matched[i], matched[j]):
                        continue
                    try:
                        opposite = self.facts(tuple(-n for n in branches[j]) or (1,))
                    except InexactError:
                        self.inexact(path, "'oneOf' with branches that may match the same")
                        break
                    alone[i] = self.product(alone[i], opposite, path)
        both = [facts for branch in alone for facts in branch]
        if len(both) > MAX_ALTERNATIVES:
            self.inexact(path, f"more than {MAX_ALTERNATIVES} alternatives")
            return made
        return both

    def _are_apart(self, some: list[Facts], others: list[Facts], depth: int = 3) -> bool:
        """Plainly: what is not sure of is no."""
        self._work += len(some) * len(others)
        self.expect(self._work <= MAX_WORK, "#", "has too many combinations of alternatives")
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
        """Of all of them together. Raises InexactError."""
        return [facts for literal in conj for facts in self.facts((-literal,))]

    def _not(self, given: Schema, keyword: str, path: str, made: list[Facts]) -> list[Facts]:
        try:
            return self.product(made, self.opposite(self.conj(given["not"], path)), path)
        except InexactError as error:
            self.inexact(path.removesuffix("/not"), f"'not' with {error}")
            return made

    def _if(self, given: Schema, keyword: str, path: str, made: list[Facts]) -> list[Facts]:
        if "then" not in given and "else" not in given:
            return made
        place = path.removesuffix("/if")
        condition = self.conj(given["if"], path)
        then = self.conj(given.get("then", True), f"{place}/then")
        other = self.conj(given.get("else", True), f"{place}/else")
        try:
            holds = self.product(self.facts(condition), self.facts(then), path)
            fails = self.product(self.opposite(condition), self.facts(other), path)
        except InexactError as error:
            self.inexact(place, f"'if' with {error}")
            return made
        return self.product(made, holds + fails, path)

    def _dependent(self, given: Schema, keyword: str, path: str, made: list[Facts]) -> list[Facts]:
        """Either the property is not there, or what depends on it holds."""
        needs = given[keyword]
        if not isinstance(needs, dict):
            self.refuse(path, "must be an object")
        for name, needed in needs.items():
            there = replace(EVERYTHING, object=Object(required=(name,)))
            if isinstance(needed, list):
                names = self.names(needed, f"{path}/{name}")
                holds = [there.and_(replace(EVERYTHING, object=Object(required=names)))]
            else:
                inner = self.facts(self.conj(needed, f"{path}/{name}"))
                holds = self.product([there], inner, path)
            lacks = replace(EVERYTHING, object=Object((Layer({name: (1,)}, closes=False),)))
            holds = [replace(facts, null=False, booleans=(), number=None, text=None, array=None)
                     for facts in holds if facts.object]  # fmt: skip
            made = self.product(made, [lacks, *holds], path)
        return made

    def names(self, given: object, path: str) -> tuple[str, ...]:
        is_list = isinstance(given, list) and all(isinstance(name, str) for name in given)
        if not is_list and not self.exact:
            return ()
        self.expect(is_list, path, "has no list of names as 'required'")
        return tuple(dict.fromkeys(given))  # type: ignore[call-overload, no-any-return]

    # -- one type -----------------------------------------------------------------------------

    def _text(self, given: Schema, path: str) -> Facts | None:
        low, high = self.counts(given, path, "minLength", "maxLength")
        pattern, form = given.get("pattern"), given.get("format")
        made = Text(low=low, high=high)
        if pattern is not None and self.pattern(pattern, path):
            made = replace(made, patterns=((pattern, True),))
        if form in FORMATS:
            made = replace(made, formats=(form,))
        elif form in STANDARD_FORMATS:
            self.inexact(path, f"a 'format' that is not of {', '.join(FORMATS)}")
        return None if made == Text() else replace(EVERYTHING, text=made.and_(Text()))

    def pattern(self, pattern: object, path: str, keyword: str = "pattern") -> bool:
        """Whether it can be enforced."""
        if not isinstance(pattern, str):
            self.refuse(path, f"has a '{keyword}' that is no string")
        try:
            found(pattern)
        except PatternError as error:
            self.inexact(path, f"a '{keyword}' with {error}")
            return False
        return True

    def _number(self, given: Schema, path: str) -> Facts | None:
        low, high = self.bounds(given, path)
        multiples: set[Fraction] = set()
        if (multiple := given.get("multipleOf")) is not None:
            is_number = json_type(multiple) == "number" and fraction(multiple) > 0
            self.expect(is_number, path, "has no number above 0 as 'multipleOf'")
            multiples = {fraction(multiple)}
        made = Number(low=low, high=high, multiples=frozenset(multiples))
        return None if made == Number() else replace(EVERYTHING, number=made.and_(Number()))

    def bounds(self, given: Schema, path: str) -> tuple[Bound | None, Bound | None]:
        found: list[list[Bound]] = [[], []]
        for side, names in enumerate(("minimum exclusiveMinimum", "maximum exclusiveMaximum")):
            for name in names.split():
                value = given.get(name)
                if value is None or (isinstance(value, bool) and name.startswith("excl")):
                    continue  # as draft 4 writes it
                fits = json_type(value) == "number" and math.isfinite(value)
                self.expect(fits, path, f"has no number as {name!r}")
                is_out = name.startswith("excl") or given.get(f"exclusive{name.title()}") is True
                found[side].append((fraction(value), is_out))
        low = max(found[0], default=None)
        return low, min(found[1], default=None, key=lambda bound: (bound[0], not bound[1]))

    def _array(self, given: Schema, path: str) -> Facts | None:
        low, high = self.counts(given, path, "minItems", "maxItems")
        prefix, rest, place = given.get("prefixItems"), given.get("items"), "items"
        if isinstance(rest, list):  # a tuple as draft 7 writes it, and the AI SDK from zod
            prefix, rest, place = rest, given.get("additionalItems"), "additionalItems"
        self.expect(isinstance(prefix, list | None), path, "has no list as 'prefixItems'")
        first = tuple(
            self.conj(item, f"{path}/prefixItems/{i}") for i, item in enumerate(prefix or ())
        )
        after = None if rest is None else self.conj(rest, f"{path}/{place}")
        layers = () if prefix is None and after is None else ((first, after),)
        is_unique = given.get("uniqueItems", False) is not False
        if is_unique and (high is None or high > 1):
            self.inexact(path, "'uniqueItems'")
        if "contains" in given:
            least, most = self.counts(given, path, "minContains", "maxContains")
            if ("minContains" in given and least != 1) or most is not None:
                self.inexact(path, "'minContains' or 'maxContains'")
                least = 0
        contains: tuple[Conj, ...] = ()
        if "contains" in given and ("minContains" not in given or least == 1):
            contains = (self.conj(given["contains"], f"{path}/contains"),)
        if not layers and not low and high is None and not contains:
            return None
        return replace(EVERYTHING, array=Array(layers, low, high, contains))

    def _object(self, given: Schema, path: str) -> Facts | None:
        properties = given.get("properties", {})
        patterns = given.get("patternProperties", {})
        self.expect(isinstance(properties, dict), path, "has 'properties' that are no object")
        self.expect(isinstance(patterns, dict), path, "has 'patternProperties' that are no object")
        required = self.names(given.get("required", []), path)
        low, high = self.counts(given, path, "minProperties", "maxProperties")
        named = {n: self.conj(s, f"{path}/properties/{n}") for n, s in properties.items()}
        kept = tuple(
            (pattern, self.conj(inner, f"{path}/patternProperties/{pattern}"))
            for pattern, inner in patterns.items()
            if self.pattern(pattern, path, "patternProperties")
        )
        rest = given.get("additionalProperties")
        after = None if rest is None else self.conj(rest, f"{path}/additionalProperties")
        if len(kept) < len(patterns) and after is not None:
            after = ANYTHING if after != (1,) else after
        layers = (Layer(named, kept, after),) if named or kept or after is not None else ()
        names = self.conj(given.get("propertyNames", True), f"{path}/propertyNames")
        if not layers and not required and not low and high is None and names == ANYTHING:
            return None
        return replace(EVERYTHING, object=Object((), required, 0, None).and_(
            Object(layers, required, low, high, names)))  # fmt: skip

    def counts(self, given: Schema, path: str, least: str, most: str) -> tuple[int, int | None]:
        there = {keyword: given[keyword] for keyword in (least, most) if keyword in given}
        for keyword, value in there.items():
            fits = json_type(value) == "number" and value == value // 1 and value >= 0
            self.expect(fits, path, f"has no integer from 0 as {keyword!r}")
        low, high = int(there.get(least, 0)), there.get(most)
        self.expect(low <= MAX_LENGTH, path, f"has {least!r} above {MAX_LENGTH}")
        return low, None if high is None or high > MAX_LENGTH else int(high)


def fraction(value: float) -> Fraction:
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def is_no_text(text: Text) -> bool:
    """Whether no text matches, as far as that is cheap to say."""
    from nanovllm.server.structured.texts import automaton

    try:
        return automaton(text).is_empty()
    except PatternError:
        return False
