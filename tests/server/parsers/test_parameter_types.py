"""Types of parameters from schemas in parts, and values that are nearly JSON."""

from __future__ import annotations

import json

import pytest

from nanovllm.server.parsers.json_types import ANY, STRING, as_json, names_of, types_of
from tests.server.parsers.test_families import call, coder, parameter, seen

INTEGER, NUMBER = {"type": "integer"}, frozenset({"number"})
NAMED = {"properties": {"x": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"additionalProperties": INTEGER}, NUMBER),
        ({"patternProperties": {"^x": INTEGER}, "additionalProperties": False}, NUMBER),
        ({"properties": {"x": {"type": "boolean"}}, "additionalProperties": INTEGER}, {"boolean"}),
        ({"$ref": "#/$defs/N", "$defs": {"N": NAMED}}, NUMBER),
        ({"allOf": [{"type": "object"}, NAMED]}, NUMBER),
        ({"anyOf": [NAMED, {"properties": {"x": {"type": "string"}}}]}, NUMBER | STRING),
        ({"oneOf": [{"properties": {"y": {"type": "string"}}}, NAMED]}, NUMBER),
        ({"$ref": "#", **NAMED}, NUMBER),
        ({"properties": {"x": {}}, "additionalProperties": INTEGER}, ANY),
        ({"additionalProperties": {"not": {"type": "string"}}}, ANY),
        ({"additionalProperties": {}}, STRING),
        ({"additionalProperties": True, "allOf": 1, "anyOf": [3], "properties": []}, STRING),
        (None, STRING),
    ],
)
def test_the_types_of_a_parameter_follow_every_part_of_the_schema(schema, types) -> None:
    assert types_of(schema, "x") == types
    assert list(names_of({"allOf": [NAMED], "properties": {"y": {}}})) == ["y", "x"]


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ('{"a": "1\n2\t\x01"}', {"object"}, '{"a": "1\\n2\\t\\u0001"}'),
        (r'{"re": "\d+"}', {"object"}, r'{"re": "\\d+"}'),
        (r' ["\ud800", 1.50] ', {"array", "null"}, r'["\ufffd", 1.50]'),
        (r'["\ud800"]', {"array", "string"}, r'["\ufffd"]'),
        ("[1\n,2]", {"array"}, "[1\n,2]"),
        ('["a\nb"]', {"array", "string"}, r'"[\"a\nb\"]"'),  # in a union only exact JSON
        ('{"a": 1} {}', {"object"}, r'"{\"a\": 1} {}"'),
        ('{"a": 1,}', {"object"}, r'"{\"a\": 1,}"'),
        ("[" * 150 + "]" * 150, {"array"}, "[" * 150 + "]" * 150),
        ("None", {"null"}, "null"),
    ],
)
def test_objects_and_arrays_are_corrected_as_in_json_calls(text, types, expected) -> None:
    assert as_json(text, frozenset(types)) == expected
    json.loads(expected)


@pytest.mark.parametrize("kind", ["null", ["null"]])
def test_a_parameter_that_can_only_be_null_is_no_string(kind) -> None:
    block = coder(parameter("x", "None"))
    assert seen("qwen3_coder", block, schema={"x": {"type": kind}}) == call("f", '{"x": null}')


def test_a_client_may_chain_references() -> None:
    """Neither the depth of combined schemas nor their number is limited by recursion."""
    chain = {f"S{n}": {"$ref": f"#/$defs/S{n + 1}"} for n in range(3000)}
    schema = {"$ref": "#/$defs/S0", "$defs": chain | {"S3000": NAMED}}
    assert types_of(schema, "x") == NUMBER and [*names_of(schema)] == ["x"]
    assert types_of({**schema, "anyOf": [schema, {"$ref": "#"}]}, "y") == STRING
