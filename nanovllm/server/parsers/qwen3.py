"""Qwen3: <think>reasoning</think>, then text with <tool_call>{"name", "arguments"}</tool_call>.

White space beside a marker belongs to the marker. A call that is no JSON object with a name is
shown as the text it is. <think> is a marker only where the output begins, <tool_call> only when
the client sent tools.
"""

from __future__ import annotations

import msgspec

from nanovllm.server.detokenize import held_back
from nanovllm.server.parsers.base import Event, Reasoning, Text, ToolCall

THINK = "<think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
# state -> (the marker it waits for, the state after that one)
NEXT = {
    "start": (THINK, "reasoning"),
    "reasoning": ("</think>", "text"),
    "text": (CALL, "call"),
    "call": (END_CALL, "text"),
}


class Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class Qwen3Parser:
    """A machine of four states. Each waits for one marker."""

    def __init__(self, *, in_reasoning: bool, tools: bool) -> None:
        self.in_reasoning = in_reasoning
        self._state = "reasoning" if in_reasoning else "start"
        self._tools = tools
        self._buffer = ""
        self._is_after_marker = in_reasoning  # white space that comes now is dropped

    def feed(self, text: str) -> list[Event]:
        if self._state == "text" and not self._tools and not self._is_after_marker:
            return [Text(text)] if text else []  # nothing ends this state
        self._buffer += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        body, self._buffer = self._buffer, ""
        if self._state == "call":
            return [Text(CALL + body)]
        return [self._shown(body)] if body else []

    def _step(self, events: list[Event]) -> bool:
        """Take what is sure from the buffer; whether the state changed."""
        if self._is_after_marker and self._state != "call":
            self._buffer = self._buffer.lstrip()
            self._is_after_marker = not self._buffer
        if self._state == "start":
            return self._start()
        marker, following = NEXT[self._state]
        if self._state == "text" and not self._tools:
            marker = ""
        body, found, rest = self._buffer.partition(marker) if marker else (self._buffer, "", "")
        if found:
            self._close(body, events)
            self._buffer, self._state = rest, following
            self.in_reasoning = following == "reasoning"
            self._is_after_marker = True
            return True
        if self._state != "call":
            sure = len(body) - (held_back_with_space(body, marker) if marker else 0)
            if sure:
                events.append(self._shown(body[:sure]))
                self._buffer = body[sure:]
        return False

    def _start(self) -> bool:
        begun = self._buffer.lstrip()
        if begun.startswith(THINK):
            self._buffer = begun[len(THINK) :]
            self._state = "reasoning"
            self.in_reasoning = self._is_after_marker = True
            return True
        if THINK.startswith(begun):
            return False
        self._state = "text"
        return True

    def _close(self, body: str, events: list[Event]) -> None:
        """The state's body is complete, its end marker came."""
        if self._state == "call":
            events.append(parsed_call(body))
        elif body := body.rstrip():
            events.append(self._shown(body))

    def _shown(self, body: str) -> Event:
        return Reasoning(body) if self._state == "reasoning" else Text(body)


def parsed_call(body: str) -> Event:
    try:
        call = msgspec.json.decode(body, type=Call)
    except (msgspec.DecodeError, RecursionError):
        return Text(CALL + body + END_CALL)
    return ToolCall(call.name, bytes(call.arguments).decode())


def held_back_with_space(text: str, marker: str) -> int:
    """Characters at the end of `text` that may belong to `marker` or to white space before it."""
    begun = held_back(text, marker)
    kept = len(text) - begun
    return begun + kept - len(text[:kept].rstrip())
