"""Parsers of all families, on outputs that other servers have parsed incorrectly."""

from __future__ import annotations

import json

import pytest

from nanovllm.server.parsers import PARSERS
from nanovllm.server.parsers.base import CallPart, CallStart, Event, Reasoning, Text
from nanovllm.server.parsers.machine import OutputParser
from nanovllm.server.parsers.markers import CALL, CALL_END, CALLS_BEGIN, SEPARATOR
from tests.server.parsers.generated_outputs import family_of, glm_call as glm, marks_of


def merged(events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        assert isinstance(event, CallStart) or event.text, "an event that says nothing"
        if out and type(out[-1]) is type(event) and not isinstance(event, CallStart):
            out[-1] = type(event)(out[-1].text + event.text)
        else:
            out.append(event)
    return out


def machine(name: str, *, turn="", tools=True, schema=None, as_tokens=False) -> OutputParser:
    schemas = {"f": {"properties": schema or {}}} if tools else None
    return OutputParser(family_of(name), marks_of(name, as_tokens=as_tokens), turn, schemas)


def parsed(name: str, parts, **options) -> list[Event]:
    """Return the events. Markers in the parts are ordinary text, unless marked as tokens."""
    parser = machine(name, **options)
    return merged([event for part in parts for event in parser.feed(part)] + parser.finish())


def seen(name: str, text: str, **options) -> list[Event]:
    """Return the events, which must be equal for one piece, single characters and marker tokens."""
    once = parsed(name, [text], **options)
    assert parsed(name, text, **options) == once
    marked = text
    for marker, mark in marks_of(name, as_tokens=True).items():
        marked = marked.replace(marker, mark)
    assert parsed(name, marked, as_tokens=True, **options) == once
    return once


def call(name: str, arguments: str) -> list[Event]:
    return [CallStart(name), CallPart(arguments)]


def tool_call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ADD = tool_call('{"name": "add", "arguments": {"a": 1}}')
ADDED = call("add", '{"a": 1}')
QWEN3 = {
    "reasoning the model opens": (
        "<think>\nhm\n</think>\n\nSure.",
        {},
        [Reasoning("hm"), Text("Sure.")],
    ),
    "reasoning the prompt opened": (
        "\nhm, <b>\n</think>\n\nSure.",
        {"turn": "<think>\n"},
        [Reasoning("hm, <b>"), Text("Sure.")],
    ),
    "the prompt closed it": (
        "Sure. </thin",
        {"turn": "<think>\n\n</think>\n\n"},
        [Text("Sure. </thin")],
    ),
    "the prompt says what it said": (
        " more</think>Sure.",
        {"turn": "<think>\nhm"},
        [Reasoning(" more"), Text("Sure.")],
    ),
    "opened twice": ("<think>hm</think>x", {"turn": "<think>\n"}, [Reasoning("hm"), Text("x")]),
    "closed twice": ("<think>hm</think>\n</think>\nx", {}, [Reasoning("hm"), Text("x")]),
    "an empty thought": ("<think>\n\n</think>\n\nSure.", {}, [Text("Sure.")]),
    "cut inside the thought": ("<think>hm, ", {}, [Reasoning("hm, ")]),
    "cut inside its end": ("<think>hm</thi", {}, [Reasoning("hm</thi")]),
    "think in the middle is text": ("Say <think>.", {}, [Text("Say <think>.")]),
    "text verbatim": ("  a\n\n<b> \n", {}, [Text("  a\n\n<b> \n")]),
    "two calls": (f"Now:\n{ADD}\n{ADD}\n", {}, [Text("Now:"), *ADDED, *ADDED]),
    "before, between, after": (
        f"Now:\n{ADD}\n\nand {ADD}{ADD} done\n",
        {},
        [Text("Now:"), *ADDED, Text("\n\nand"), *ADDED, *ADDED, Text(" done\n")],
    ),
    "a call after a thought": (f"<think>hm</think>{ADD}", {}, [Reasoning("hm"), *ADDED]),
    "a call ends a thought": (
        f"<think>hm\n{ADD}\nSure.",
        {},
        [Reasoning("hm"), *ADDED, Text("Sure.")],
    ),
    "no arguments": (tool_call('{"name": "f"}'), {}, call("f", "{}")),
    "null arguments": (tool_call('{"arguments": null, "name": "f"}'), {}, call("f", "{}")),
    "keys the other way round": (
        tool_call('{"arguments": {"name": "x"}, "name": "f"}'),
        {},
        call("f", '{"name": "x"}'),
    ),
    "an end tag in a string": (
        tool_call('{"name": "f", "arguments": {"x": "a</tool_call>b"}}') + "ok",
        {},
        [*call("f", '{"x": "a</tool_call>b"}'), Text("ok")],
    ),
    "no line breaks": (
        '<tool_call>{"name":"f","arguments":{}}</tool_call>',
        {},
        call("f", "{}"),
    ),
    "an unknown name": (tool_call('{"name": "g", "arguments": {}}'), {}, call("g", "{}")),
    "one of two is broken": (
        tool_call("{oops}") + "\n" + ADD,
        {},
        [Text("<tool_call>\n{oops}\n</tool_call>"), *ADDED],
    ),
    "no call at all": (
        "Use the <tool_call> tag, then {x}.",
        {},
        [Text("Use the <tool_call> tag, then {x}.")],
    ),
    "no call in a thought": (
        "<think>the <tool_call> tag</think>ok",
        {},
        [Reasoning("the <tool_call> tag"), Text("ok")],
    ),
    "a name that is none": (
        '<tool_call>{"name": 1}</tool_call>',
        {},
        [Text('<tool_call>{"name": 1}</tool_call>')],
    ),
    "arguments that are no object": (
        tool_call('{"name": "f", "arguments": "x"}'),
        {},
        [Text(tool_call('{"name": "f", "arguments": "x"}'))],
    ),
    "nested without end": (
        f'<tool_call>{{"name": "f", "x": {"[" * 50_000}',
        {},
        [Text(f'<tool_call>{{"name": "f", "x": {"[" * 50_000}')],
    ),
    "cut before its name": ('a <tool_call>{"na', {}, [Text('a <tool_call>{"na')]),
    "cut in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": [1, "x\\u00',
        {},
        call("f", '{"a": [1, "x\\u00'),
    ),
    "cut in a number": (
        '<tool_call>{"name": "f", "arguments": {"a": 1, "b": 20',
        {},
        call("f", '{"a": 1, "b": 20'),
    ),
    "broken after its start": (
        tool_call('{"name": "f", "arguments": {"a": 1, b: 2}}'),
        {},
        call("f", '{"a": 1, b: 2}'),
    ),
    "parameters instead of arguments": (
        tool_call('{"name": "f", "parameters": {"city": "Oslo"}}'),
        {},
        call("f", '{"city": "Oslo"}'),
    ),
    "arguments as a JSON string": (
        tool_call('{"name": "f", "arguments": "{\\"city\\": \\"Oslo\\"}"}'),
        {},
        call("f", '{"city": "Oslo"}'),
    ),
    "a JSON string, and the name after it": (
        tool_call('{"arguments": "{\\"city\\": \\"Oslo\\"}", "name": "f"}'),
        {},
        call("f", '{"city": "Oslo"}'),
    ),
    "an empty string": (tool_call('{"name": "f", "arguments": ""}'), {}, call("f", "{}")),
    "a list around calls": (
        tool_call('[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]') + "ok",
        {},
        [*call("f", '{"a": 1}'), *call("g", "{}"), Text("ok")],
    ),
    "two calls in one tag": (
        tool_call('{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}'),
        {},
        [*call("f", '{"a": 1}'), *call("g", "{}")],
    ),
    "as the API shows calls": (
        tool_call('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}'),
        {},
        call("f", '{"a": 1}'),
    ),
    "the name as function": (
        tool_call('{"function": "f", "parameters": {"a": 1}}'),
        {},
        call("f", '{"a": 1}'),
    ),
    "null, then the alias": (
        tool_call('{"name": "f", "arguments": null, "parameters": {"a": 1}}'),
        {},
        call("f", '{"a": 1}'),
    ),
    "another word for arguments": (
        tool_call('{"name": "f", "args": {"city": "Oslo"}}'),
        {},
        [Text(tool_call('{"name": "f", "args": {"city": "Oslo"}}'))],
    ),
    "arguments without a word": (
        tool_call('{"name": "f", "city": "Oslo"}'),
        {},
        [Text(tool_call('{"name": "f", "city": "Oslo"}'))],
    ),
    "arguments as a list": (
        tool_call('{"name": "f", "arguments": ["Oslo"]}'),
        {},
        [Text(tool_call('{"name": "f", "arguments": ["Oslo"]}'))],
    ),
    "arguments twice": (
        tool_call('{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}'),
        {},
        [*call("f", '{"a": 1}'), Text(', "parameters": {"b": 2}}\n</tool_call>')],
    ),
    "cut in the second of a list": (
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": [1, ',
        {},
        [*call("f", "{}"), *call("g", '{"b": [1, ')],
    ),
    "cut in a key": (
        '<tool_call>{"name": "f", "arguments": {"a": 2, "b',
        {},
        call("f", '{"a": 2, "b'),
    ),
    "cut after a number": (
        '<tool_call>{"name": "f", "arguments": {"a": 2, "b": 111',
        {},
        call("f", '{"a": 2, "b": 111'),
    ),
    "cut in a word": (
        '<tool_call>{"name": "f", "arguments": {"a": tru',
        {},
        call("f", '{"a": tru'),
    ),
    "cut in a JSON string": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2, \\"b\\": 11',
        {},
        call("f", '{"a": 2, "b": 11'),
    ),
    "cut after the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": 2}',
        {},
        call("f", '{"a": 2}'),
    ),
    "Python's words": (
        tool_call('{"name": "f", "arguments": {"a": True}}') + "ok",
        {},
        [*call("f", '{"a": True}'), Text("ok")],
    ),
    "arguments too deep for a client": (
        tool_call(f'{{"name": "f", "arguments": {{"a": {"[" * 200}{"]" * 200}}}}}'),
        {},
        call("f", f'{{"a": {"[" * 200}{"]" * 200}}}'),
    ),
    "the last brace is missing": (
        tool_call('{"name": "f", "arguments": {"a": 1}') + "ok",
        {},
        [*call("f", '{"a": 1}'), Text("ok")],
    ),
    "slips in strings": (
        tool_call('{"name": "f", "arguments": {"a": "1\n2\\d"}}'),
        {},
        call("f", '{"a": "1\\n2\\\\d"}'),
    ),
    "half a pair": (
        tool_call('{"name": "f", "arguments": {"a": "\\ud83dx\\ud83d\\ude00\\ude00"}}'),
        {},
        call("f", '{"a": "\\ufffdx\\ud83d\\ude00\\ufffd"}'),
    ),
    "white space that JSON does not know": (
        tool_call('{"name": "f", "arguments": {"a":\u00a01}}'),
        {},
        call("f", '{"a":\u00a01}'),
    ),
    "no tools, no calls": (f"a {ADD} b", {"tools": False}, [Text(f"a {ADD} b")]),
    "half a marker at the end": ("a <tool_c", {}, [Text("a <tool_c")]),
    "a bracket at the end": (f"{ADD}\na <", {}, [*ADDED, Text("a <")]),
}


