"""Qwen3-Coder's calls with missing tags: accepted if the next tag is unambiguous, else text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from nanovllm.config import load_config
from nanovllm.server.answers import WholeWriter
from nanovllm.server.parsers.base import CallPart, CallStart, Event, Reasoning, Text, joined
from nanovllm.server.parsers.machine import OutputParser
from nanovllm.server.served import Served
from tests.server.parsers.generated_outputs import family_of, json_or_none, marks_of
from tests.server.test_choice import END, ENGINE, TOKENIZER, answered, message_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string"},
        "days": {"type": "integer"},
    },
}
SCHEMAS = {"weather": WEATHER, "now": None}


def machine(*, as_tokens=False, mends=True, schemas=SCHEMAS) -> OutputParser:
    marks = marks_of("qwen3_coder", as_tokens=as_tokens)
    return OutputParser(family_of("qwen3_coder"), marks, "", schemas, mends=mends)


def parsed(parts, **options) -> list[Event]:
    parser = machine(**options)
    return joined([event for part in parts for event in parser.feed(part)] + parser.finish())


def seen(text: str, **options) -> list[Event]:
    """Return the events, which must be equal in one piece, split, and with marker tokens."""
    once = parsed([text], **options)
    marked = text
    for marker, mark in marks_of("qwen3_coder", as_tokens=True).items():
        marked = marked.replace(marker, mark)
    for whole, as_tokens in ((text, False), (marked, True)):
        assert parsed(whole, as_tokens=as_tokens, **options) == once
        for at in range(len(whole) + 1):
            assert parsed([whole[:at], whole[at:]], as_tokens=as_tokens, **options) == once, at
    return once


def weather(**arguments: object) -> list[Event]:
    return [CallStart("weather"), CallPart(json.dumps(arguments))]


CITY = "<parameter=city>\nParis\n</parameter>\n"
UNIT = "<parameter=unit>\nC\n</parameter>\n"
BARE = f"<function=weather>\n{CITY}</function>"
MENDED = {
    "no opener": (f"{BARE}\n</tool_call>", weather(city="Paris")),
    "neither opener nor closer": (BARE, weather(city="Paris")),
    "no opener, no parameters": ("<function=now>\n</function>", [CallStart("now"), CallPart("{}")]),
    "text before and after": (
        f"Let me look.\n\n{BARE}\n</tool_call>\nDone.",
        [Text("Let me look."), *weather(city="Paris"), Text("\nDone.")],
    ),
    "two of them": (f"{BARE}\n</tool_call>\n{BARE}", [*weather(city="Paris")] * 2),
    "after one with its opener": (
        f"<tool_call>\n{BARE}\n</tool_call>\n\n{BARE}\n</tool_call>",
        [*weather(city="Paris")] * 2,
    ),
    "after a thought": (
        f"<think>```\nhm</think>\n\n{BARE}",
        [Reasoning("```\nhm"), *weather(city="Paris")],
    ),
    "after fenced code": (f"```\nx\n```\n{BARE}", [Text("```\nx\n```"), *weather(city="Paris")]),
    "cut in a value": (
        "<function=weather><parameter=city>\nPar",
        [CallStart("weather"), CallPart('{"city": "Par')],
    ),
    "no end of a value, then a parameter": (
        f"<tool_call>\n<function=weather>\n<parameter=city>\nParis\n{UNIT}</function>\n</tool_call>",
        weather(city="Paris", unit="C"),
    ),
    "no end of the last value": (
        f"<tool_call>\n<function=weather>\n{CITY}<parameter=days>\n3\n</function>\n</tool_call>",
        weather(city="Paris", days=3),
    ),
    "no end of any tag": (
        "<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>",
        weather(city="Paris", days=3),
    ),
    "an empty value": (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{UNIT}</function>\n</tool_call>",
        weather(city="", unit="C"),
    ),
    "the next call begins": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</function>\n"
        f"{BARE}\n</tool_call>",
        [*weather(city="Paris")] * 2,
    ),
}


@pytest.mark.parametrize("name", MENDED)
def test_what_the_next_tag_makes_certain_is_read(name) -> None:
    text, expected = MENDED[name]
    assert seen(text) == expected


VALUES = [  # texts within a value that do not end it
    "see <parameter=unit> there",
    "a\n<parameter=other>\nb",
    "a\n<parameter=city>\nb",  # given already: the name of this parameter
    "a\n<parameter=unit",
    "a\n</function>\nb",
    "a\n</function>",
    "a </function>\n</tool_ca",
    "<parameter=",
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_may_hold_the_text_of_tags(value) -> None:
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>"
    assert seen(text + "\n</tool_call>") == weather(city=value)


MENTIONS = [
    "The syntax is <function=weather> with <parameter=city> in it.",
    "<function=weather> is what I call.",
    "Call it so: <function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
    f"Like this:\n```xml\n{BARE}\n```\nI hope that helps.",
    "<function=unknown>\n<parameter=city>\nParis\n</parameter>\n</function>",
    "<function=weather",
    "<function=weather>",
    "<function=weather>\n<param",
    "a <func",
]


@pytest.mark.parametrize("text", MENTIONS)
def test_text_that_mentions_tags_stays_text(text) -> None:
    assert seen(text) == [Text(text)]


def test_nothing_is_mended_under_a_grammar_which_writes_every_tag() -> None:
    assert seen(BARE, mends=False) == [Text(BARE)]
    value = f"Paris\n{UNIT}x"
    text = f"<tool_call>\n<function=weather>\n<parameter=days>\n{value}\n</parameter>\n</function>"
    (_, part) = seen(text + "\n</tool_call>", mends=False, schemas=SCHEMAS)
    assert json.loads(part.text)["days"].startswith("Paris\n<parameter=unit>\nC")


def test_without_tools_nothing_is_a_call() -> None:
    assert seen(BARE, schemas=None) == [Text(BARE)]


def test_a_call_inside_a_thought_needs_its_opener() -> None:
    assert seen(f"<think>hm\n{BARE}\nhm</think>ok") == [Reasoning(f"hm\n{BARE}\nhm"), Text("ok")]


CODER = Served(load_config(None, ["server.parser=qwen3_coder"]), ENGINE)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_client_gets_the_call(stream, size) -> None:
    ids = TOKENIZER.encode(f"Let me look.\n{BARE}\n</tool_call>").ids
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    session = answered([*steps, [END]], served=CODER, tools=[TOOL], stream=stream)
    text, _, calls, reason, _ = message_of(session)
    assert (text, reason) == ("Let me look.", "tool_calls")
    assert calls == [{"name": "weather", "arguments": '{"city": "Paris"}'}]


def test_where_a_grammar_rules_the_text_is_what_it_says(monkeypatch) -> None:
    monkeypatch.setattr("nanovllm.server.orders.structural_tag", lambda *_: "")
    ids = TOKENIZER.encode(BARE).ids
    for fields in ({"parallel_tool_calls": False}, {"response_format": {"type": "json_object"}}):
        session = answered([ids], served=CODER, tools=[TOOL], **fields)
        assert message_of(session)[:3] == (BARE, "", [])


pieces = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=weather>", "<function=now>", "<function="),
        *(
            "</function>",
            "<parameter=city>",
            "<parameter=unit>",
            "<parameter=days>",
            "</parameter>",
        ),
        *("\n", "\n", "\n", "Paris", "3", " ", "```", "text", "<", "</think>", "<think>"),
    ]
)


@given(st.lists(pieces, max_size=25), st.booleans(), st.data())
def test_cuts_change_nothing(parts, as_tokens, data) -> None:
    text = "".join(parts)
    if as_tokens:
        for marker, mark in marks_of("qwen3_coder", as_tokens=True).items():
            text = text.replace(marker, mark)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    once = parsed([text], as_tokens=as_tokens)
    assert parsed(cut, as_tokens=as_tokens) == once == parsed(text, as_tokens=as_tokens)
    writer = WholeWriter(0)
    for event in once:
        writer.write(event, None)
    for call in writer.choice(with_logprobs=False).message.tool_calls or ():
        assert type(json_or_none(call.function.arguments)) in (dict, type(None))
