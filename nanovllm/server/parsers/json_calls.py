"""Calls as JSON: Qwen3's tag around {"name", "arguments"}, R1's name and fenced arguments.

Owns the two readers, and the families that write so.
"""

from __future__ import annotations

import json

from nanovllm.server.parsers.base import (
    FUNCTION_NAME,
    CallPart,
    CallStart,
    Emit,
    Family,
    Marks,
    Reader,
    Schemas,
    Source,
    Syntax,
)
from nanovllm.server.parsers.json_value import key, string, value

END_CALL = "</tool_call>"
CALLS_BEGIN, CALL, SEPARATOR, CALL_END, CALLS_END = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)


def read_tagged(source: Source, emit: Emit, marks: Marks, schemas: Schemas) -> Reader[None]:
    """After <tool_call>: an object with its keys in any order, then </tool_call>."""
    yield from source.space()
    if not (yield from source.literal("{")):
        return
    call = _Call(source, emit)
    while (yield from call.entry()):
        yield from source.space()
        if not (yield from source.literal(",")):
            break
    yield from source.space()
    if (yield from source.literal("}")):
        call.end()
    yield from source.space()
    yield from source.literal(marks[END_CALL])


class _Call:
    """It starts once its name is known and its arguments have begun."""

    def __init__(self, source: Source, emit: Emit) -> None:
        self._source = source
        self._emit = emit
        self._name = ""
        self._early: list[str] | None = None  # arguments that came before the name
        self._is_started = False

    def entry(self) -> Reader[bool]:
        """Reads a key and what it holds; whether it may."""
        source = self._source
        if (found := (yield from key(source, _ignore))) is None:
            return False
        yield from source.space()
        if found == '"name"' and not self._name:
            name = (yield from string(source)) if (yield from source.peek()) == '"' else None
            decoded = json.loads(name or '""')
            self._name = decoded if decoded.isprintable() else ""
            if self._name and self._early is not None:
                self._start()
            return bool(self._name)
        if found != '"arguments"' or self._early is not None or self._is_started:
            return (yield from value(source, _ignore))
        self._early = []
        if (yield from source.literal("null")):
            self._early = ["{}"]
            return True
        if (yield from source.peek()) != "{":
            return False
        if not self._name:
            return (yield from value(source, self._early.append))
        self._start()
        return (yield from value(source, lambda text: self._emit(CallPart(text))))

    def end(self) -> None:
        if self._name and not self._is_started:
            self._early = self._early or ["{}"]
            self._start()

    def _start(self) -> None:
        self._is_started = True
        self._emit(CallStart(self._name))
        self._emit(CallPart("".join(self._early or ())))


def read_fenced(source: Source, emit: Emit, marks: Marks, schemas: Schemas) -> Reader[None]:
    """After DeepSeek's calls begin: each a kind, a name, and the arguments as a code block."""
    while True:
        yield from source.space()
        source.keep()
        if not (yield from source.literal(marks[CALL])):
            break
        if (name := (yield from _fenced_name(source, marks))) is None:
            source.back()
            break
        emit(CallStart(name))
        yield from value(source, lambda text: emit(CallPart(text)))
        yield from source.space()
        yield from source.literal("```")
        yield from source.space()
        yield from source.literal(marks[CALL_END])
    yield from source.literal(marks[CALLS_END])


def _fenced_name(source: Source, marks: Marks) -> Reader[str | None]:
    if (yield from source.name(FUNCTION_NAME, marks[SEPARATOR])) is None:
        return None
    name = yield from source.name(FUNCTION_NAME, "\n")
    if name is None or not (yield from source.literal("```json")):
        return None
    yield from source.space()
    return name if (yield from source.peek()) == "{" else None


def _ignore(text: str) -> None: ...


QWEN3 = Family(
    turns=("<|im_start|>assistant\n", "<|im_end|>"),
    opener="<tool_call>",
    call_markers=(END_CALL,),
    syntax=Syntax(('<tool_call>\n{"name": QUOTED, "arguments": ', "}\n</tool_call>")),
    read_calls=read_tagged,
)

# R1 and its distillations. What a tool answered stands inside the model's turn.
DEEPSEEK_R1 = Family(
    turns=(
        "<\uff5cAssistant\uff5c>",
        "<\uff5ctool\u2581outputs\u2581end\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    tool_template="deepseek_r1.jinja",
    opener=CALLS_BEGIN,
    call_markers=(CALLS_END, CALL, SEPARATOR, CALL_END),
    syntax=Syntax(
        (f"{CALL}function{SEPARATOR}NAME\n```json\n", f"\n```{CALL_END}"),
        block=(CALLS_BEGIN, CALLS_END),
    ),
    read_calls=read_fenced,
)