@pytest.mark.parametrize("name", QWEN3)
def test_qwen3(name) -> None:
    text, options, expected = QWEN3[name]
    assert seen("qwen3", text, **options) == expected


def coder(*parameters: str) -> str:
    return tool_call("\n".join(("<function=f>", *parameters, "</function>")))


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>"


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
VALUES = [  # schema, text, value
    (NULLABLE, "Paris", "Paris"),
    (NULLABLE, "none", "none"),
    (NULLABLE, "null", None),
    (NULLABLE, "nullable", "nullable"),
    ({"type": ["null", "string"]}, "None", "None"),
    ({"type": ["null", "integer"]}, "None", None),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, ' {"a": 1}\n', ' {"a": 1}\n'),
    ({"type": "string"}, "a</parameter>b", "a</parameter>b"),
    ({"type": "string"}, 'say "hi"\t\\n', 'say "hi"\t\\n'),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "number"}, "1.50", 1.5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": ["integer", "string"]}, "5", 5),
    ({"type": ["integer", "string"]}, "five", "five"),
    ({"type": "object"}, '{"a": [1, "\\n"]}', {"a": [1, "\n"]}),
    ({"type": "object"}, "[" * 100_000, "[" * 100_000),
    ({"enum": ["a", None]}, "null", None),
    ({}, "[1]", [1]),
    ({}, "none", "none"),
]


