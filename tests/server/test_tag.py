"""Outputs that each request's structural tag allows, compiled over the demo tokenizer.

The texts follow the style of each family's models. Allowed texts are also parsed.
"""

from __future__ import annotations

import json
from functools import cache

import msgspec
import pytest
import xgrammar

from nanovllm.config import DEMO, load_config
from nanovllm.grammars.runtime.compiler import token_table
from nanovllm.server.detokenize import Detokenizer
from nanovllm.server.errors import ApiError
from nanovllm.server.parsers.base import CallPart, CallStart, Reasoning, Text, joined
from nanovllm.server.protocol import ChatRequest, parse_request
from nanovllm.server.served import Served
from nanovllm.server.tag import structural_tag
from nanovllm.wire import Ready
from tests.server.calls_as_text import FAMILIES, qwen3

VOCAB = 2048
READY = Ready(
    worker=0,
    model="demo",
    max_model_tokens=400,
    vocab_size=VOCAB,
    num_pages=4,
    page_tokens=16,
    num_slots=4,
)
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
SAY = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "tone": {"enum": ["kind", "dry"]},
        "to": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "times": {"type": "integer", "minimum": 1},
        "at": {"type": "array", "items": {"$ref": "#/$defs/hour"}},
    },
    "required": ["text"],
    "$defs": {"hour": {"type": "integer", "maximum": 24}},
}
OPEN = "<think>\n"  # the prompt ends inside thinking
OVER = "<think>\n\n</think>\n\n"  # the prompt ends after thinking


def tool(name, schema, strict=True):
    function = {"name": name, "parameters": schema, "strict": strict}
    return {"type": "function", "function": function}


WIDE = {"type": "object", "properties": {"x": {"enum": ["y" * 700 + str(i) for i in range(50)]}}}
TOOLS = [tool("add", ADD), tool("say", SAY)]
NO_DATE = {"not": {"format": "date"}}
PERSON = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        },
    },
}


@cache
def served(family) -> Served:
    return Served(load_config(None, [f"server.parser={family}"]), READY)


@cache
def compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(
        token_table(DEMO, VOCAB, [2041]), max_threads=1, cache_enabled=False
    )


def request(**fields) -> ChatRequest:
    raw = {"messages": [{"role": "user", "content": "x"}], **fields}
    return parse_request(msgspec.json.encode(raw), model="demo", vocab_size=VOCAB)


def matcher(family="qwen3", turn="", **fields) -> xgrammar.GrammarMatcher:
    asked = request(**fields)
    assert asked.constrained_by is not None
    tag = structural_tag(asked, served(family), turn)
    return xgrammar.GrammarMatcher(compiler().compile_structural_tag(tag))


def ids(text) -> list[int]:
    return served("qwen3").template.tokenizer.encode(text, add_special_tokens=False).ids


def letters(text) -> list[int]:
    """Return the ids of a text with its markers spelled out in ordinary tokens."""
    return [i for character in text for i in ids(character)]


def allows(tokens, *, family="qwen3", turn="", **fields) -> bool:
    return passes(matcher(family, turn, **fields), tokens)


def passes(following, tokens) -> bool:
    tokens = ids(tokens) if isinstance(tokens, str) else tokens
    return all(takes(following, token) for token in [*tokens, 2041])


