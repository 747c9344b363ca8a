"""However a model's output is cut into pieces, the client sees the same."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from nanovllm.registry import resolve
from nanovllm.server.parsers import PARSERS, parser_for
from nanovllm.server.parsers.base import Event, Reasoning, Text, ToolCall

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WHOLE_CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
FRAGMENTS = [*MARKERS, WHOLE_CALL, "<", "</thi", "nk>", "\n", " ", "a", "b c", "{", '{"name": "f"}']
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def merged(events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        assert isinstance(event, ToolCall) or event.text, "an event that says nothing"
        if out and type(out[-1]) is type(event) and not isinstance(event, ToolCall):
            out[-1] = type(event)(out[-1].text + event.text)
        else:
            out.append(event)
    return out


def parsed(name: str, parts, *, in_reasoning=False, tools=True) -> list[Event]:
    parser = resolve(PARSERS, name)(in_reasoning=in_reasoning, tools=tools)
    events = [event for part in parts for event in parser.feed(part)]
    return merged(events + parser.finish())


@pytest.mark.parametrize("name", PARSERS)
@given(text=outputs, data=st.data(), in_reasoning=st.booleans(), tools=st.booleans())
def test_pieces_do_not_matter(name, text, data, in_reasoning, tools) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    once = parsed(name, [text], in_reasoning=in_reasoning, tools=tools)
    assert parsed(name, parts, in_reasoning=in_reasoning, tools=tools) == once
    assert parsed(name, text, in_reasoning=in_reasoning, tools=tools) == once


NUMBERED_CALL = '<tool_call>{"name": "1", "arguments": {"2": 3}}</tool_call>'
numbered = st.lists(
    st.sampled_from([*MARKERS, NUMBERED_CALL, "<", "</thi", "nk>", " ", "4", "5 6", "{"]),
    max_size=12,
)


@pytest.mark.parametrize("name", PARSERS)
@given(text=numbered.map("".join), in_reasoning=st.booleans(), tools=st.booleans())
def test_nothing_is_lost_but_markers_and_white_space(name, text, in_reasoning, tools) -> None:
    seen = ""
    for event in parsed(name, [text], in_reasoning=in_reasoning, tools=tools):
        is_call = isinstance(event, ToolCall)
        seen += f"{event.name} {event.arguments}" if is_call else event.text

    def digits(text: str) -> str:
        return "".join(character for character in text if character.isdigit())

    assert digits(seen) == digits(text)


EXAMPLES = {
    "reasoning the model opens": (
        "<think>\nhm\n</think>\n\nSure.",
        {},
        [Reasoning("hm"), Text("Sure.")],
    ),
    "reasoning the prompt opened": (
        "\nhm, <b>\n</think>\n\nSure.",
        {"in_reasoning": True},
        [Reasoning("hm, <b>"), Text("Sure.")],
    ),
    "an empty thought": ("<think>\n\n</think>\n\nSure.", {}, [Text("Sure.")]),
    "cut inside the thought": ("<think>hm, ", {}, [Reasoning("hm, ")]),
    "think in the middle is text": ("Say <think>.", {}, [Text("Say <think>.")]),
    "text verbatim": ("  a\n\n<b> \n", {}, [Text("  a\n\n<b> \n")]),
    "two calls": (
        f"Now:\n{CALL}\n{CALL}\n",
        {},
        [Text("Now:"), ToolCall("add", '{"a": 1}'), ToolCall("add", '{"a": 1}')],
    ),
    "a call after a thought": (
        f"<think>hm</think>{CALL}",
        {},
        [Reasoning("hm"), ToolCall("add", '{"a": 1}')],
    ),
    "a call without arguments": (
        '<tool_call>{"name": "f"}</tool_call>',
        {},
        [ToolCall("f", "{}")],
    ),
    "keys the other way round": (
        '<tool_call>{"arguments": {"name": "x"}, "name": "f"}</tool_call>',
        {},
        [ToolCall("f", '{"name": "x"}')],
    ),
    "a broken call is shown": (
        '<tool_call>{"name": 1}</tool_call>',
        {},
        [Text('<tool_call>{"name": 1}</tool_call>')],
    ),
    "a call nested without end is shown": (
        f'<tool_call>{{"name": "f", "arguments": {"[" * 50_000}</tool_call>',
        {},
        [Text(f'<tool_call>{{"name": "f", "arguments": {"[" * 50_000}</tool_call>')],
    ),
    "an unfinished call is shown": (
        'a <tool_call>{"na',
        {},
        [Text('a<tool_call>{"na')],
    ),
    "no tools, no calls": (f"a {CALL} b", {"tools": False}, [Text(f"a {CALL} b")]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_qwen3(name) -> None:
    text, options, expected = EXAMPLES[name]
    assert parsed("qwen3", [text], **options) == expected


def test_deepseek_r1_has_thoughts_but_no_calls() -> None:
    text = f"hm</think>\n\nSure. {CALL}"
    assert parsed("deepseek_r1", [text], in_reasoning=True) == [
        Reasoning("hm"),
        Text(f"Sure. {CALL}"),
    ]


def test_plain_is_verbatim() -> None:
    text = f"<think>hm</think>\n{CALL}"
    assert parsed("plain", [text]) == [Text(text)]


def test_ordinary_text_is_never_held_back() -> None:
    parser = resolve(PARSERS, "qwen3")(in_reasoning=False, tools=True)
    assert [parser.feed(part) for part in ("Hel", "lo", ", x", " <", "b>")] == [
        [Text("Hel")],
        [Text("lo")],
        [Text(", x")],
        [],
        [Text(" <b>")],
    ]


def test_the_reasoning_state_is_known_between_pieces() -> None:
    parser = resolve(PARSERS, "qwen3")(in_reasoning=False, tools=False)
    states = []
    for part in ("<think>", "hm", "</th", "ink>", "Sure"):
        parser.feed(part)
        states.append(parser.in_reasoning)
    assert states == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("architecture", "model", "expected"),
    [
        ("Qwen3ForCausalLM", "Qwen/Qwen3-8B", "qwen3"),
        ("LlamaForCausalLM", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseek_r1"),
        ("LlamaForCausalLM", "meta-llama/Llama-3.1-8B", "plain"),
    ],
)
def test_auto(architecture, model, expected) -> None:
    assert parser_for([architecture], model) == expected