@pytest.mark.parametrize(("schema", "text", "meaning"), VALUES, ids=lambda x: str(x)[:30])
@pytest.mark.parametrize("family", ["qwen3_coder", "minimax_m2", "glm4_7"])
def test_a_parameter_means_what_its_schema_says(family, schema, text, meaning) -> None:
    block = coder(parameter("x", text))
    if family == "minimax_m2":
        block = minimax(f'<parameter name="x">{text}</parameter>')
    if family == "glm4_7":
        block = glm(("x", text))
    start, part = seen(family, block, schema={"x": schema})
    assert start == CallStart("f")
    assert json.loads(part.text) == {"x": meaning}


def minimax(*parameters: str) -> str:
    body = "\n".join(('<invoke name="f">', *parameters, "</invoke>"))
    return f"<minimax:tool_call>\n{body}\n</minimax:tool_call>"


def test_minimax_calls_stand_in_one_block() -> None:
    text = f"hm</think>\n\nNow:\n{minimax()}".replace("</invoke>", '</invoke>\n<invoke name="g">')
    text = text.replace("\n</minimax", "</invoke>\n</minimax")
    assert seen("minimax_m2", text, turn="<think>\n") == [
        Reasoning("hm"),
        Text("Now:"),
        *call("f", "{}"),
        *call("g", "{}"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>\n<function=f", [Text("<tool_call>\n<function=f")]),
        ("<tool_call>\n<function=", [Text("<tool_call>\n<function=")]),
        ("the <tool_call> and <function= tags", [Text("the <tool_call> and <function= tags")]),
        ("<tool_call><function=f>", call("f", "{")),
        ("<tool_call><function=f>\n<para", call("f", "{")),
        ("<tool_call><function=f>\n<parameter=ci", call("f", '{"ci')),
        ("<tool_call><function=f>\n<parameter=x>\nab", call("f", '{"x": "ab')),
        ("<tool_call><function=f>\n<parameter=x>\nab\n</para", call("f", '{"x": "ab\\n</para')),
        ("<tool_call><function=f>\n<parameter=x>\nab\n</parameter>", call("f", '{"x": "ab"')),
        (
            "<tool_call><function=f>\n<parameter=x>\nab\n</parameter>\n</fun",
            call("f", '{"x": "ab"'),
        ),
        ("<tool_call><function=f>\n<parameter=i>\n12", call("f", '{"i": 12')),
        ("<tool_call><function=f>\n<parameter=i>\n", call("f", '{"i": ')),
        (
            "<tool_call><function=f>oops</function></tool_call>",
            [Text("<tool_call><function=f>oops</function></tool_call>")],
        ),
        (
            '<tool_call><function=f>{"x": "Oslo"}</function></tool_call>',
            [Text('<tool_call><function=f>{"x": "Oslo"}</function></tool_call>')],
        ),
        (
            "<tool_call><function=f>\n<parameter=x>\nab\n</parameter>\n<other>1</function></tool_call>",
            call("f", '{"x": "ab\\n</parameter>\\n<other>1</function></tool_call>'),
        ),
        (
            coder(parameter("x", "1"), parameter("x y", "ü"), parameter("i", "3")) + "\n",
            call("f", '{"x": "1", "x y": "ü", "i": 3}'),
        ),
        (f"<think>hm\n{coder()}", [Reasoning("hm"), *call("f", "{}")]),
    ],
)
def test_qwen3_coder(text, expected) -> None:
    schema = {"x": {"type": "string"}, "i": {"type": "integer"}}
    assert seen("qwen3_coder", text, schema=schema) == expected


