"""A model without markers: all it writes is text."""

from __future__ import annotations

from nanovllm.server.parsers.base import Event, Text


class PlainParser:
    def __init__(self, *, in_reasoning: bool, tools: bool) -> None:
        self.in_reasoning = False

    def feed(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        return []
