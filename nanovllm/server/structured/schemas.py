"""JSON Schemas of clients: checked, and rewritten so that xgrammar 0.2.8 enforces all they say.

What cannot be enforced is refused with its keyword and place. Keywords that JSON Schema does not
have mean nothing, as in JSON Schema itself.

Best effort (`strict: false`) leaves out what cannot be enforced and keeps the rest: the keys come
in the order of `properties`, with no others unless `additionalProperties` allows them.

Decision: a rewriting may be narrower than the schema, as what matches is valid still. Strings of
bounded length have no escapes: as a pattern their masks cost a tenth of xgrammar's own lengths.
"""

from __future__ import annotations

import json
import math
import re
from itertools import combinations
from typing import Any, NoReturn

from nanovllm.server.errors import ApiError
from nanovllm.server.parsers.json_types import json_type, pointed
from nanovllm.server.structured.patterns import FORMATS, MAX_COUNT, PatternError, whole

MAX_BYTES = 1 << 16
MAX_DEPTH = 20
MAX_PARTS = 1000  # schemas within one
MAX_OPTIONAL = 64  # properties of one object: each makes its masks slower
MAX_VALUES = 2000  # of one enum
MAX_LENGTH = 1 << 16  # of strings and arrays
MAX_NUMBER = 2**53 - 1  # as a bound; zod gives it to every integer
NUM_DECIMALS = 6  # of a bound

KEYWORDS = {
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
}
TYPES = (*KEYWORDS, "integer", "boolean", "null")
UNIONS = ("anyOf", "oneOf", "allOf")
ENFORCED = {"type", "enum", "const", "$ref", *UNIONS}.union(*KEYWORDS.values())
UNENFORCED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "patternProperties"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems", "additionalItems"),
    *("$dynamicRef", "$recursiveRef"),
)
DEFINITIONS = ("$defs", "definitions")
FOLLOWED = re.compile(r"#(/(\$defs|definitions)/[^/~%]*)?")  # references
Schema = dict[str, Any]


def vetted(schema: object, where: str, *, exact: bool) -> Schema:
    """The schema as xgrammar shall have it. `where`: the request's field. Raises ApiError."""
    vetting = _Vetting(schema, where, exact=exact)
    vetting.expect(len(json.dumps(schema)) <= MAX_BYTES, "#", f"has more than {MAX_BYTES} bytes")
    made = vetting.schema(schema, "#", 0)
    for keyword in DEFINITIONS:
        named = schema.get(keyword) if isinstance(schema, dict) else None
        if isinstance(named, dict):
            places = {name: f"#/{keyword}/{name}" for name in named}
            made[keyword] = {name: vetting.schema(named[name], places[name], 1) for name in named}
    return made


def resolved(schema: Any, root: object) -> Any:  # noqa: ANN401 - any JSON
    """Where its references end: None after one that xgrammar does not follow, one of them if they
    go round."""
    seen: list[object] = []
    while isinstance(schema, dict) and "$ref" in schema and schema not in seen:
        seen.append(schema)
        reference = schema["$ref"]
        is_followed = isinstance(reference, str) and FOLLOWED.fullmatch(reference)
        schema = pointed(reference, root) if is_followed else None
    return schema


