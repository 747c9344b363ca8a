"""Schemas as grammars: accepted instances, refusals, and random outputs checked by `jsonschema`."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache

import jsonschema
import numpy as np
import pytest
import xgrammar

from nanovllm.grammars.automata import PatternError
from nanovllm.grammars.document import SchemaError
from nanovllm.grammars.formats import FORMATS
from nanovllm.grammars.regexes import vet
from nanovllm.grammars.schema import compiled
from tests.load.schemas import compiler, matches, tag
from tests.times import done_within

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": INTEGER}}
ITEM = {"type": "array", "items": INTEGER}


def deep(levels):
    schema = INTEGER
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def within(**keywords):
    return {"type": "object", "properties": {"x": keywords}}


def named(*names, **more):
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), **more}


# -- keywords --------------------------------------------------------------------------------------

FREE = {"a": {"b": [1, "x", None, {}]}, "": 1}
CASES = [
    # (schema, valid instances in the grammar's order, invalid ones)
    (True, [1, "a", [FREE], None], []),
    ({"type": "object"}, [{}, FREE], [[], 1]),
    ({"$ref": "#/$defs/o", "$defs": {"o": {"type": "object"}}}, [{}, FREE], [1]),
    ({"type": "object", "$defs": {"unused": STRING}}, [{}, FREE], [1]),
    ({"type": ["integer", "null"], "minimum": 3}, [3, None], [2, 3.5, "x"]),
    ({"minimum": 3}, [3, 4.5, "x", None, [2]], [2]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25}, [-1.5, 0, 2.2499],
     [2.25, -1.51]),
    ({"type": "number", "minimum": 1e-9}, [1, 0.5], [0, -1]),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2**63}, [1, 2**63], [0, -1, 2**63 + 1]),
    ({"type": "integer", "maximum": 5, "exclusiveMaximum": True}, [4], [6]),  # a draft 4 boolean
    ({"type": "number", "minimum": 0, "multipleOf": 0.5}, [0, 1.5], [0.25, -0.5]),
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, [14, 70], [7, 15]),
    ({"type": "integer", "multipleOf": 3, "maximum": 10}, [9, -3], [10, 12]),
    ({"type": "string", "minLength": 2}, ["ab", 'a"', "é\n", "日本"], ["a", ""]),
    ({"type": "string", "maxLength": 3}, ["", "abc", '"\\\n'], ["abcd"]),
    ({"type": "string", "minLength": 1, "maxLength": 300}, ["a" * 300], ["", "a" * 301]),
    ({"type": "string", "pattern": "b"}, ["abc", "b"], ["ac"]),
    ({"type": "string", "pattern": '^["\\\\\n]+$'}, ['"', "\\", "\n"], ["n"]),
    ({"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 4}, ["aa", "aaaa"],
     ["a", "aaaaa"]),
    ({"type": "string", "pattern": "^[a-z]{2,200}$"}, ["ab", "z" * 200], ["a", "z" * 201]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 100}, ["z" * 100], ["z" * 101, "A"]),
    ({"type": "string", "pattern": "^\\d+-", "format": "date"}, ["2024-02-29"],
     ["2023-02-29", "x"]),
    ({"type": "string", "format": "email", "maxLength": 12}, ["a@b.de"], ["a", "any@example.com"]),
    ({"type": "string", "pattern": "^$|^([a-z]{1,90}/){0,9}x$", "minLength": 0},
     ["", "x", "ab/c/x"], ["a", "a" * 91 + "/x"]),
    ({"type": "string", "pattern": "^[a-z]+:([a-z0-9]+)?:[a-z]+$", "maxLength": 60},
     ["a::b", "abcdefghijklmno:xyz:abcdefghijklm"], ["a:b", "a" * 59 + "::b"]),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, ["ab", "bxa"], ["a", "b"]),
    ({"type": "string", "format": "x-mine"}, ["anything"], [1]),
    ({"enum": ["a", 'b"\\c', None, 1.5, 2, True, {"x": [1]}, ["z"]]},
     ["a", 'b"\\c', None, 1.5, 2, True, {"x": [1]}, ["z"]], ["b", False, 1, {"x": [2]}, {}, ["a"]]),
    ({"enum": [1, 5, "x"], "maximum": 3}, [1, "x"], [5, 2]),
    ({"enum": ["a", "bb", "ccc"], "type": "string", "maxLength": 2}, ["a", "bb"], ["ccc"]),
    ({"const": {"a": {"b": []}}}, [{"a": {"b": []}}], [{"a": {}}, {"a": {"b": [1]}}]),
    # objects
    (named("a", "b", required=["b"], additionalProperties=False),
     [{"a": 1, "b": 2}, {"b": 2}], [{"a": 1}, {"b": "x"}, {"b": 1, "c": 1}]),
    (named("a", "ab", additionalProperties=STRING),
     [{}, {"a": 1, "ab": 2, "b": "x", "abc": "y", "": "z"}, {"aa": "x"}], [{"b": 1}, {"ab": "x"}]),
    (named("a", required=["z"]), [{"a": 1, "z": "any"}], [{"a": 1}]),
    ({"patternProperties": {"^x": STRING, "y$": {"minLength": 2}}, "additionalProperties": False},
     [{"x": "q", "by": "qq", "xy": "qq"}, {}, 3], [{"x": 1}, {"xy": "q"}, {"z": 1}]),
    (named("xa", patternProperties={"^x": {"minimum": 3}}), [{"xa": 3, "xb": 4}],
     [{"xa": 2}, {"xb": 1}]),
    ({"patternProperties": {"^(k1|k2)$": INTEGER}, "additionalProperties": STRING},
     [{"k1": 1, "k2": 2, "k3": "x"}], [{"k1": "x"}, {"k3": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^[ab]+$"}}, [{"a": 1, "ba": "x"}],
     [{"c": 1}]),
    (named(*"abcd", minProperties=2, maxProperties=3), [{"a": 1, "d": 1}],
     [{"a": 1}, dict.fromkeys("abcd", 1)]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}],
     [{}, dict.fromkeys("abc", 1)]),
    (named("a", "b", dependentRequired={"a": ["b"]}), [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    (named("a", "b", dependencies={"a": {"required": ["b"]}}), [{"b": 1}, {"a": 1, "b": 2}],
     [{"a": 1}]),
    (named("a", "b", dependentSchemas={"a": {"properties": {"b": {"minimum": 5}}}}),
     [{"b": 1}, {"a": 1, "b": 5}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"allOf": [named("a"), named("b")], "unevaluatedProperties": False}, [{"a": 1, "b": 2}],
     [{"c": 1}]),
    (named("a", unevaluatedProperties=STRING), [{"a": 1, "b": "x"}], [{"b": 1}]),
    # arrays
    ({**ITEM, "minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3]], [[1], [1, 2, 3, 4], ["a", "b"]]),
    ({**ITEM, "maxItems": 500}, [[], [1] * 500], [[1] * 501]),
    ({"prefixItems": [INTEGER, STRING], "items": {"type": "null"}}, [[1, "a", None], [1], []],
     [["a"], [1, "a", 2]]),
    ({"type": "array", "contains": {"const": 1}, "items": INTEGER}, [[1], [2, 1, 3]], [[], [2],
     [1, "x"]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    # several schemas of one value
    ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}, [5, 1], [3, "x"]),
    ({"properties": {"k": STRING, "a": INTEGER}, "type": "object",
      "anyOf": [{"required": ["a"]}, {"properties": {"k": {"const": "x"}}, "required": ["k"]}]},
     [{"a": 1}, {"k": "x"}, {"k": "y", "a": 1}], [{}, {"k": "y"}]),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], **named("a", "b")},
     [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"oneOf": [{"multipleOf": 2}, {"minimum": 5}], "type": "integer", "not": {"const": 4}}, [2],
     [6, 4, 1]),
    ({"oneOf": [STRING, {"type": ["string", "null"]}]}, [None], ["x"]),
    ({"oneOf": [{"const": 1}, {"type": "integer"}]}, [2], [1, "x"]),
    ({"allOf": [{"minimum": 1}, {"maximum": 3}], "type": "integer"}, [1, 3], [0, 4]),
    ({"$ref": "#/$defs/s", "maxLength": 2, "$defs": {"s": {**STRING, "minLength": 1}}},
     ["a", "ab"], ["", "abc"]),
    ({"not": STRING}, [1, None, [], {}], ["x"]),
    ({"type": "string", "not": {"pattern": "^a"}}, ["ba", ""], ["ab"]),
    ({"type": "object", "not": {"required": ["a"]}}, [{"b": 1}], [{"a": 1}]),
    ({"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["a"]},
      "else": {"required": ["b"]}, **named("k", "a", "b")}, [{"k": 1, "a": 1}, {"k": 2, "b": 1}],
       [{"k": 1, "b": 1}, {}]),
    # references
    ({"properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}}}, [{"a": 1, "b": 2}],
     [{"b": "x"}]),
    ({"$defs": {"x/~y z": INTEGER}, "$ref": "#/$defs/x~1~0y%20z"}, [1], ["x"]),
    ({"$defs": {"x": {"$anchor": "here", **INTEGER}}, "items": {"$ref": "#here"}}, [[1]], [["x"]]),
    ({"$id": "https://example.com/a", "$defs": {"x": {"$id": "b", **INTEGER}},
     "items": {"$ref": "b"}}, [[1]], [["x"]]),
    ({"$defs": {"n": named("v", required=["v"], additionalProperties={"$ref": "#/$defs/n"})},
     "$ref": "#/$defs/n"},
     [{"v": 1}, {"v": 1, "n": {"v": 2, "m": {"v": 3}}}], [{"n": {"v": 1}}, {"v": 1, "n": {}}]),
]  # fmt: skip


@cache
def bytes_compiler() -> xgrammar.GrammarCompiler:
    return compiler()


def grammar_of(schema, *, exact=True) -> xgrammar.CompiledGrammar:
    return bytes_compiler().compile_structural_tag(tag(compiled(schema, "x", exact=exact)))


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda v: json.dumps(v)[:70])
def test_keywords_both_ways(schema, valid, invalid) -> None:
    draft = (
        jsonschema.Draft7Validator
        if "dependencies" in str(schema)
        else jsonschema.Draft202012Validator
    )
    if isinstance(schema, dict) and schema.get("exclusiveMaximum") is True:
        draft = jsonschema.Draft4Validator
    check = draft(schema, format_checker=draft.FORMAT_CHECKER)
    for exact in (True, False):
        grammar = grammar_of(schema, exact=exact)
        assert [v for v in valid if not (check.is_valid(v) and matches(grammar, v))] == []
        if exact:
            assert [v for v in invalid if check.is_valid(v) or matches(grammar, v)] == []


def test_objects_that_say_nothing_of_other_properties_have_none() -> None:
    for schema in (
        named("a"),
        {"allOf": [named("a"), named("b")]},
        {"$ref": "#/$defs/x", "$defs": {"x": named("a")}},
    ):
        grammar = grammar_of(schema)
        assert matches(grammar, {"a": 1}) and not matches(grammar, {"c": 1})
    assert matches(grammar_of({"required": ["a"]}), {"a": 1, "c": 1})
    assert not matches(grammar_of({"prefixItems": [INTEGER]}), [1, 2])


def test_many_optional_properties_are_quick() -> None:
    names = [f"property_{i}" for i in range(1000)]
    schema = {"type": "object", "properties": dict.fromkeys(names, INTEGER)}
    text = done_within(1, lambda: compiled(schema, "x", exact=True))  # 0.2 s
    assert len(text) < 400_000
    grammar = bytes_compiler().compile_structural_tag(tag(text))
    assert matches(grammar, dict.fromkeys(names[::7], 1))
    assert not matches(grammar, {names[5]: 1, names[3]: 1})


# -- refusals --------------------------------------------------------------------------------------

AT = "#/properties/x"
INEXACT = [
    (within(type="array", uniqueItems=True), "'uniqueItems'", AT),
    (within(type="array", contains={}, minContains=2), "'minContains' or 'maxContains'", AT),
    (within(type="array", contains={}, minItems=5), "'contains' beside", AT),
    (within(type="array", unevaluatedItems=False), "'unevaluatedItems'", AT),
    (within(**{"$dynamicRef": "#x"}), "'$dynamicRef'", AT),
    (within(**{"$ref": "https://example.com/x"}), "'$ref' to what is not in it", AT),
    (within(**{"$ref": "#/properties/nope"}), "'$ref' to what is not in it", AT),
    (within(**{"not": {"format": "date"}}), "'not' with 'format'", AT),
    (within(**{"if": {"format": "date"}, "then": False}), "'if' with 'format'", AT),
    (within(oneOf=[{"format": "date"}, {"format": "uuid"}, {}]), "'oneOf'", f"{AT}/oneOf"),
    (within(type="object", minProperties=2), "'minProperties' beside", AT),
    (within(type="string", pattern="a(?=a)b"), "'pattern' with look-around", AT),
    (within(type="string", pattern=r"(a)\1"), "'pattern' with reference", AT),
    (within(type="string", pattern=r"\bfoo"), "'pattern' with at", AT),
    (within(type="string", pattern=r"\p{L}"), "'pattern' with a form that is not known", AT),
    (within(type="string", pattern="(?i)a"), "'pattern' with flags", AT),
    (within(type="string", pattern="(a{300}b){300}"), "a string with repetitions", AT),
    (within(type="string", pattern="a" * 5000), "more than 4096 characters", AT),
    (within(type="string", minLength=5000), "a length of at least 5000", AT),
    (within(type="integer", multipleOf=100_003), "multiples above 2000", AT),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "what", "place"), INEXACT)
def test_what_cannot_be_enforced_is_refused_unless_best_effort(schema, what, place) -> None:
    with pytest.raises(SchemaError) as refused:
        compiled(schema, "the_field", exact=True)
    message = str(refused.value)
    assert message.startswith("the_field: ") and what in message, message
    assert message.endswith(f", at {place}"), message
    assert refused.value.field == "the_field"
    assert matches(grammar_of(schema, exact=False), {})


def test_best_effort_leaves_out_no_more_than_it_must() -> None:
    loose = grammar_of(within(type="array", uniqueItems=True, items=INTEGER), exact=False)
    assert matches(loose, {"x": [1, 1]}) and not matches(loose, {"x": ["a"]})
    loose = grammar_of({"patternProperties": {"(?=a)": STRING, "^b": INTEGER},
     "additionalProperties": False}, exact=False)  # fmt: skip
    assert matches(loose, {"b": 1}) and not matches(loose, {"b": "x"})
    both = {"oneOf": [named("a", additionalProperties={"not": {"format": "date"}}), STRING, {}]}
    assert matches(grammar_of(both, exact=False), "x")
    some = {"type": "array", "contains": {"const": 1}, "minContains": 1, "maxContains": 2}
    assert matches(grammar_of(some, exact=False), [2, 1])
    assert not matches(grammar_of(some, exact=False), [2])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (within(type="str"), f"has a 'type' that is not of .*, at {AT}"),
        (within(type=[]), f"has a 'type' that is not of .*, at {AT}"),
        (within(format=["date"]), f"has a 'format' that is not a string, at {AT}"),
        (within(format={}), f"has a 'format' that is not a string, at {AT}"),
        (within(enum=[]), f"not a list of 1 to 20000 values, at {AT}"),
        (within(enum=list(range(20001))), f"not a list of 1 to 20000 values, at {AT}"),
        (within(type="string", maxLength=-1), "has no integer from 0 as 'maxLength'"),
        (within(type="array", minItems=2**21), "has 'minItems' above 1048576"),
        (within(type="array", items=5), f"is not an object, at {AT}/items"),
        (within(type="string", pattern=5), "has a 'pattern' that is not a string"),
        (within(type="integer", minimum="5"), "has no number as 'minimum'"),
        (within(type="integer", multipleOf=0), "has no number above 0 as 'multipleOf'"),
        (within(anyOf=[]), f"must be a list of at least one schema, at {AT}/anyOf"),
        ({"type": "object", "properties": []}, "has 'properties' that are not an object"),
        ({**OBJECT, "required": ["b"], "additionalProperties": False}, "allows nothing, at #"),
        ({"type": "string", "enum": [1]}, "allows nothing, at #"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "allows nothing, at #"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "allows nothing, at #"),
        ({"$defs": {"n": named(required=["n"], properties={"n": {"$ref": "#/$defs/n"}})},
          "$ref": "#/$defs/n"}, "allows nothing, at #"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
         "has a '\\$ref' that leads to itself"),
        ({"$ref": "#"}, "has a '\\$ref' that leads to itself"),
        ({"anyOf": [{"properties": {f"p{i}": INTEGER}} for i in range(20_001)]},
         "more than 20000 parts"),
        ({"description": "x" * (1 << 20)}, "has more than 1048576 bytes"),
        (None, "is not an object, at #"),
        ([], "is not an object, at #"),
        (False, "allows nothing, at #"),
    ],
    ids=range(26),
)  # fmt: skip
def test_a_malformed_schema_is_always_refused(schema, message) -> None:
    for exact in (True, False):
        with pytest.raises(SchemaError, match=f"the_field: the schema .*{message}"):
            compiled(schema, "the_field", exact=exact)


HOSTILE = [
    {"allOf": [{"anyOf": [named(f"p{i}_{j}",
     required=[f"p{i}_{j}"]) for j in range(9)]} for i in range(9)]},
    {"oneOf": [named(*(f"p{i + j}" for j in range(9)), required=[f"p{i}"]) for i in range(150)]},
    {"properties": {f"p{i}": {"pattern": f"^.*(a|b).{{{i + 9}}}$"} for i in range(300)}},
    {"properties": {f"p{i}": {"multipleOf": 1.001 + i, "maximum": 10**300} for i in range(300)}},
    {"patternProperties": {f"[{chr(97 + i)}-z]{{2}}": {"const": i} for i in range(26)}},
    named(*(f"p{i}" for i in range(3000)), minProperties=500, maxProperties=2000),
    named(*("ab" * i for i in range(900)), additionalProperties=STRING),
    deep(5000),
    {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(90)},
     "$ref": "#/$defs/d0"},
]  # fmt: skip


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
def test_no_schema_takes_long(schema) -> None:
    def compile_twice() -> None:
        for exact in (True, False):
            try:
                assert len(compiled(schema, "x", exact=exact)) <= 1 << 20
            except SchemaError as error:
                assert error.field == "x"
            except RecursionError:  # raised by json.dumps, before the schema is read
                assert schema["type"] == "array"

    done_within(12, compile_twice)  # 5 s at most


# -- random outputs --------------------------------------------------------------------------------

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
LETTERS = [chr(i) for i in range(32, 127)] + ["\n", "é", "日"]


def over_letters(schema) -> xgrammar.CompiledGrammar:
    """Return the grammar compiled over a vocabulary of single characters."""
    words = [c.encode() for c in LETTERS] + [b""]
    info = xgrammar.TokenizerInfo(words, stop_token_ids=[len(LETTERS)])
    text = compiled(schema, "x", exact=True, max_space=2)
    made = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return made.compile_structural_tag(tag(text))


def written(grammar, rng, most=400) -> str | None:
    """Return a random text, or None if it gets too long. Closing characters are likelier."""
    matcher, text = xgrammar.GrammarMatcher(grammar), ""
    mask = xgrammar.allocate_token_bitmask(1, len(LETTERS) + 1)
    for _ in range(most):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(LETTERS) + 1]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, f"a dead end after {text!r}"
        likely = [i for i in allowed if i == len(LETTERS) or LETTERS[i] in '"]},']
        token = rng.choice(likely if likely and rng.random() < 0.3 else allowed)
        assert matcher.accept_token(token)
        if token == len(LETTERS):
            return text
        text += LETTERS[token]
    return None


WRITTEN = [
    *({"type": "string", "format": name} for name in FORMATS),
    *(schema for schema, _, _ in CASES if "dependencies" not in json.dumps(schema)
      and '"exclusiveMaximum": true' not in json.dumps(schema)),
]  # fmt: skip


@pytest.mark.parametrize("schema", WRITTEN, ids=lambda s: json.dumps(s)[:60])
def test_what_is_written_is_valid(schema) -> None:
    grammar, rng = over_letters(schema), random.Random(1)
    check = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    texts = [text for _ in range(30) if (text := written(grammar, rng)) is not None]
    assert texts
    for text in texts:
        check.validate(json.loads(text))


# -- patterns --------------------------------------------------------------------------------------

SMALL = "abcxy1."
TEXTS = ["".join(letters) for n in range(5) for letters in itertools.product(SMALL, repeat=n)]


def differences(pattern, texts) -> list[tuple[str, str]]:
    """Return the texts on which the JSON string's grammar and Python's search disagree."""
    grammar = grammar_of({"type": "string", "pattern": pattern})
    searched = re.compile(pattern)
    return [(pattern, t) for t in texts if matches(grammar, t) != bool(searched.search(t))]


@pytest.mark.parametrize(
    "pattern",
    [
        *("a.c", "[^x]y", r"^\d{3}$", "x|yz", "(ab)+", r"\w+\s\w", "^x", "^a|b$", "(^a|x$)y?"),
        *("^(ab*)?c$", r"^(?:a\.{1,3})?b$", "^(a|a{1,2})$", "^(b|ab+){0,2}$", "^(a{0,2}b*)*c$"),
    ],
)
def test_whole_texts_are_those_in_which_a_pattern_is_found(pattern) -> None:
    assert differences(pattern, random.Random(2).sample(TEXTS, 300)) == []


def test_outside_json_expressions_are_checked_for_what_is_ignored() -> None:
    vet('^"\\n\\\\"')
    for pattern in ("(?=a)b", "a$b", "a{129}", "(a{100}b){100}", r"(a)\1"):
        with pytest.raises(PatternError):
            vet(pattern)
