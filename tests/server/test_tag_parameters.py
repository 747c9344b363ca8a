"""Tools whose schemas are refused, and tools with unnamed parameters, by model family."""

from __future__ import annotations

import json

import pytest
import xgrammar

from nanovllm.server.errors import ApiError
from nanovllm.server.orders import with_grammar
from nanovllm.server.protocol import MAX_TOOLS
from nanovllm.server.tag import MAX_TAG_BYTES, structural_tag
from nanovllm.server.template import Prompt
from tests.server.test_tag import (
    ADD,
    FAMILIES,
    OVER,
    allows,
    compiler,
    families,
    passes,
    request,
    said,
    served,
    tool,
)


@families
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_the_same_tools_are_refused_whatever_the_choice(family, choice) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    fields = {"tool_choice": named if choice == "named" else choice}
    bad = {"type": "object", "properties": {"a": {"type": "integer", "minimum": "1"}}}
    for schema, message in ((bad, "no number as 'minimum'"), ({"type": "string"}, "an object's")):
        asked = request(tools=[tool("add", schema, strict=None)], **fields)
        with pytest.raises(ApiError, match=rf"tools\[0\].function.parameters: .*{message}"):
            with_grammar(asked, Prompt([1]), served(family))
    good = request(tools=[tool("add", ADD, strict=None)], **fields)
    made = with_grammar(good, Prompt([1]), served(family))
    assert bool(made.grammar) == (choice != "auto")


@pytest.mark.parametrize("family", ["qwen3_coder", "minimax_m2", "glm4_7"])
def test_parameters_in_xml_that_nobody_names(family) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "s": {"type": "string", "pattern": "^[ab]+$"}},
        "additionalProperties": {"type": "integer"},
    }
    fields = {"tools": [tool("f", schema)], "tool_choice": "required"}

    def may(**given) -> bool:
        text = FAMILIES[family](("f", json.dumps(given)))
        return allows(text, family=family, turn=OVER, **fields)

    assert may() and may(a=1) and may(a=1, s="ab", b=2, aa=3)
    assert not may(a=1, b="x") and not may(b=1, a=1) and not may(s="abc")


@families
def test_as_many_tools_as_a_request_may_have_fit_one_grammar(family) -> None:
    simple = {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "ratio": {"type": "number"},
    }
    simple |= {"deep": {"type": "boolean"}, "mode": {"type": "string", "enum": ["fast", "slow"]}}
    schema = {"type": "object", "properties": simple, "required": ["query"]}
    tools = [tool(f"tool_number_{i}", schema, strict=None) for i in range(MAX_TOOLS)]
    fields = {"tools": tools, "tool_choice": "required"}
    tag = structural_tag(request(**fields), served(family), OVER)
    assert 700_000 < len(tag) < 0.82 * MAX_TAG_BYTES
    assert tag.count("tool_number_500") == 1
    first = ("tool_number_0", '{"query": "x", "limit": 5, "ratio": 0.5}')
    last = ("tool_number_511", '{"query": "x", "mode": "slow"}')
    grammar, write = compiler().compile_structural_tag(tag), FAMILIES[family]

    def may(*calls) -> bool:
        return passes(xgrammar.GrammarMatcher(grammar), write(*calls))

    assert may(last, first, last)
    assert not may(last, ("tool_number_512", first[1])) and not may(first, (last[0], "{}"))


@pytest.mark.parametrize("text", ["a</invoke>\nb", "a</function>\nb"])
@pytest.mark.parametrize("family", ["qwen3_coder", "minimax_m2"])
def test_parameters_in_xml_may_hold_what_ends_a_call(family, text) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string"}}}
    fields = {"tools": [tool("f", schema)], "tool_choice": "required"}
    output = FAMILIES[family](("f", json.dumps({"s": text})))
    assert allows(output, family=family, turn=OVER, **fields)


WORDS = {
    '{"type": "boolean"}': {"True": True, "False": False},
    '{"type": "null"}': {"None": None},
    '{"type": ["integer", "null"]}': {"None": None},
    '{"anyOf": [{"const": true}, {"type": "null"}]}': {"True": True, "None": None},
    '{"allOf": [{}, {"$ref": "#/$defs/flag"}]}': {"True": True, "False": False},
    '{"type": ["string", "boolean"], "enum": ["x", false]}': {},
    '{"type": "integer"}': {},
}


@pytest.mark.parametrize("schema", WORDS)
def test_words_of_python_that_a_template_writes_into_calls(schema) -> None:
    """Qwen3.5's writes them for the values of the history, and JSON inside of objects."""
    properties = {"x": json.loads(schema), "y": {"type": "array"}}
    defs = {"flag": {"type": "boolean"}}
    parameters = {"type": "object", "properties": properties, "$defs": defs}
    fields = {"tools": [tool("f", parameters)], "tool_choice": "required", "turn": OVER}

    def text(family: str, word: str, inner: str = "") -> str:
        arguments = {"x": word} | ({"y": inner} if inner else {})
        return FAMILIES[family](("f", json.dumps(arguments)))

    for word in ("True", "False", "None", "TRUE", "none"):
        for family in ("minimax_m2", "glm4_7"):
            assert not allows(text(family, word), family=family, **fields)
        is_allowed = allows(text("qwen3_coder", word), family="qwen3_coder", **fields)
        assert is_allowed is (word in WORDS[schema]), word
    for word, value in WORDS[schema].items():
        events = said(text("qwen3_coder", word), family="qwen3_coder", **fields)
        assert json.loads(events[-1].text) == {"x": value}
        assert not allows(text("qwen3_coder", word, f"[{word}]"), family="qwen3_coder", **fields)


def test_words_of_python_are_text_where_the_parser_reads_a_string() -> None:
    schema = {"type": "object", "properties": {"x": {"type": ["string", "null"]}}}
    fields = {"tools": [tool("f", schema)], "tool_choice": "required", "turn": OVER}
    for word, value in {"None": "None", "True": "True", "null": None}.items():
        output = FAMILIES["qwen3_coder"](("f", json.dumps({"x": word})))
        events = said(output, family="qwen3_coder", **fields)
        assert json.loads(events[-1].text) == {"x": value}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"additionalProperties": {"type": ["boolean", "null"]}}, {"True": True, "None": None}),
        ({"patternProperties": {"^x": {"type": "boolean"}}}, {"False": False}),
        ({"additionalProperties": {"type": "integer"}}, {}),
        # The parser reads the word as a string, as the other part names the parameter so.
        (
            {
                "additionalProperties": {"type": "boolean"},
                "anyOf": [{"properties": {"x": {"type": ["string", "boolean"]}}}],
            },
            {},
        ),
    ],
)
def test_words_of_python_for_parameters_without_a_name_in_the_schema(schema, words) -> None:
    parameters = {"type": "object", "properties": {"s": {"type": "string"}}, **schema}
    fields = {"tools": [tool("f", parameters)], "tool_choice": "required", "turn": OVER}
    fields |= {"family": "qwen3_coder"}
    for word in ("True", "False", "None"):
        output = FAMILIES["qwen3_coder"](("f", json.dumps({"x": word})))
        if word in words:
            assert json.loads(said(output, **fields)[-1].text) == {"x": words[word]}
        elif not words:
            assert not allows(output, **fields)
