"""Stream in which every chunk carries the number of tokens so far (continuous_usage_stats).

Clients take the difference of two counts as the size of a chunk, so the count must rise with each
chunk. All events of a choice in one step therefore form one chunk, including its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from nanovllm.server.answers import ChunkWriter, Details, new_call_id
from nanovllm.server.parsers.base import CallPart, CallStart, Event, Text
from nanovllm.server.shapes import Call, Function, Usage

_encode = msgspec.json.Encoder().encode


class CountedWriter(ChunkWriter):
    usage: Callable[[], Usage]  # called once for each chunk

    def __init__(
        self, head: bytes, index: int, out: list[bytes], *, reasoning_content: bool = False
    ) -> None:
        super().__init__(head, index, out, reasoning_content=reasoning_content)
        self._delta: dict[str, Any] = {}  # of the current step
        self._details = Details()

    def write(self, event: Event, details: Details | None) -> None:
        self._details.add(details)
        delta = self._delta
        if isinstance(event, CallStart):
            call = Call(new_call_id(), Function(event.name, ""), self.num_calls)
            delta.setdefault("tool_calls", []).append(msgspec.to_builtins(call))
            self.num_calls += 1
        elif isinstance(event, CallPart):
            calls = delta.setdefault("tool_calls", [])
            if not calls:  # continues a call of an earlier step
                calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += event.text
        else:
            names = ["content"] if isinstance(event, Text) else ["reasoning"]
            if names == ["reasoning"] and self._reasoning_content:
                names.append("reasoning_content")
            for name in names:
                delta[name] = delta.get(name, "") + event.text

    def flush(self) -> None:
        if self._delta:
            self._put(b"null")

    def end(self, reason: str, details: Details | None) -> None:
        self._details.add(details)
        self._put(_encode(reason))

    def _put(self, reason: bytes) -> None:
        self._chunk(_encode(self._delta), self._details, reason)
        self._delta = {}
        self._details = Details()

    def _counted(self) -> bytes:
        return b',"usage":' + _encode(self.usage())
