"""tool_choice in its four forms: the functions that may be called, and if one must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from nanovllm.server.errors import bad_value, invalid_field

FORMS = "'none', 'auto', 'required', a function or allowed_tools"


class ToolChoice(Struct, frozen=True):
    mode: str  # none, auto, required
    names: tuple[str, ...] = ()  # of the functions that may be called
    is_named: bool = False  # exactly one call, of the single name


def tool_choice(choice: str | dict[str, Any] | None, names: Sequence[str]) -> ToolChoice:
    """Return the choice among `names`, those of the request's tools. Raise ApiError."""
    names = tuple(names)
    if choice == "none" or (choice is None and not names):
        return ToolChoice("none")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if choice not in (None, "auto", "required") and kind not in ("function", "allowed_tools"):
        raise bad_value("tool_choice", FORMS, choice)
    if not names:
        raise invalid_field("tool_choice", "must be left out or 'none' if there are no tools")
    if not isinstance(choice, dict):
        return ToolChoice("required" if choice == "required" else "auto", names)
    if kind == "function":
        return ToolChoice("required", (_name(choice, "tool_choice", names),), is_named=True)
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    where = "tool_choice.allowed_tools"
    if mode not in ("auto", "required"):
        raise bad_value(f"{where}.mode", "'auto' or 'required'", mode)
    if not isinstance(tools, list) or not tools:
        raise bad_value(f"{where}.tools", "a list of at least one function", tools)
    allowed_names = [_name(tool, f"{where}.tools[{at}]", names) for at, tool in enumerate(tools)]
    return ToolChoice(mode, tuple(dict.fromkeys(allowed_names)))


def _name(choice: object, where: str, names: tuple[str, ...]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict):
        raise bad_value(
            f"{where}.function", "an object with the name of one of the tools", function
        )
    name = function.get("name")
    if name not in names:
        raise bad_value(f"{where}.function.name", "the name of one of the tools", name)
    return str(name)
