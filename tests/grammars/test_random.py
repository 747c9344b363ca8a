"""Grammars of random schemas agree with `jsonschema` on random instances."""

from __future__ import annotations

import json
from functools import cache

import jsonschema
import xgrammar
from hypothesis import HealthCheck, assume, given, reject, settings, strategies as st

from nanovllm.grammars.document import SchemaError
from nanovllm.grammars.schema import compiled
from tests.load.schemas import Found, compiler, tag, weigh

NAMES = ("a", "b", "ab", "c")
SCALARS = (None, True, False, 0, 1, 2, 3, -1, 0.5, 2.5, 10, "", "a", "b", "ab", "aab", "ba", 'b"\n')
PATTERNS = ("a", "^a", "b$", "^(ab?)+$", "^[^a]*$", "^a{1,30}$")


def counts(low, high):
    return st.fixed_dictionaries({}, optional={low: st.integers(0, 2), high: st.integers(0, 3)})


def numbers():
    bounds = st.sampled_from([-1, 0, 1, 2, 2.5])
    return st.fixed_dictionaries(
        {"type": st.sampled_from(["number", "integer"])},
        optional={
            "minimum": bounds,
            "exclusiveMaximum": bounds,
            "multipleOf": st.sampled_from([0.5, 1, 2]),
        },
    )


def texts():
    patterns = st.fixed_dictionaries({}, optional={"pattern": st.sampled_from(PATTERNS)})
    lengths = counts("minLength", "maxLength")
    return st.builds(lambda *parts: merge({"type": "string"}, *parts), patterns, lengths)


def objects(inner):
    fields = {
        "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "patternProperties": st.dictionaries(st.sampled_from(("^a", "b")), inner, max_size=2),
        "dependentRequired": st.just({"a": ["b"]}),
        "propertyNames": st.sampled_from([{"maxLength": 1}, {"pattern": "a"}]),
        "minProperties": st.integers(0, 1),
        "maxProperties": st.integers(0, 3),
    }
    more = st.fixed_dictionaries({"additionalProperties": st.one_of(st.booleans(), inner)})
    kind = st.sampled_from([{"type": "object"}, {}])
    return st.builds(merge, kind, st.fixed_dictionaries({}, optional=fields), more)


def arrays(inner):
    fields = {"prefixItems": st.lists(inner, max_size=2), "contains": inner}
    kind = st.sampled_from([{"type": "array"}, {}])
    items = st.fixed_dictionaries({"items": st.one_of(st.booleans(), inner)})
    return st.builds(
        merge,
        kind,
        items,
        st.fixed_dictionaries({}, optional=fields),
        counts("minItems", "maxItems"),
    )


def combined(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    fields = {
        "allOf": several,
        "anyOf": several,
        "oneOf": several,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
    }
    part = st.sampled_from(sorted(fields)).flatmap(lambda k: st.fixed_dictionaries({k: fields[k]}))
    return st.builds(merge, part, st.one_of(part, inner.filter(lambda s: isinstance(s, dict))))


def merge(*parts):
    return {key: value for part in parts for key, value in part.items()}


def leaves():
    return st.one_of(
        st.booleans(),
        st.just({}),
        st.builds(lambda name: {"type": name}, st.sampled_from(["null", "boolean", "string"])),
        st.builds(lambda value: {"const": value}, st.sampled_from(SCALARS)),
        st.builds(
            lambda v: {"enum": v}, st.lists(st.sampled_from(SCALARS), min_size=1, max_size=4)
        ),
        numbers(),
        texts(),
    )


schemas = st.recursive(
    leaves(), lambda inner: st.one_of(objects(inner), arrays(inner), combined(inner)), max_leaves=6
)
values = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=5,
)


@cache
def bytes_compiler() -> xgrammar.GrammarCompiler:
    return compiler()


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(schemas, schemas, schemas, st.lists(values, min_size=4, max_size=12))
def test_the_grammar_allows_what_is_valid_and_nothing_else(schema, x, y, instances) -> None:
    whole = {"allOf": [schema], "$defs": {"x": x, "y": y}}
    try:
        text = compiled(whole, "it", exact=True)
    except SchemaError as error:
        known = ("leads to itself", "cannot be enforced", "takes too long", "allows nothing")
        assert any(reason in str(error) for reason in known), str(error)
        assume("allows nothing" in str(error))
        text = ""
    check = jsonschema.Draft202012Validator(whole)
    try:
        tests = [{"data": data, "valid": check.is_valid(data)} for data in instances]
    except RecursionError:  # references that lead to themselves
        reject()
    if not text:
        assert not any(test["valid"] for test in tests), json.dumps(whole)
        return
    found = Found("it")
    grammar = bytes_compiler().compile_structural_tag(tag(text))
    for test in tests:
        weigh(found, grammar, whole, test)
    assert not found.wrong, (json.dumps(whole), found.wrong)
