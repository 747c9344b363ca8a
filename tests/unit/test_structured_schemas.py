"""Vetting: what a schema or an expression becomes, and how each thing that cannot be enforced is
refused. What becomes of it is compiled, written at random, and judged by `jsonschema`."""

from __future__ import annotations

import itertools
import json
import random
import re

import jsonschema
import numpy as np
import pytest
import xgrammar

from nanovllm.server.errors import ApiError
from nanovllm.server.structured.patterns import FORMATS, PatternError, vet, whole
from nanovllm.server.structured.schemas import vetted

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRING = {"type": "string"}


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def within(**keywords):
    return {"type": "object", "properties": {"x": keywords}}


AT = "#/properties/x"
INEXACT = [
    (within(**{"not": {"type": "null"}}), "'not'", AT),
    (within(**{"if": {}, "then": {}}), "'if'", AT),
    (within(type="array", uniqueItems=True), "'uniqueItems'", AT),
    (within(type="array", contains={}), "'contains'", AT),
    (within(type="object", patternProperties={"a": {}}), "'patternProperties'", AT),
    (within(type="object", propertyNames={"pattern": "a"}), "'propertyNames'", AT),
    (within(type="object", dependentRequired={"a": ["b"]}), "'dependentRequired'", AT),
    (within(type="object", unevaluatedProperties={}), "'unevaluatedProperties'", AT),
    (within(**{"$dynamicRef": "#x"}), "'$dynamicRef'", AT),
    (within(**{"$ref": "https://example.com/x"}), "'$ref'", AT),
    (within(**{"$ref": "#/properties/x"}), "'$ref'", AT),
    (within(**{"$ref": "#", "minProperties": 1}), "'minProperties' beside '$ref'", AT),
    (within(allOf=[OBJECT, OBJECT]), "'allOf'", f"{AT}/allOf"),
    (within(anyOf=[OBJECT], type="object"), "'type' beside 'anyOf'", AT),
    (within(oneOf=[STRING, {"type": ["string", "null"]}]), "'oneOf'", f"{AT}/oneOf"),
    (within(oneOf=[OBJECT, OBJECT]), "'oneOf'", f"{AT}/oneOf"),
    (within(oneOf=[{"const": 1}, {"type": "number"}]), "'oneOf'", f"{AT}/oneOf"),
    (within(enum=[1, 5], maximum=3), "'maximum' beside 'enum'", AT),
    (within(type="string", format="iri"), "'format'", AT),
    (within(type="string", format="date", maxLength=3), "'pattern', 'format' and a length", AT),
    (within(type="string", pattern="a", minLength=3), "'pattern', 'format' and a length", AT),
    (within(type="string", pattern="(?=a)b"), "'pattern' with look-around", AT),
    (within(type="string", pattern="(?!a)b"), "'pattern' with look-around", AT),
    (within(type="string", pattern=r"(a)\1"), "'pattern' with reference", AT),
    (within(type="string", pattern=r"\bfoo"), "'pattern' with at", AT),
    (within(type="string", pattern=r"a$b"), "'pattern' with at", AT),
    (within(type="string", pattern=r"^a|b$"), "'pattern' with at", AT),
    (within(type="string", pattern=r"\p{L}"), "'pattern' with a form that is not known", AT),
    (within(type="string", pattern="(?i)a"), "'pattern' with flags", AT),
    (within(type="string", pattern='"'), "a quote, a backslash or a control", AT),
    (within(type="string", pattern=r"a\\b"), "a quote, a backslash or a control", AT),
    (within(type="string", pattern=r"[\n]"), "a quote, a backslash or a control", AT),
    (within(type="string", pattern="a{129}"), "a repetition of more than 128 times", AT),
    (within(type="string", pattern="(a{100}b){100}"), "more than 1000 characters", AT),
    (within(type="string", pattern="a" * 3000), "more than 2048 characters", AT),
    (within(type="number", multipleOf=0.01), "'multipleOf'", AT),
    (within(type="number", minimum=1e-9), "'minimum'", AT),
    (within(type="integer", maximum=2**64), "'maximum'", AT),
    ({**OBJECT, "additionalProperties": True}, "'additionalProperties' beside 'properties'", "#"),
    ({"type": "object", "minProperties": 2}, "'minProperties' beside 'additionalProp", "#"),
]