def takes(following, token) -> bool:
    """Accept a token if the mask allows it. Only the mask reflects a budget that is used up."""
    mask = xgrammar.allocate_token_bitmask(1, VOCAB)
    following.fill_next_token_bitmask(mask)
    return bool(mask[0, token // 32] >> token % 32 & 1) and following.accept_token(token)


def said(tokens, *, family="qwen3", turn="", **fields) -> list:
    """Return the parser's events for an output, which must be allowed."""
    assert allows(tokens, family=family, turn=turn, **fields)
    tokens = ids(tokens) if isinstance(tokens, str) else tokens
    parser = served(family).parser(turn, request(**fields).schemas, is_spelled=False, mends=False)
    detokenizer = Detokenizer(served(family).vocabulary, skip_special=True)
    text = "".join(map(detokenizer.feed, tokens))
    return joined(parser.feed(text) + parser.finish())


def called(name, arguments) -> list:
    return [CallStart(name), CallPart(arguments)]


# -- calls, in the syntax of each family -----------------------------------------------------------


ONE, TWO = ("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3}')
families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_required_is_calls_and_nothing_else(family) -> None:
    write = FAMILIES[family]
    fields = {"tools": TOOLS, "tool_choice": "required", "family": family, "turn": OVER}
    assert said(write(ONE), **fields) == called(*ONE)
    assert said(write(ONE, TWO), **fields) == called(*ONE) + called(*TWO)
    assert not allows("hello", **fields)
    assert not allows("", **fields)
    assert not allows(write(ONE) + "\nhello", **fields)
    assert not allows(write(("other", '{"a": 1}')), **fields)
    assert not allows(write(("add", '{"a": "x"}')), **fields)
    assert not allows(write(("add", '{"b": 1}')), **fields)
    assert not allows(write(("add", '{"a": 1, "c": 2}')), **fields)


@families
def test_names_are_written_as_they_are(family) -> None:
    for name in ("GET_NAME", "QUOTED", "größe"):
        schema = {"type": "object", "properties": {name: {"enum": ["", name]}}}
        fields = {"tools": [tool(name, schema)], "tool_choice": "required", "family": family}
        for value in ("", name):
            call = (name, json.dumps({name: value}, ensure_ascii=False))
            assert said(FAMILIES[family](call), turn=OVER, **fields) == called(*call)


@families
def test_a_named_function_is_called_once(family) -> None:
    write = FAMILIES[family]
    named = {"type": "function", "function": {"name": "add"}}
    fields = {"tools": TOOLS, "tool_choice": named, "family": family, "turn": OVER}
    assert said(write(ONE), **fields) == called(*ONE)
    assert not allows(write(ONE, TWO), **fields)
    assert not allows(write(("say", '{"text": "x"}')), **fields)


@families
def test_parallel_calls_can_be_forbidden(family) -> None:
    write = FAMILIES[family]
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert allows(write(ONE), family=family, turn=OVER, **fields)
    assert not allows(write(ONE, TWO), family=family, turn=OVER, **fields)


@families
def test_with_strict_tools_text_and_calls_both_stay_possible(family) -> None:
    write = FAMILIES[family]
    fields = {"tools": TOOLS, "family": family, "turn": OVER}
    assert said("hello <there>", **fields) == [Text("hello <there>")]
    assert said("Let me see.\n" + write(ONE, TWO), **fields) == [
        Text("Let me see."),
        *called(*ONE),
        *called(*TWO),
    ]
    assert not allows("Let me see.\n" + write(("add", '{"a": 1.5}')), **fields)
    assert not allows(write(("other", "{}")), **fields)


@families
def test_only_allowed_tools_are_called(family) -> None:
    write = FAMILIES[family]
    add = {"type": "function", "function": {"name": "add"}}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [add]}}
        fields = {"tools": TOOLS, "tool_choice": choice, "family": family, "turn": OVER}
        assert allows(write(ONE), **fields)
        assert not allows(write(("say", '{"text": "x"}')), **fields)
        assert allows("hello", **fields) == (mode == "auto")


@families
def test_tools_without_strict_are_best_effort(family) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"format": "date"}, "type": "integer"}}}
    fields = {"tool_choice": "required", "family": family, "turn": OVER}
    text = FAMILIES[family](("add", '{"a": 1}'))
    assert allows(text, tools=[tool("add", schema, strict=None)], **fields)
    with pytest.raises(ApiError, match=r"tools\[0\].function.parameters: .*'not'.*#/properties/a"):
        allows(text, tools=[tool("add", schema)], **fields)
    for free in (None, {}, {"type": "object"}):
        given = [tool("add", free, strict=None)]
        assert allows(FAMILIES[family](("add", "{}")), tools=given, **fields)
    assert allows(text, tools=[tool("add", {"type": "object"})], **fields)


