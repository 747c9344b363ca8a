"""Incremental output parsing without I/O: what parsers return, and what they promise.

A parser is fed text as it arrives and returns events. However the text is cut into pieces, the
events add up to the same: a parser that peeks at piece boundaries is wrong.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Text(Struct, frozen=True):
    text: str


class Reasoning(Struct, frozen=True):
    text: str


class ToolCall(Struct, frozen=True):
    name: str
    arguments: str  # JSON


Event = Text | Reasoning | ToolCall


class OutputParser(Protocol):
    in_reasoning: bool  # whether the text fed so far ends inside reasoning

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The stream ended: release whatever was held back."""
        ...


class ParserFactory(Protocol):
    def __call__(self, *, in_reasoning: bool, tools: bool) -> OutputParser:
        """`in_reasoning`: the prompt ends inside an open <think>. `tools`: calls are wanted."""
        ...