@pytest.mark.parametrize(("schema", "what", "place"), INEXACT)
def test_what_cannot_be_enforced_is_refused_unless_best_effort(schema, what, place) -> None:
    with pytest.raises(ApiError) as refused:
        vetted(schema, "the_field", exact=True)
    message = refused.value.message
    assert message.startswith("the_field: ") and what in message, message
    assert message.endswith(f", at {place}"), message
    assert refused.value.param == "the_field" and refused.value.status == 400
    compiled(vetted(schema, "the_field", exact=False))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (within(type="str"), f"has a 'type' that is not of .*, at {AT}"),
        (within(type=[]), f"has a 'type' that is not of .*, at {AT}"),
        (within(enum=[]), f"no list of 1 to 2000 values, at {AT}"),
        (within(enum=list(range(2001))), f"no list of 1 to 2000 values, at {AT}"),
        (within(type="string", enum=[1]), f"no value in 'enum' that is of its 'type', at {AT}"),
        (within(type="string", minLength=3, maxLength=2), "has 'minLength' above 'maxLength'"),
        (within(type="string", maxLength=-1), "has no integer from 0 to 65536 as 'maxLength'"),
        (within(type="array", maxItems=10**6), "has no integer from 0 to 65536 as 'maxItems'"),
        (within(type="array", items=5), f"is no object, at {AT}/items"),
        (within(type="string", pattern=5), "has a 'pattern' that is no string"),
        (within(type="integer", minimum="5"), "has no number as 'minimum'"),
        (within(anyOf=[]), "must be a list of at least one schema"),
        (within(anyOf=[STRING, False]), f"allows nothing, at {AT}/anyOf/1"),
        ({"type": "object", "properties": []}, "has 'properties' that are no object"),
        ({**OBJECT, "required": "a"}, "has no list of names as 'required'"),
        ({**OBJECT, "required": ["b"], "additionalProperties": False}, "requires 'b', which its"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
         "has a '\\$ref' that leads to itself"),
        ({"$ref": "#"}, "has a '\\$ref' that leads to itself"),
        (deep(25), "is nested more than 20 deep"),
        ({"type": "array", "prefixItems": [STRING] * 1001}, "has more than 1000 parts"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(65)}},
         "more than 64 properties that are not 'required'"),
        ({"description": "x" * 70_000}, "has more than 65536 bytes"),
        (None, "is no object, at #"),
        ([], "is no object, at #"),
        (False, "allows nothing, at #"),
    ],
)  # fmt: skip
def test_a_malformed_schema_is_always_refused(schema, message) -> None:
    for exact in (True, False):
        with pytest.raises(ApiError, match=f"the_field: the schema .*{message}"):
            vetted(schema, "the_field", exact=exact)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, {}),
        ({"title": "x", "x-mine": 3, "maxlength": 5}, {}),
        ({"type": "string", "enum": ["a", 1]}, {"enum": ["a"]}),
        ({"const": None}, {"enum": [None]}),
        ({"minimum": 3}, {"type": "number", "minimum": 3}),
        ({"type": "integer", "exclusiveMinimum": 0.5, "maximum": 9.5},
         {"type": "integer", "minimum": 1, "maximum": 9}),
        ({"type": "number", "multipleOf": 5}, {"type": "integer", "multipleOf": 5}),
        ({"type": "string", "minLength": 2, "maxLength": 9},
         {"type": "string", "pattern": ".{2,9}"}),
        ({"type": "string", "minLength": 1}, {"type": "string", "pattern": ".{1,}"}),
        ({"type": "string", "maxLength": 500}, {"type": "string", "maxLength": 500}),
        ({"allOf": [{"type": "null"}]}, {"type": "null"}),
        ({"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "array"}, {"type": "array", "minItems": 0, "items": {}}),
        ({"type": "array", "items": [STRING]},
         {"type": "array", "minItems": 0, "prefixItems": [STRING], "items": False}),
        (OBJECT, {**OBJECT, "required": [], "additionalProperties": False, "minProperties": 0}),
    ],
)  # fmt: skip
def test_rewritings(schema, expected) -> None:
    assert vetted(schema, "x", exact=True) == expected


def test_one_of_is_exact_where_branches_are_plainly_apart() -> None:
    def tagged(value, **more):
        properties = {"kind": {"const": value}, **more}
        return {"type": "object", "properties": properties, "required": ["kind"]}

    for branches in (
        [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
        [{"const": 1}, {"const": 2}, {"type": "string"}],
        [tagged("cat", lives={"type": "integer"}), tagged("dog", name={"type": "string"})],
    ):
        made = vetted({"oneOf": branches}, "x", exact=True)
        assert len(made["anyOf"]) == len(branches)
    leaf, node = tagged("leaf"), tagged("node", left={"oneOf": []}, right={"type": "null"})
    node["properties"]["left"]["oneOf"] = [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}]
    tree = {"$defs": {"leaf": leaf, "node": node}, "oneOf": node["properties"]["left"]["oneOf"]}
    assert vetted(tree, "x", exact=True)["anyOf"] == tree["oneOf"]
    shared = {"$defs": {"a": tagged(1), "b": tagged(2)}}
    references = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    assert vetted({**shared, "oneOf": references}, "x", exact=True)["anyOf"] == references