@pytest.mark.parametrize("family", ["qwen3_coder", "minimax_m2", "glm4_7"])
def test_parameters_in_xml(family) -> None:
    write = FAMILIES[family]
    fields = {"tools": TOOLS, "tool_choice": "required", "family": family, "turn": OVER}
    given = {"text": 'so "it" <goes>\n', "tone": "dry", "to": "Bob", "times": 2, "at": [1, 24]}
    assert said(write(("say", json.dumps(given))), **fields) == called("say", json.dumps(given))
    shown = write(("say", '{"text": "x", "to": "null"}'))
    assert said(shown, **fields) == called("say", '{"text": "x", "to": null}')
    for bad in (
        {"tone": "dry"},
        {"text": "x", "tone": "odd"},
        {"text": "x", "tone": " dry"},
        {"text": "x", "to": "Robert"},
        {"text": "x", "times": 0},
        {"text": "x", "times": "two"},
        {"text": "x", "at": [25]},
        {"text": "x</arg_value> y" if family == "glm4_7" else "x</parameter> y"},
    ):
        assert not allows(write(("say", json.dumps(bad))), **fields), bad


# -- thinking --------------------------------------------------------------------------------------


def test_thinking_then_json() -> None:
    text = '{"name": "Ada", "age": 36}'
    fields = {"response_format": PERSON}
    assert said(text, turn=OVER, **fields) == [Text(text)]
    assert said(text, **fields) == [Text(text)]  # the model does not have to think
    assert said(f"hm\n</think>\n\n{text}", turn=OPEN, **fields) == [
        Reasoning("hm"),
        Text(text),
    ]
    assert said(f"<think>\nhm\n</think>\n\n{text}", **fields) == [Reasoning("hm"), Text(text)]
    assert not allows(text, turn=OPEN, **fields)  # thinking is not closed
    assert not allows(f"hm</think>{text}</think>", turn=OPEN, **fields)
    assert not allows(f"<think>hm</think>{text}", turn=OVER, **fields)
    assert not allows(f"<think>hm</think>{text}", family="plain", **fields)
    assert allows(text, family="plain", **fields)


@families
def test_thinking_then_calls(family) -> None:
    text = "hm\n</think>\n\n" + FAMILIES[family](ONE)
    fields = {"tools": TOOLS, "tool_choice": "required", "family": family, "turn": OPEN}
    assert said(text, **fields) == [Reasoning("hm"), *called(*ONE)]


def test_a_thinking_budget_counts_tokens() -> None:
    fields = {"thinking_token_budget": 3, "turn": OPEN}
    thought = letters("abcd")
    end = ids("</think>")
    answer = ids("\n\nhello")
    assert allows(thought[:3] + end + answer, **fields)
    assert allows(end + answer, **fields)
    assert not allows(thought + end + answer, **fields)
    assert not allows(thought[:1] + end + answer, thinking_token_budget=0, turn=OPEN)
    assert allows(ids("<think>") + end + answer, thinking_token_budget=0)
    with_json = {"response_format": {"type": "json_object"}, **fields}
    assert allows(thought[:3] + end + ids("{}"), **with_json)
    assert not allows(thought + end + ids("{}"), **with_json)


def test_markers_as_letters_end_nothing() -> None:
    text = '{"name": "</think> <tool_call>", "age": 1}'
    thought = letters("a </think> b")
    tokens = thought + ids("</think>") + letters(text)
    assert said(tokens, turn=OPEN, response_format=PERSON) == [
        Reasoning("a </think> b"),
        Text(text),
    ]


def test_no_added_token_is_possible_inside_json_or_text() -> None:
    tokenizer = served("qwen3").template.tokenizer
    added = sorted(tokenizer.get_added_tokens_decoder())
    for fields, start in (
        ({"response_format": PERSON, "turn": OVER}, '{"name": "A'),
        ({"structured_outputs": {"regex": ".*"}, "turn": OVER}, "A"),
        ({"tools": TOOLS, "turn": OVER}, "A"),
        ({"thinking_token_budget": 9, "turn": OPEN}, "A"),
    ):
        following = matcher(**fields)
        assert all(following.accept_token(t) for t in ids(start))
        possible = [t for t in added if following.fork().accept_token(t)]
        wanted = {"tools": ["<tool_call>"], "thinking_token_budget": ["</think>"]}
        names = next((wanted[key] for key in fields if key in wanted), [])
        stops = [] if "response_format" in fields or "thinking_token_budget" in fields else [2041]
        assert possible == sorted([*map(tokenizer.token_to_id, names), *stops])


