"""What a parameter's raw text means, by its JSON Schema. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

Types = frozenset[str]
ANY = frozenset({"string", "null", "boolean", "number", "object", "array"})
STRING = frozenset({"string"})
quoted = json.JSONEncoder(ensure_ascii=False).encode  # a string, without a new encoder each time
MAX_DEPTH = 20  # of references and unions


def types_of(schema: object, name: str) -> Types:
    """The types of one parameter of a function with this schema. What no schema knows is a
    string."""
    properties = _mapping(schema).get("properties")
    if name not in _mapping(properties):
        return STRING
    return _types(_mapping(properties)[name], schema, MAX_DEPTH) or ANY


def names_of(schema: object) -> Iterable[str]:
    """The parameters of a function with this schema."""
    return _mapping(_mapping(schema).get("properties"))


def as_json(text: str, types: Types) -> str:
    """JSON for the text: a value of an allowed type, else a string if that is allowed.

    In a union the types that are no string come first, and only exact JSON counts: "none" is
    a string. Where no string is allowed, Python's words are understood too.
    """
    stripped = text.strip()
    try:
        found = json_type(json.loads(stripped, parse_constant=_refused))
    except (ValueError, RecursionError):
        found = ""
    if found and found != "string" and found in types:
        return stripped
    if "string" not in types:
        word = stripped.lower()
        if "boolean" in types and word in ("true", "false"):
            return word
        if "null" in types and word in ("null", "none"):
            return "null"
        if found:
            return stripped  # of a wrong type: for the function to refuse
    return quoted(text)


def _types(schema: object, root: object, depth: int) -> Types:
    """Empty: nothing is said."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        return frozenset("number" if name == "integer" else str(name) for name in names)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(json_type(value) for value in values)
    if isinstance(reference := schema.get("$ref"), str):
        return _types(pointed(reference, root), root, depth - 1)
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(union), list) and branches:
            found = [_types(branch, root, depth - 1) for branch in branches]
            if union == "allOf":
                return next((types for types in found if types), frozenset())
            return frozenset().union(*found) if all(found) else frozenset()
    for keyword, implied in (("properties", "object"), ("items", "array")):
        if keyword in schema:
            return frozenset({implied})
    return frozenset()


def pointed(reference: str, root: object) -> Any:  # noqa: ANN401 - any JSON
    """What a reference of a schema names; None if there is nothing."""
    at = root
    for step in reference.removeprefix("#").split("/")[1:]:
        at = _mapping(at).get(step.replace("~1", "/").replace("~0", "~"))
    return at


def json_type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names = {str: "string", dict: "object", list: "array", type(None): "null"}
    return names[type(value)]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _refused(constant: str) -> NoReturn:
    raise ValueError(constant)