NO_CALLS = ("plain", "thinking")


@pytest.mark.parametrize("name", [name for name in PARSERS if name not in NO_CALLS])
def test_a_call_is_open_until_its_arguments_are_whole(name) -> None:
    """A call is incomplete until its arguments end, as a stop string may end the text anywhere."""
    written = {
        "minimax_m2": minimax('<parameter name="a">1</parameter>'),
        "qwen3_coder": coder(parameter("a", "1")),
        "glm4_7": glm(("a", "1")),
        "deepseek_r1": f'{CALLS_BEGIN}{CALL}x{SEPARATOR}f\n```json\n{{"a": "1"}}\n```{CALL_END}',
        "deepseek_v3_1": f'{CALLS_BEGIN}{CALL}f{SEPARATOR}{{"a": "1"}}{CALL_END}',
        "llama3": '{"name": "f", "parameters": {"a": "1"}}',
        "qwen3": tool_call('{"name": "f", "arguments": {"a": "1"}}'),
    }[name]
    assert "".join(e.text for e in seen(name, written, turn="</think>")[1:]) == '{"a": "1"}'
    states = set()
    for end in range(len(written) + 1):
        parser = machine(name, turn="</think>")
        events = parser.feed(written[:end]) + parser.finish()
        arguments = "".join(event.text for event in events if isinstance(event, CallPart))
        assert parser.is_amid_call == (bool(arguments) and arguments != '{"a": "1"}'), arguments
        states.add(parser.is_amid_call)
    assert states == {True, False}


