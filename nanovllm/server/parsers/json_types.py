"""Conversion of a parameter's raw text to JSON, by its JSON Schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NoReturn

from nanovllm.server.parsers.base import Source
from nanovllm.server.parsers.json_value import BLANKS, value

Types = frozenset[str]
ANY = frozenset({"string", "null", "boolean", "integer", "number", "object", "array"})
STRING = frozenset({"string"})
quoted = json.JSONEncoder(ensure_ascii=False).encode  # encodes a string; created once for speed
MAX_DEPTH = 20  # of references and unions


def types_of(schema: object, name: str | None) -> Types:
    """Return the types of one parameter, or of those without a name in the schema for None.

    A parameter that no schema describes is a string.
    """
    parts = _applied(schema)
    schemas = [
        part["properties"][name] for part in parts if name in _mapping(part.get("properties"))
    ]
    schemas = schemas or [one for part in parts for one in _unnamed(part)]
    types = [found for one in schemas if (found := _types(one, schema, MAX_DEPTH))]
    return frozenset().union(*types) or (ANY if schemas else STRING)


def names_of(schema: object) -> Iterable[str]:
    """Return the parameters in a function's schema."""
    parts = _applied(schema)
    return chain.from_iterable(_mapping(part.get("properties")) for part in parts)


def as_json(text: str, types: Types) -> str:
    """Return JSON for the text: a value of an allowed type, else a string if that is allowed.

    In a union the types other than string come first and require exact JSON: "none" is a string. If
    a string is not allowed, Python's True, False and None are accepted too, as are objects and
    arrays in Python's notation. Frequent mistakes in the strings of an object or array are
    corrected as in JSON calls.
    """
    stripped = text.strip()
    if "string" in types:
        parsed_type = _parsed_type(stripped)
        corrected = _corrected(stripped) if parsed_type else stripped
    else:
        corrected = _corrected(stripped)
        parsed_type = _parsed_type(corrected)
    stripped = corrected if parsed_type else stripped
    if parsed_type and parsed_type != "string" and parsed_type in types:
        return stripped
    if "string" not in types:
        word = stripped.lower()
        if "boolean" in types and word in ("true", "false"):
            return word
        if "null" in types and word in ("null", "none"):
            return "null"
        if parsed_type:
            return stripped  # of a wrong type, which the function must refuse
        if literal := _from_python(stripped):
            return literal
    return quoted(text)


def words_of(schema: object, name: str | None) -> dict[str, bool | None]:
    """Return the words of Python that are read as values of a parameter, with these values.

    `name` is None for all parameters that the schema does not name. A schema in several parts has
    no words for them, since another part may name them.
    """
    if name is None and len(_applied(schema)) > 1:
        return {}
    types = types_of(schema, name)
    words: dict[str, bool | None] = {str(value): value for value in (True, False, None)}
    return {word: value for word, value in words.items() if as_json(word, types) != quoted(word)}


def _parsed_type(text: str) -> str:
    """Return the type of a text that is JSON, "" if it is not."""
    try:
        return json_type(json.loads(text, parse_constant=_refused))
    except (ValueError, RecursionError):
        return ""


def _corrected(text: str) -> str:
    """Return an object or array as the JSON reader corrects it; other text unchanged."""
    if not text.startswith(("{", "[")):
        return text
    source = Source()
    source.feed(text)
    source.is_over = True
    parts: list[str] = []
    reader = value(source, parts.append)
    try:
        next(reader)
    except StopIteration as end:
        if end.value and not text[source.at :].strip(BLANKS):
            return "".join(parts)
    return text


def _from_python(text: str) -> str:
    """Return the JSON of an object or array in Python's notation, "" for any other text."""
    if not text.startswith(("{", "[")):
        return ""
    try:
        found = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        # Join halves of surrogate pairs; replace others, which no client could decode.
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""


def _applied(root: object) -> list[Mapping[str, Any]]:
    """Return a schema and the schemas that it combines, each once.

    They are not visited by recursion, since a client may chain any number of references.
    """
    parts: dict[int, Mapping[str, Any]] = {}
    left = [root]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping) or id(schema) in parts:
            continue
        parts[id(schema)] = schema
        combined: list[object] = []
        if isinstance(reference := schema.get("$ref"), str):
            combined.append(pointed(reference, root))
        for union in ("allOf", "anyOf", "oneOf"):
            branches = schema.get(union)
            combined += branches if isinstance(branches, list) else ()
        left += reversed(combined)  # so that the first is next
    return [*parts.values()]


def _unnamed(schema: Mapping[str, Any]) -> Iterator[object]:
    """Yield the schemas of parameters that `properties` does not name, if they are not empty."""
    schemas = [*_mapping(schema.get("patternProperties")).values()]
    yield from filter(_mapping, [*schemas, schema.get("additionalProperties")])


def _types(schema: object, root: object, depth: int) -> Types:
    """Return the types that a schema allows, an empty set if it does not restrict them.

    `nullable` is the keyword of OpenAPI 3.0 for "or null".
    """
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    types = _types_of_keywords(schema, root, depth)
    return types | {"null"} if types and schema.get("nullable") is True else types


def _types_of_keywords(schema: Mapping[str, Any], root: object, depth: int) -> Types:
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        types = frozenset(map(str, names))
        return types | {"integer"} if "number" in types else types
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(json_type, values))
    if isinstance(reference := schema.get("$ref"), str):
        return _types(pointed(reference, root), root, depth - 1)
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(union), list) and branches:
            allowed = [_types(branch, root, depth - 1) for branch in branches]
            if union == "allOf":
                return next((types for types in allowed if types), frozenset())
            return frozenset().union(*allowed) if all(allowed) else frozenset()
    for keyword, implied in (("properties", "object"), ("items", "array")):
        if keyword in schema:
            return frozenset({implied})
    return frozenset()


def pointed(reference: str, root: object) -> Any:  # noqa: ANN401 - any JSON
    """Return the target of a schema's reference, None if there is none."""
    at = root
    for step in reference.removeprefix("#").split("/")[1:]:
        at = _mapping(at).get(step.replace("~1", "/").replace("~0", "~"))
    return at


def json_type(value: object) -> str:
    """Return the narrowest type. An integer may have a fraction of 0."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value % 1 == 0 else "number"
    names = {str: "string", dict: "object", list: "array", type(None): "null"}
    return names[type(value)]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _refused(constant: str) -> NoReturn:
    raise ValueError(constant)