class _Vetting:
    """Of one schema. Every place is a JSON pointer."""

    def __init__(self, root: object, where: str, *, exact: bool) -> None:
        self._root = root
        self._where = where
        self._exact = exact
        self._num_parts = 0

    def _refuse(self, path: str, text: str) -> NoReturn:
        text = f"{self._where}: the schema {text}, at {path}"
        raise ApiError(400, text, param=self._where, code="invalid_schema")

    def expect(self, holds: bool, path: str, otherwise: str) -> None:
        if not holds:
            self._refuse(path, otherwise)

    def _inexact(self, path: str, what: str) -> None:
        """Under best effort, nothing: go on without."""
        text = f"has {what}, which cannot be enforced; leave it out or ask for strict: false"
        self.expect(not self._exact, path, text)

    def schema(self, given: object, path: str, depth: int) -> Schema:
        self._num_parts += 1
        self.expect(depth <= MAX_DEPTH, path, f"is nested more than {MAX_DEPTH} deep")
        self.expect(self._num_parts <= MAX_PARTS, path, f"has more than {MAX_PARTS} parts")
        if given is True:
            return {}
        if not isinstance(given, dict):
            self._refuse(path, "is no object" if given is not False else "allows nothing")
        for keyword in UNENFORCED:
            is_harmless = keyword == "propertyNames" and given.get(keyword) == {"type": "string"}
            if given.get(keyword, False) is not False and not is_harmless:
                self._inexact(path, repr(keyword))
        main = next((k for k in ("enum", "const", "$ref", *UNIONS) if k in given), "type")
        others = [k for k in given if k in ENFORCED - {main} and main != "type"]
        if main in ("enum", "const"):
            return self._values(given, main, path)
        if others:
            self._inexact(path, f"{others[0]!r} beside {main!r}")
        if main == "$ref":
            return self._reference(given, path)
        if main != "type" and not others:
            return self._union(given[main], main, f"{path}/{main}", depth)
        types = self._types(given, path)
        made = [self._typed(name, given, path, depth) for name in types] or [{}]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _types(self, given: Schema, path: str) -> list[str]:
        """Without a `type`, those that the other keywords speak of."""
        named = given.get("type")
        if named is None:
            return [name for name, words in KEYWORDS.items() if not given.keys().isdisjoint(words)]
        names = named if isinstance(named, list) else [named]
        are_known = names and all(name in TYPES for name in names)
        self.expect(bool(are_known), path, f"has a 'type' that is not of {', '.join(TYPES)}")
        return names

    def _values(self, given: Schema, main: str, path: str) -> Schema:
        for keyword in ENFORCED.intersection(given) - {main, "type"}:
            self._inexact(path, f"{keyword!r} beside {main!r}")
        values = [given["const"]] if main == "const" else given["enum"]
        fits = isinstance(values, list) and 0 < len(values) <= MAX_VALUES
        self.expect(fits, path, f"has an 'enum' that is no list of 1 to {MAX_VALUES} values")
        types = self._types(given, path) if "type" in given else TYPES
        fitting = [value for value in values if not _types_of(value).isdisjoint(types)]
        self.expect(bool(fitting), path, f"has no value in {main!r} that is of its 'type'")
        return {"enum": fitting}

    def _reference(self, given: Schema, path: str) -> Schema:
        target = resolved(given, self._root)
        goes_round = isinstance(target, dict) and "$ref" in target
        self.expect(not goes_round, path, "has a '$ref' that leads to itself")
        if target is None:
            self._inexact(path, f"a '$ref' other than '#' and '#/$defs/NAME' ({given['$ref']!r})")
            return {}
        return {"$ref": given["$ref"]}

    def _union(self, branches: object, union: str, path: str, depth: int) -> Schema:
        if not isinstance(branches, list) or not branches:
            self._refuse(path, "must be a list of at least one schema")
        made = [self.schema(b, f"{path}/{i}", depth + 1) for i, b in enumerate(branches)]
        if len(made) == 1:
            return made[0]
        if union == "allOf":
            self._inexact(path, "'allOf' of several schemas")
            return {}
        if union == "oneOf":  # apart, if a fact of one excludes the other's
            facts = [_facts(resolved(branch, self._root)) for branch in branches]
            for a, b in combinations(facts, 2):
                if not any(a[name].isdisjoint(b[name]) for name in a.keys() & b.keys()):
                    self._inexact(path, "'oneOf' with branches that may match the same")
        return {"anyOf": made}

    # -- one type -----------------------------------------------------------------------------

    def _typed(self, name: str, given: Schema, path: str, depth: int) -> Schema:
        if name == "string":
            return self._string(given, path)
        if name in ("number", "integer"):
            return self._number(name, given, path)
        if name == "object":
            return self._object(given, path, depth)
        return self._array(given, path, depth) if name == "array" else {"type": name}

    def _string(self, given: Schema, path: str) -> Schema:
        low, high = self._counts(given, path, "minLength", "maxLength")
        pattern, form = given.get("pattern"), given.get("format")
        if pattern is not None:
            form = None  # zod writes both, and the pattern is what it means by the format
        if form is not None and str(form) not in FORMATS:
            self._inexact(path, f"a 'format' that is not of {', '.join(FORMATS)}")
            form = None
        has_length = low > 0 or high is not None
        if (pattern is not None) + (form is not None) + has_length > 1:
            self._inexact(path, "more than one of 'pattern', 'format' and a length")
        if pattern is not None:
            self.expect(isinstance(pattern, str), path, "has a 'pattern' that is no string")
            try:
                return {"type": "string", "pattern": whole(pattern)}
            except PatternError as error:
                self._inexact(path, f"a 'pattern' with {error}")
        if form is not None:
            return {"type": "string", "pattern": FORMATS[form]}
        if has_length and max(low, high or 0) <= MAX_COUNT:
            return {"type": "string", "pattern": f".{{{low},{'' if high is None else high}}}"}
        lengths = {"minLength": low or None, "maxLength": high}
        return {"type": "string"} | {k: v for k, v in lengths.items() if v is not None}

    def _number(self, name: str, given: Schema, path: str) -> Schema:
        made: Schema = {"type": name}
        for keyword in KEYWORDS["number"]:
            if (value := given.get(keyword)) is None:
                continue
            self.expect("number" in _types_of(value), path, f"has no number as {keyword!r}")
            if keyword == "multipleOf":
                if 1 <= value <= MAX_VALUES and value == int(value):
                    made |= {"type": "integer", "multipleOf": int(value)}
                else:
                    self._inexact(path, f"'multipleOf' of no integer from 1 to {MAX_VALUES}")
            elif abs(value) <= MAX_NUMBER and round(value, NUM_DECIMALS) == value:
                made[keyword] = value
            else:
                limits = f"above {MAX_NUMBER} or of more than {NUM_DECIMALS} decimals"
                self._inexact(path, f"{keyword!r} {limits}")
        if made["type"] == "integer":  # bounds as the inclusive ones, which are whole
            if (above := made.pop("exclusiveMinimum", None)) is not None:
                made["minimum"] = max(math.floor(above) + 1, made.get("minimum", -MAX_NUMBER))
            if (below := made.pop("exclusiveMaximum", None)) is not None:
                made["maximum"] = min(math.ceil(below) - 1, made.get("maximum", MAX_NUMBER))
            bounds = {"minimum": math.ceil, "maximum": math.floor}
            made |= {key: inward(made[key]) for key, inward in bounds.items() if key in made}
        return made

    def _object(self, given: Schema, path: str, depth: int) -> Schema:
        properties, required = given.get("properties", {}), given.get("required", [])
        self.expect(isinstance(properties, dict), path, "has 'properties' that are no object")
        is_list = isinstance(required, list) and all(isinstance(name, str) for name in required)
        self.expect(is_list, path, "has no list of names as 'required'")
        made = {
            name: self.schema(inner, f"{path}/properties/{name}", depth + 1)
            for name, inner in properties.items()
        }
        others = given.get("additionalProperties", "properties" not in given)
        if others is not False and properties:
            self._inexact(path, "'additionalProperties' beside 'properties'")
        more = others and self.schema(others, f"{path}/additionalProperties", depth + 1)
        for name in required:
            is_possible = name in made or others is not False or "additionalProperties" not in given
            self.expect(is_possible, path, f"requires {name!r}, which its 'properties' lack")
            made.setdefault(name, more or {})
        too_many = f"has more than {MAX_OPTIONAL} properties that are not 'required'"
        self.expect(len(made) - len(required) <= MAX_OPTIONAL, path, too_many)
        low, high = self._counts(given, path, "minProperties", "maxProperties")
        if more is not False and low > 1:
            self._inexact(path, "'minProperties' beside 'additionalProperties'")
        if not made and more == {} and not low and high is None:
            return {"type": "object"}
        whole = {"type": "object", "properties": made, "required": required}
        whole |= {"additionalProperties": more, "minProperties": low}
        return whole | ({} if high is None else {"maxProperties": high})

    def _array(self, given: Schema, path: str, depth: int) -> Schema:
        low, high = self._counts(given, path, "minItems", "maxItems")
        prefix, items = given.get("prefixItems", []), given.get("items", "prefixItems" not in given)
        if isinstance(items, list):
            prefix, items = items, False  # a tuple as draft 7 writes it, and the AI SDK from zod
        self.expect(isinstance(prefix, list), path, "has no list as 'prefixItems'")
        made: Schema = {"type": "array", "minItems": low}
        made |= {} if high is None else {"maxItems": high}
        places = {f"{path}/prefixItems/{i}": item for i, item in enumerate(prefix)}
        if places:
            made["prefixItems"] = [self.schema(places[at], at, depth + 1) for at in places]
        return made | {"items": items and self.schema(items, f"{path}/items", depth + 1)}

    def _counts(self, given: Schema, path: str, least: str, most: str) -> tuple[int, int | None]:
        found = {keyword: given[keyword] for keyword in (least, most) if keyword in given}
        for keyword, value in found.items():
            fits = "integer" in _types_of(value) and 0 <= value <= MAX_LENGTH
            self.expect(fits, path, f"has no integer from 0 to {MAX_LENGTH} as {keyword!r}")
        low, high = int(found.get(least, 0)), found.get(most)
        self.expect(high is None or low <= high, path, f"has {least!r} above {most!r}")
        return low, None if high is None else int(high)


def _facts(schema: object) -> dict[str, set[str]]:
    """What is plain about all that matches: the types it may have, the values as JSON, and the same
    of each property that must be there."""
    if not isinstance(schema, dict):
        return {}
    facts: dict[str, set[str]] = {}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    named = schema.get("type")
    if isinstance(values, list):
        facts["values"] = {json.dumps(value) for value in values}
        facts["types"] = set().union(*map(_types_of, values))
    elif named is not None:
        names = named if isinstance(named, list) else [named]
        facts["types"] = {"number" if name == "integer" else str(name) for name in names}
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        for name in (name for name in properties if name in required):
            facts |= {f"{name}/{key}": fact for key, fact in _facts(properties[name]).items()}
    return facts


def _types_of(value: Any) -> set[str]:  # noqa: ANN401 - any JSON
    name = json_type(value)
    return {name, "integer"} if name == "number" and value == value // 1 else {name}