@pytest.mark.parametrize("name", [name for name in PARSERS if name not in NO_CALLS])
def test_markers_typed_as_text_are_text_where_they_are_tokens(name) -> None:
    text = f"</think>{family_of(name).opener}{ADD}<think>"
    assert parsed(name, ["x" + text], as_tokens=True) == [Text("x" + text)]


def test_under_a_grammar_markers_count_however_they_were_written() -> None:
    marks = marks_of("qwen3", as_tokens=True)
    expected = [Reasoning("hm"), *ADDED]
    for think in ("<think>", marks["<think>"]):
        for end in ("</think>", marks["</think>"]):
            parser = OutputParser(family_of("qwen3"), marks, "", {}, is_spelled=True)
            text = f"{think}hm{end}{ADD}"
            assert merged([e for c in text for e in parser.feed(c)] + parser.finish()) == expected


def test_plain_is_verbatim() -> None:
    text = f"<think>hm</think>\n{ADD}"
    assert parsed("plain", [text]) == [Text(text)]


def test_ordinary_text_is_never_held_back() -> None:
    parser = machine("qwen3")
    assert [parser.feed(part) for part in ("Hel", "lo", ", x", " <", "b>")] == [
        [Text("Hel")],
        [Text("lo")],
        [Text(", x")],
        [],
        [Text(" <b>")],
    ]


def test_arguments_stream_as_they_come() -> None:
    parser = machine("qwen3")
    parser.feed('<tool_call>{"name": "f", "arguments"')
    parts = [parser.feed(part) for part in (": {", '"a": "x', "y", '", "b', '": 12', "}")]
    texts = ["".join(event.text for event in part if type(event) is CallPart) for part in parts]
    assert texts == ["{", '"a": "x', "y", '"', "", ', "b": 12}']
    parser = machine("qwen3_coder", schema={"i": {"type": "integer"}})
    parser.feed("<tool_call><function=f>\n<parameter=")
    steps = (
        "x>\n",
        "ab",
        "\n",
        "c<",
        "\n</parameter>",
        "\n<parameter=i>",
        "12",
        "\n</parameter></function>",
    )
    parts = [parser.feed(part) for part in steps]
    texts = ["".join(event.text for event in part if type(event) is CallPart) for part in parts]
    assert texts == ["{", '"x": "ab', "", "\\nc", "", '<"', "", ', "i": 12}']


def test_the_reasoning_state_is_known_between_pieces() -> None:
    parser = machine("qwen3", tools=False)
    states = []
    for part in ("<think>", "hm", "</th", "ink>", "Sure"):
        parser.feed(part)
        states.append(parser.in_reasoning)
    assert states == [True, True, True, False, False]


def test_the_last_turn_is_found_in_the_prompt() -> None:
    qwen3 = family_of("qwen3")
    history = "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n"
    assert qwen3.last_turn(history) == ""
    assert qwen3.last_turn(history + "<think>\n") == "<think>\n"
    assert qwen3.last_turn(history + "<think>x<|im_end|>\n") == "\n"
    assert qwen3.last_turn("### User: <think>\n### Model:") == ""
    assert qwen3.last_turn("### User: hm\n### Model: <think>\n") == "<think>"