@pytest.mark.parametrize(
    ("family", "start"),
    [
        ("qwen3_coder", "<tool_call>\n<function=say>\n<parameter=text>\nA"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="say">\n<parameter name="text">A'),
        ("glm4_7", "<tool_call>say<arg_key>text</arg_key><arg_value>A"),
    ],
)
def test_no_added_token_is_possible_inside_a_raw_parameter(family, start) -> None:
    """No added token, and no id beyond the tokenizer's, is allowed inside a raw parameter."""
    tokenizer = served(family).template.tokenizer
    beyond = range(tokenizer.get_vocab_size(), VOCAB)
    for most in (None, 40):
        schema = {"type": "string"} if most is None else {"type": "string", "maxLength": most}
        say = tool("say", {"type": "object", "properties": {"text": schema}, "required": ["text"]})
        following = matcher(family, OVER, tools=[say], tool_choice="required")
        assert all(following.accept_token(t) for t in ids(start))
        added = [*tokenizer.get_added_tokens_decoder(), *beyond]
        assert [t for t in added if following.fork().accept_token(t)] == []
        assert following.accept_token(ids("</")[0])


def test_white_space_is_bounded() -> None:
    fields = {"response_format": PERSON, "turn": OVER}
    assert allows('{\n  "name": "Ada",\n  "age": 36\n}', **fields)
    assert allows('{"name":"Ada","age":36}', **fields)
    assert allows('{%s"name":"Ada","age":36}' % (" " * 8), **fields)
    assert not allows('{%s"name":"Ada","age":36}' % (" " * 9), **fields)
    assert not allows('{"name":"Ada","age":36}\n', **fields)
    narrow = {"structured_outputs": {"json": ADD, "disable_any_whitespace": True}, "turn": OVER}
    assert allows('{"a": 1}', **narrow) and not allows('{  "a": 1}', **narrow)


# -- the forms of content --------------------------------------------------------------------------

XML = {"type": "tag", "begin": "<x>", "content": {"type": "json_schema", "json_schema": ADD}}
TAG = {"type": "structural_tag", "format": {**XML, "end": "</x>"}}
TOKEN = {"type": "structural_tag", "format": {"type": "token", "token": "<tool_call>"}}
VALUE = {"type": "structural_tag", "format": {"type": "regex", "pattern": "ab", "value": ""}}
CONTENTS = [
    ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1]}'], ["[]", "1", "{", "{}x"]),
    ({"response_format": PERSON}, ['{"name": "A", "age": 1}'], ['{"name": "A"}', "{}"]),
    ({"response_format": TAG}, ['<x>{"a": 1}</x>'], ["<x>{}</x>", '{"a": 1}', "x"]),
    ({"response_format": TOKEN}, ["<tool_call>"], ["<", "x"]),
    ({"response_format": VALUE}, ["ab"], ["", "x"]),  # an unknown field is ignored
    ({"structured_outputs": {"json": ADD}}, ['{"a": 1}'], ["{}"]),
    ({"structured_outputs": {"json": json.dumps(ADD)}}, ['{"a": 1}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"structured_outputs": {"regex": "[a-c]{2}-\\d+"}}, ["ab-12"], ["ab-", "xab-1"]),
    ({"structured_outputs": {"regex": "^(a|b)$"}}, ["a"], ["ab", "c"]),
    ({"structured_outputs": {"choice": ["yes", "no", "yes!"]}}, ["yes", "yes!"], ["", "yesno"]),
    ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, ["b", "aab"], ["a", ""]),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, ['<x>{"a": 1}</x>'], ["x"]),
]


