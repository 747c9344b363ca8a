"""Calls of GLM: whole, cut short, and texts that only look like calls."""

from __future__ import annotations

import pytest

from nanovllm.server.parsers.base import Reasoning, Text
from tests.server.parsers.generated_outputs import glm_call as glm
from tests.server.parsers.test_families import call, parsed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>f", [Text("<tool_call>f")]),
        ("see <tool_call> and <b> here", [Text("see <tool_call> and <b> here")]),
        ("<tool_call>is a tag</tool_call>", [Text("<tool_call>is a tag</tool_call>")]),
        ("<tool_call>f\n", [Text("<tool_call>f\n")]),
        ("<tool_call>f<arg", [Text("<tool_call>f<arg")]),
        ("<tool_call>f<arg_key>", call("f", "{")),
        ("<tool_call>f<arg_key>ci", call("f", '{"ci')),
        ("<tool_call>f<arg_key>city</arg_key>\n<arg_va", call("f", '{"city"')),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>ab", call("f", '{"x": "ab')),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>ab</arg", call("f", '{"x": "ab</arg')),
        ("<tool_call>f<arg_key>i</arg_key><arg_value>12", call("f", '{"i": 12')),
        (
            "<tool_call>f<arg_key>x</arg_key>oops</tool_call>",
            [Text("<tool_call>f<arg_key>x</arg_key>oops</tool_call>")],
        ),
        (
            "<tool_call>f<arg_key>x</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>",
            call("f", '{"x": "a</arg_value>b"}'),
        ),
        (
            f"Now:\n{glm(('x', '1'), ('x y', 'ü'), ('i', '3'))}{glm()}\n",
            [Text("Now:"), *call("f", '{"x": "1", "x y": "ü", "i": 3}'), *call("f", "{}")],
        ),
        (f"<think>hm\n{glm()}ok", [Reasoning("hm"), *call("f", "{}"), Text("ok")]),
    ],
)
def test_glm(text, expected) -> None:
    schema = {"x": {"type": "string"}, "i": {"type": "integer"}}
    parts = parsed("glm4_7", [text], schema=schema)
    assert parts == parsed("glm4_7", text, schema=schema) == expected