# -- written at random -----------------------------------------------------------------------------

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
LETTERS = [chr(i) for i in range(32, 127)] + ["\n", "é", "日"]


def compiled(schema) -> xgrammar.CompiledGrammar:
    """Over a vocabulary of single characters."""
    words = [c.encode() for c in LETTERS] + [b""]
    info = xgrammar.TokenizerInfo(words, stop_token_ids=[len(LETTERS)])
    tag = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}
    whole_tag = json.dumps({"type": "structural_tag", "format": tag})
    return xgrammar.GrammarCompiler(
        info, max_threads=1, cache_enabled=False
    ).compile_structural_tag(whole_tag)


def written(grammar, rng, most=400) -> str | None:
    """A random text; None if it gets too long. Closing characters are likelier."""
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


ENFORCED = [
    *({"type": "string", "format": name} for name in FORMATS),
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "minLength": 3},
    {"type": "string", "pattern": "[0-9]"},
    {"type": "string", "pattern": "^a.*z$"},
    {"type": "string", "pattern": r"^[^b]\S(-\d{2,4})?$"},
    {"type": ["integer", "string", "null"], "minimum": 3, "maxLength": 2},
    {"enum": ["a", 'b"\\c', None, 1.5, {"x": [1]}]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, STRING], "items": {"type": "null"}},
    {"type": "array", "prefixItems": [{"type": "integer"}, STRING]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
    {**OBJECT, "required": ["b"]},
    {"type": "object", "properties": dict.fromkeys("abcd", STRING), "required": ["c"],
     "minProperties": 2, "maxProperties": 3},
    {"oneOf": [STRING, {"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]},
    {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"}, "n": {"anyOf": [
        {"$ref": "#/$defs/n"}, {"type": "null"}]}}, "required": ["v", "n"]}}, "$ref": "#/$defs/n"},
]  # fmt: skip


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda s: json.dumps(s)[:60])
def test_what_is_written_is_valid(schema) -> None:
    grammar, rng = compiled(vetted(schema, "x", exact=True)), random.Random(1)
    check = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    texts = [text for _ in range(60) if (text := written(grammar, rng)) is not None]
    assert len(texts) >= 10
    for text in texts:
        check.validate(json.loads(text))


# -- patterns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["a.c", "[^x]y", r"^\d{3}$", "x|yz", "(ab)+", r"\w+\s\w", "^x"])
def test_whole_texts_are_those_in_which_a_pattern_is_found(pattern) -> None:
    assert differences(pattern, random.Random(2).sample(TEXTS, 300)) == []


@pytest.mark.parametrize(
    "pattern",
    ["(ab*)?c", r"(?:a\.{1,3})?b", "a|a{1,2}", "a(?:|b)|a", "(b|ab+){0,2}", "(a{0,2}b*)*c"],
)
def test_repetitions_that_xgrammar_gets_wrong_are_written_anew(pattern) -> None:
    assert differences(f"^(?:{pattern})$", TEXTS) == []


def test_random_patterns() -> None:
    rng = random.Random(3)
    for _ in range(60):
        assert differences(f"^(?:{random_pattern(rng, 2)})$", rng.sample(TEXTS, 100)) == []


SMALL = "abcxy1."
TEXTS = ["".join(letters) for n in range(5) for letters in itertools.product(SMALL, repeat=n)]


def differences(pattern, texts) -> list[tuple[str, str]]:
    """Between a JSON string's grammar and Python's search."""
    grammar = compiled(vetted({"type": "string", "pattern": pattern}, "x", exact=True))
    ids = {letter: LETTERS.index(letter) for letter in SMALL + '"'}

    def matches(text) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        whole_text = [ids[letter] for letter in f'"{text}"'] + [len(LETTERS)]
        return all(matcher.accept_token(token) for token in whole_text)

    searched = re.compile(pattern)
    return [(pattern, t) for t in texts if matches(t) != bool(searched.search(t))]


def random_pattern(rng, depth) -> str:
    def part() -> str:
        inner = rng.choice(["a", "b", "x", "[ab]", "[^a]", r"\d", r"\.", "[a-c]"])
        if depth and rng.random() < 0.5:
            inner = f"({random_pattern(rng, depth - 1)})"
        return inner + rng.choice(["", "", "?", "*", "+", "{2}", "{0,2}", "{1,3}", "{2,}"])

    return "|".join(
        "".join(part() for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 2))
    )


def test_outside_json_quotes_and_line_breaks_are_characters_like_others() -> None:
    vet('^"\\n\\\\"')
    with pytest.raises(PatternError, match="a quote, a backslash"):
        whole('"')
