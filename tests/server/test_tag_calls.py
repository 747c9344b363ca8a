"""Call grammars of families whose calls have no markers, and of families without calls."""

from __future__ import annotations

import pytest

from nanovllm.server.errors import ApiError
from nanovllm.server.parsers.base import Text
from tests.server.test_tag import (
    ONE,
    PERSON,
    TOOLS,
    TWO,
    allows,
    called,
    matcher,
    said,
)


def test_llama_calls_once_and_a_text_that_begins_as_a_call_is_one() -> None:
    one, two = (f'{{"name": "{name}", "parameters": {given}}}' for name, given in (ONE, TWO))
    fields = {"tools": TOOLS, "tool_choice": "required", "family": "llama3"}
    assert said(one, **fields) == called(*ONE)
    for bad in ("hello", "", one + two, one + "; " + two, one + " hello", "Sure.\n" + one):
        assert not allows(bad, **fields), bad
    assert not allows('{"name": "add", "parameters": {"a": "x"}}', **fields)
    assert not allows('{"name": "other", "parameters": {}}', **fields)
    named = fields | {"tool_choice": {"type": "function", "function": {"name": "add"}}}
    assert said(two, **named) == called(*TWO)
    auto = {"tools": TOOLS, "family": "llama3"}
    assert said(one, **auto) == called(*ONE)
    assert said("So:\n" + one, **auto) == [Text("So:\n" + one)]
    assert said("hello {x}", **auto) == [Text("hello {x}")]
    assert allows("", **auto)
    assert not allows('{"name": "add", "parameters": {"a": "x"}}', **auto)
    both = {"tools": TOOLS, "family": "llama3", "response_format": PERSON}
    text = '{"name": "Ada", "age": 36}'
    assert said(text, **both) == [Text(text)] and said(one, **both) == called(*ONE)


def test_calls_need_a_family_that_calls() -> None:
    with pytest.raises(ApiError, match="tool_choice needs calls: this model has no syntax"):
        matcher("plain", tools=TOOLS, tool_choice="required")
    assert allows("hello", family="plain", tools=TOOLS)
