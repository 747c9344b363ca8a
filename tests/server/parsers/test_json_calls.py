"""Calls of DeepSeek and of Llama: JSON between markers, and JSON without markers."""

from __future__ import annotations

import pytest

from nanovllm.server.parsers.base import CallStart, Reasoning, Text
from nanovllm.server.parsers.machine import OutputParser
from nanovllm.server.parsers.markers import CALL, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from tests.server.parsers.generated_outputs import family_of, marks_of
from tests.server.parsers.test_families import call, machine, merged, seen


def fenced(name: str, arguments: str) -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"hm</think>\n\n{CALLS_BEGIN}{fenced('f', '{}')}\n{fenced('g', '{}')}{CALLS_END}",
            [Reasoning("hm"), *call("f", "{}"), *call("g", "{}")],
        ),
        ("</think>```py\n1\n```\n", [Text("```py\n1\n```\n")]),  # fences stay
        (
            f"</think>{CALLS_BEGIN}{CALL}function{SEPARATOR}f\n{{}}{CALL_END}{CALLS_END}",
            call("f", "{}"),
        ),
        (
            f"hm{CALLS_BEGIN}{fenced('f', '{}')}\n{CALL}function{SEPARATOR}g",
            [Reasoning("hm"), *call("f", "{}"), Text(f"{CALL}function{SEPARATOR}g")],
        ),
    ],
)
def test_deepseek_r1(text, expected) -> None:
    assert seen("deepseek_r1", text, turn="<think>\n") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{CALLS_BEGIN}{CALL}f{SEPARATOR}{{}}{CALL_END}{CALL}g{SEPARATOR}"
            f'{{"a": 1}}{CALL_END}{CALLS_END}',
            [*call("f", "{}"), *call("g", '{"a": 1}')],
        ),
        (f'{CALLS_BEGIN}{CALL}f{SEPARATOR}{{"a": 2, "b": 11', call("f", '{"a": 2, "b": 11')),
        (
            f'{CALLS_BEGIN}{CALL}f{SEPARATOR}"{{\\"a\\": 1}}"{CALL_END}{CALLS_END}',
            call("f", '{"a": 1}'),
        ),
        (f'{CALLS_BEGIN}{CALL}f{SEPARATOR}"{{\\"a\\": 1, b: 2', call("f", '{"a": 1, b: 2')),
        (f'{CALLS_BEGIN}{CALL}f{SEPARATOR}"{{\\"a\\": 1}} or 2', call("f", '{"a": 1} or 2')),
        (
            f'{CALLS_BEGIN}{CALL}f{SEPARATOR}{{"a": 1, b: 2}}{CALL_END}{CALLS_END}ok',
            [*call("f", '{"a": 1, b: 2}'), Text("ok")],
        ),
        (
            f"{CALLS_BEGIN}{CALL}f{SEPARATOR}Oslo{CALL_END}{CALLS_END}",
            [Text(f"{CALLS_BEGIN}{CALL}f{SEPARATOR}Oslo{CALL_END}{CALLS_END}")],
        ),
    ],
)
@pytest.mark.parametrize("name", ["deepseek_r1", "deepseek_v3_1"])
def test_deepseek_v3_1(name, text, expected) -> None:
    assert seen(name, text, turn="</think>") == expected


def test_a_fence_ends_broken_arguments() -> None:
    text = f"{CALLS_BEGIN}{fenced('f', '{a: 1}')}\n{fenced('g', '{}')}{CALLS_END}"
    expected = [*call("f", "{a: 1}"), *call("g", "{}")]
    assert seen("deepseek_r1", text, turn="</think>") == expected


EMPTY = {
    "deepseek_v3_1": [SEPARATOR],
    "deepseek_r1": [f"\n```json\n{end}" for end in ("```", "\n```", "\n\n```\n", "")] + ["\n"],
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_deepseek_call_may_have_empty_arguments(name) -> None:
    before = CALL if name == "deepseek_v3_1" else f"{CALL}function{SEPARATOR}"
    for after in EMPTY[name]:
        text = f"{CALLS_BEGIN}{before}f{after}{CALL_END}\n{before}f{after}{CALL_END}{CALLS_END}ok"
        assert seen(name, text, turn="</think>") == [*call("f", "{}") * 2, Text("ok")], after
        unknown = f"{CALLS_BEGIN}{before}g{after}{CALL_END}{CALLS_END}"
        assert seen(name, unknown, turn="</think>") == [Text(unknown)], after
        for at in range(len(text)):
            parser = machine(name, turn="</think>")
            events = merged(parser.feed(text[:at]) + parser.feed(text[at:]) + parser.finish())
            assert events == [*call("f", "{}") * 2, Text("ok")], at
            cut = machine(name, turn="</think>")
            begun = merged(cut.feed(text[:at]) + cut.finish())
            assert sum(isinstance(event, CallStart) for event in begun) <= 2


BARE = '{"name": "f", "parameters": {"city": "Oslo"}}'
LLAMA = {
    "a call": (BARE, call("f", '{"city": "Oslo"}')),
    "arguments": (BARE.replace("parameters", "arguments"), call("f", '{"city": "Oslo"}')),
    "with its tag": ("<|python_tag|>" + BARE, call("f", '{"city": "Oslo"}')),
    "with its type": (
        '{"type": "function", "name": "f", "parameters": {"city": "Oslo"}}',
        call("f", '{"city": "Oslo"}'),
    ),
    "two calls": (f"{BARE}; {BARE}", [*call("f", '{"city": "Oslo"}')] * 2),
    "two lines": (f"{BARE}\n{BARE}", [*call("f", '{"city": "Oslo"}')] * 2),
    "a list": (f"[{BARE}, {BARE}]", [*call("f", '{"city": "Oslo"}')] * 2),
    "text before": (f"Sure.\n{BARE}", [Text("Sure."), *call("f", '{"city": "Oslo"}')]),
    "cut": (BARE[:-5], call("f", '{"city": "Os')),
    "text after": (f"{BARE}\nok", [*call("f", '{"city": "Oslo"}'), Text("ok")]),
    "another function": (BARE.replace('"f"', '"g"'), [Text(BARE.replace('"f"', '"g"'))]),
    "an answer in JSON": ('{"name": "Bob", "age": 3}', [Text('{"name": "Bob", "age": 3}')]),
    "a list of numbers": ("[1, 2]", [Text("[1, 2]")]),
    "in a line": (f"Say {BARE}", [Text(f"Say {BARE}")]),
    "in a fence": (f"```\n{BARE}\n```", [Text(f"```\n{BARE}\n```")]),
    "cut before its name": ('{"na', [Text('{"na')]),
    "a built-in tool": (
        '<|python_tag|>brave_search.call(query="x")',
        [Text('<|python_tag|>brave_search.call(query="x")')],
    ),
}


@pytest.mark.parametrize("name", LLAMA)
def test_llama3(name) -> None:
    text, expected = LLAMA[name]
    assert seen("llama3", text) == expected
    assert seen("llama3", text, tools=False) == [Text(text)]


def test_under_a_grammar_a_call_without_an_opener_stands_at_the_beginning() -> None:
    family, marks = family_of("llama3"), marks_of("llama3", as_tokens=True)
    for text, expected in (
        (BARE, call("f", '{"city": "Oslo"}')),
        (f"Sure.\n{BARE}", [Text(f"Sure.\n{BARE}")]),
    ):
        parser = OutputParser(family, marks, "", {"f": {}}, mends=False)
        assert merged(parser.feed(text) + parser.finish()) == expected
