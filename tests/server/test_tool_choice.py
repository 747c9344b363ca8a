"""Every valid form of tool_choice has one meaning; other values are refused by name."""

from __future__ import annotations

import pytest

from nanovllm.server.errors import ApiError
from nanovllm.server.tool_choice import ToolChoice, tool_choice

NAMES = ["f", "g"]
BOTH = ("f", "g")


def function(name: object) -> dict:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: object, tools: object) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        (None, NAMES, ToolChoice("auto", BOTH)),
        (None, [], ToolChoice("none")),
        ("auto", NAMES, ToolChoice("auto", BOTH)),
        ("none", [], ToolChoice("none")),
        ("none", NAMES, ToolChoice("none")),
        ("required", NAMES, ToolChoice("required", BOTH)),
        (function("g"), NAMES, ToolChoice("required", ("g",), is_named=True)),
        (allowed("auto", [function("g")]), NAMES, ToolChoice("auto", ("g",))),
        (allowed("required", [function("g")] * 2), NAMES, ToolChoice("required", ("g",))),
    ],
)
def test_forms(given, names, expected) -> None:
    assert tool_choice(given, names) == expected


@pytest.mark.parametrize(
    ("given", "names", "param"),
    [
        ("required", [], "tool_choice"),
        ("auto", [], "tool_choice"),
        (function("f"), [], "tool_choice"),
        ("any", NAMES, "tool_choice"),
        ({"type": "x"}, NAMES, "tool_choice"),
        (function("h"), NAMES, "tool_choice.function.name"),
        (function(None), NAMES, "tool_choice.function.name"),
        ({"type": "function", "function": 3}, NAMES, "tool_choice.function"),
        (allowed("none", [function("f")]), NAMES, "tool_choice.allowed_tools.mode"),
        (allowed("auto", []), NAMES, "tool_choice.allowed_tools.tools"),
        (
            allowed("auto", [function("f"), function("h")]),
            NAMES,
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"type": "allowed_tools", "allowed_tools": 5}, NAMES, "tool_choice.allowed_tools.mode"),
    ],
)
def test_refused(given, names, param) -> None:
    with pytest.raises(ApiError) as caught:
        tool_choice(given, names)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)
