"""Numbers in schemas and requests that no double can represent."""

from __future__ import annotations

import math

import pytest
import xgrammar

from nanovllm.grammars.document import SchemaError
from nanovllm.grammars.schema import compiled
from tests.load.schemas import compiler, tag

HUGE = 10**309  # 310 digits: the largest double has 309
KEYWORDS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains", "const", "default"),
)


def grammar_of(schema: object) -> xgrammar.CompiledGrammar:
    return compiler().compile_structural_tag(tag(compiled(schema, "x", exact=True)))


def matches(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize(
    "value", [HUGE, -HUGE, 10**4299, 10**5000, math.inf, 1e308, 5e-324], ids=range(7)
)
def test_any_number_is_compiled_or_refused(keyword: str, value: float) -> None:
    for schema in ({keyword: value}, {"not": {keyword: value}, "type": "integer"}):
        try:
            compiled({"properties": {"a": schema}}, "the_field", exact=value != HUGE)
        except SchemaError as error:
            assert str(error).startswith("the_field: the schema ")


def test_numbers_of_many_digits_mean_themselves() -> None:
    either = grammar_of({"enum": [HUGE, -HUGE, 2**53 + 1, 1e-7, 3]})
    for text in (str(HUGE), str(-HUGE), "9007199254740993", "0.0000001", "3", "3.0"):
        assert matches(either, text), text
    # JSON readers parse the first of these as 2**53.
    for text in ("9007199254740993.0", "9007199254740992", str(HUGE + 1), str(10**308), "0"):
        assert not matches(either, text), text
    least = grammar_of({"type": "integer", "minimum": HUGE})
    assert matches(least, str(HUGE)) and matches(least, str(HUGE) + "0")
    assert not matches(least, str(HUGE - 1))
    most = grammar_of({"type": "integer", "minimum": 0, "exclusiveMaximum": HUGE})
    assert matches(most, str(HUGE - 1)) and not matches(most, str(HUGE))
    apart = grammar_of({"type": "integer", "minimum": HUGE - 1, "not": {"const": HUGE}})
    assert matches(apart, str(HUGE + 1)) and not matches(apart, str(HUGE))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": math.inf}, "has a number that is not finite as a value, at #"),
        ({"enum": [1, -math.inf]}, "has a number that is not finite as a value, at #"),
        ({"minimum": math.inf}, "has no number as 'minimum', at #"),
        ({"const": 10**5000}, "has a number of too many digits, at #"),
        ({"minLength": HUGE}, "has 'minLength' above 1048576, at #"),
        ({"multipleOf": HUGE}, "multiples above 2000 times their last decimal"),
        ({"minimum": 10**400}, "numbers of more than 400 digits"),
    ],
    ids=range(7),
)
def test_a_number_that_cannot_be_had_is_named(schema: dict, message: str) -> None:
    with pytest.raises(SchemaError, match="the_field: the schema .*" + message):
        compiled(schema, "the_field", exact=True)