@pytest.mark.parametrize(("fields", "yes", "no"), CONTENTS)
def test_contents(fields, yes, no) -> None:
    for turn in (OVER, OPEN):
        before = "hm</think>\n\n" if turn == OPEN else ""
        assert [text for text in yes if not allows(before + text, turn=turn, **fields)] == []
        assert [text for text in no if allows(before + text, turn=turn, **fields)] == []


def test_with_tools_it_is_calls_or_the_content() -> None:
    fields = {"tools": TOOLS, "response_format": PERSON, "turn": OVER}
    text = '{"name": "A", "age": 1}'
    assert said(text, **fields) == [Text(text)]
    assert said(qwen3(ONE), **fields) == called(*ONE)
    assert not allows("hello", **fields)
    assert allows(text, tool_choice="none", **fields)
    assert not allows(qwen3(ONE), tool_choice="none", **fields)
    assert not allows(text, tool_choice="required", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"regex": "(?=a)b"}}, "regex must be without look-around"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex must be a string"),
        ({"structured_outputs": {"regex": "(" * 3}}, "structured_outputs.regex must be without"),
        ({"structured_outputs": {"grammar": "x" * 70_000}}, "grammar must be a string of 1 to"),
        ({"structured_outputs": {"choice": []}}, "choice must be a list of 1 to 2000 non-empty"),
        ({"structured_outputs": {"choice": [""]}}, "choice must be a list of 1 to 2000 non-empty"),
        (
            {"structured_outputs": {"choice": [str(i) * 33 for i in range(1000, 1500)]}},
            "structured_outputs.choice must be at most 65536 bytes in all, not 66000",
        ),
        (
            {"tools": [tool(f"f{i}", WIDE, strict=True) for i in range(40)]},
            r"tools needs a grammar of \d{7} bytes; it must be at most 1048576",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json must be JSON"),
        ({"structured_outputs": {"json": '{"const": NaN}'}}, "structured_outputs.json must be JS"),
        ({"structured_outputs": {"json": '{"enum": [1e999]}'}}, "json must be JSON .*out of range"),
        ({"structured_outputs": {"json": r'{"const": "\ud800"}'}}, "structured_outputs.json must"),
        ({"structured_outputs": {"json": "[" * 99_999}}, "json must be JSON .*recursion"),
        ({"structured_outputs": {"json": NO_DATE}}, "structured_outputs.json: .*'not'"),
        (
            {"structured_outputs": {"structural_tag": {}}},
            "structural_tag.format is missing or null",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "response_format.format is missing or null; it must be an object, the format of the "
            "output",
        ),
        (
            {"response_format": {**TAG, "format": {**XML, "content": {"type": "regex"}}}},
            "response_format.format.content is missing or null; it must be a string",
        ),
        (
            {"response_format": {**TAG, "format": {"type": "token", "token": "nope"}}},
            "response_format.format.token must be a token of this model, not 'nope'",
        ),
        ({"response_format": PERSON, "min_tokens": 3}, "min_tokens must be left out where resp"),
        ({"response_format": PERSON, "ignore_eos": True}, "ignore_eos must be left out"),
        ({"response_format": PERSON, "bad_words": ["x"]}, "bad_words must be left out"),
        ({"response_format": PERSON, "allowed_token_ids": [5]}, "allowed_token_ids must be"),
        ({"tools": [tool("f", {"type": "string"})]}, "parameters: the schema must be an object's"),
    ],
)
def test_refusals(fields, message) -> None:
    with pytest.raises(ApiError, match=message):
        matcher(**fields)


def test_no_grammar_is_followed_where_drafts_are_accepted_by_chance() -> None:
    overrides = ["speculate.method=synthetic", "speculate.accept=[.5,.5,.5]"]
    by_chance = Served(load_config(None, overrides), READY)
    with pytest.raises(ApiError, match="response_format cannot be enforced by a server with spec"):
        structural_tag(request(response_format=PERSON), by_chance, "")
    looked_up = Served(load_config(None, ["speculate.method=ngram"]), READY)
    assert structural_tag(request(response_format=PERSON), looked_up, "")
