"""Types of parameters from schemas in parts, and values that are nearly JSON."""

from __future__ import annotations

import json

import pytest

from nanovllm.server.parsers.json_types import ANY, STRING, as_json, names_of, types_of
from tests.server.parsers.test_families import call, coder, minimax, parameter, seen

INTEGER, WHOLE = {"type": "integer"}, frozenset({"integer"})
NAMED = {"properties": {"x": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"additionalProperties": INTEGER}, WHOLE),
        ({"patternProperties": {"^x": INTEGER}, "additionalProperties": False}, WHOLE),
        ({"properties": {"x": {"type": "boolean"}}, "additionalProperties": INTEGER}, {"boolean"}),
        ({"$ref": "#/$defs/N", "$defs": {"N": NAMED}}, WHOLE),
        ({"allOf": [{"type": "object"}, NAMED]}, WHOLE),
        ({"anyOf": [NAMED, {"properties": {"x": {"type": "string"}}}]}, WHOLE | STRING),
        ({"oneOf": [{"properties": {"y": {"type": "string"}}}, NAMED]}, WHOLE),
        ({"$ref": "#", **NAMED}, WHOLE),
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
        ('{"a": 1,}', {"object"}, '{"a": 1}'),
        ("[" * 150 + "]" * 150, {"array"}, "[" * 150 + "]" * 150),
        ("None", {"null"}, "null"),
        ("{'a': None, 'b': [True, 'it\\'s é']}", {"object"}, '{"a": null, "b": [true, "it\'s é"]}'),
        ("[1, 'x', (2.5,)]", {"array", "null"}, '[1, "x", [2.5]]'),
        ("{'a': 1}", {"object", "string"}, "\"{'a': 1}\""),
        ("{'a', 1}", {"object"}, "\"{'a', 1}\""),
        ("['x', 1e999]", {"array"}, "\"['x', 1e999]\""),
        (r"['\ud83d\ude00', '\ud800']", {"array"}, '["😀", "\ufffd"]'),
        ("[" * 5000, {"array"}, '"' + "[" * 5000 + '"'),
        ("{'a': open('x')}", {"object"}, "\"{'a': open('x')}\""),
        ("1.50", {"integer", "string"}, '"1.50"'),  # not an integer, so it is a string
        ("5.0", {"integer", "string"}, "5.0"),
        ("1.50", {"integer"}, "1.50"),
        ("1.50", {"integer", "number", "string"}, "1.50"),
    ],
)
def test_objects_and_arrays_are_corrected_as_in_json_calls(text, types, expected) -> None:
    assert as_json(text, frozenset(types)) == expected
    json.loads(expected)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "number"}, {"integer", "number"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": [1.5, "2"]}, {"number", "string"}),
        ({"enum": [2.0, None]}, {"integer", "null"}),
    ],
)
def test_integers_are_a_type_of_their_own(schema, types) -> None:
    assert types_of({"properties": {"x": schema}}, "x") == types


@pytest.mark.parametrize("kind", ["null", ["null"]])
def test_a_parameter_that_can_only_be_null_is_no_string(kind) -> None:
    block = coder(parameter("x", "None"))
    assert seen("qwen3_coder", block, schema={"x": {"type": kind}}) == call("f", '{"x": null}')


@pytest.mark.parametrize("family", ["qwen3_coder", "minimax_m2"])
@pytest.mark.parametrize(
    ("kind", "text", "meaning"),
    [
        ("string", "null", "null"),
        ("string", "None", '"None"'),
        ("integer", "None", "null"),
    ],
)
def test_a_nullable_parameter_is_one_that_may_be_null(family, kind, text, meaning) -> None:
    """The keyword is that of OpenAPI 3.0. Without a type it restricts nothing."""
    block = coder(parameter("x", text))
    if family == "minimax_m2":
        block = minimax(f'<parameter name="x">{text}</parameter>')
    for schema in ({"type": kind, "nullable": True}, {"type": [kind, "null"]}):
        assert seen(family, block, schema={"x": schema}) == call("f", f'{{"x": {meaning}}}')
    assert types_of({"properties": {"x": {"nullable": True}}}, "x") == ANY
    assert types_of({"properties": {"x": {"type": kind, "nullable": False}}}, "x") == {kind}


def test_a_client_may_chain_references() -> None:
    """Neither the depth of combined schemas nor their number is limited by recursion."""
    chain = {f"S{n}": {"$ref": f"#/$defs/S{n + 1}"} for n in range(3000)}
    schema = {"$ref": "#/$defs/S0", "$defs": chain | {"S3000": NAMED}}
    assert types_of(schema, "x") == WHOLE and [*names_of(schema)] == ["x"]
    assert types_of({**schema, "anyOf": [schema, {"$ref": "#"}]}, "y") == STRING
