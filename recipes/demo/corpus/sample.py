"""A training or test case: a conversation up to the assistant's turn, and that turn.

The chat template turns it into text (see render.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from recipes.demo.corpus.refuse import REFUSALS

Message = dict[str, Any]
Json = Any


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Json]

    def text(self) -> str:
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


@dataclass
class Sample:
    kind: str
    messages: list[Message]
    answer: str = ""
    calls: list[Call] = field(default_factory=list)
    tools: list[Json] = field(default_factory=list)
    thought: str = ""
    thinks: bool = False  # thinks also if enable_thinking is absent
    is_json: bool = False  # the answer is right if it is the same JSON value
    refuses: bool = False  # every sentence in refuse.REFUSALS is right
    others: frozenset[str] = frozenset()  # other right answers

    def body(self) -> str:
        return "\n".join([self.answer] * bool(self.answer) + [call.text() for call in self.calls])

    def turn(self) -> Message:
        """Return the assistant's message in the form in which a later request contains it."""
        message = assistant(self.answer)
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.calls
            ]
        return message

    def judge(self, text: str) -> bool:
        """Return True if generated text (without a leading think block) is the right answer."""
        text = text.strip()
        try:
            if self.calls:
                parts = text.removesuffix("</tool_call>").split("</tool_call>")
                bodies = [part.strip().removeprefix("<tool_call>") for part in parts]
                expected = [{"name": c.name, "arguments": c.arguments} for c in self.calls]
                return not self.answer and [json.loads(body) for body in bodies] == expected
            if self.is_json:
                return bool(json.loads(text) == json.loads(self.answer))
        except ValueError:
            return False
        if text == self.answer or text in self.others:
            return True
        return self.refuses and text in REFUSALS


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}
