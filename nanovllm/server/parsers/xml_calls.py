"""Calls as XML: Qwen3-Coder's and MiniMax-M2's, whose parameters are raw text between tags.

A parameter's schema says what its text means. Strings stream; the rest is read when it is whole.
"""

from __future__ import annotations

from functools import partial

from msgspec import Struct

from nanovllm.server.detokenize import held_back
from nanovllm.server.parsers.base import (
    FUNCTION_NAME,
    KEY_NAME,
    CallPart,
    CallStart,
    Emit,
    Marks,
    Reader,
    Schemas,
    Source,
)
from nanovllm.server.parsers.json_types import Types, as_json, quoted, types_of

END_VALUE = "</parameter>"


class Form(Struct, frozen=True):
    call: tuple[str, str]  # before and after a function's name
    parameter: tuple[str, str]  # before and after a parameter's name
    end_call: str
    end_block: str
    pad: str  # stands at both ends of every value


CODER = Form(
    call=("<function=", ">"),
    parameter=("<parameter=", ">"),
    end_call="</function>",
    end_block="</tool_call>",
    pad="\n",
)
MINIMAX = Form(
    call=('<invoke name="', '">'),
    parameter=('<parameter name="', '">'),
    end_call="</invoke>",
    end_block="</minimax:tool_call>",
    pad="",
)


def _read(form: Form, source: Source, emit: Emit, marks: Marks, schemas: Schemas) -> Reader[None]:
    """After what opens a block: calls, then what closes it."""
    end_block = marks[form.end_block]
    while True:
        yield from source.space()
        source.keep()
        if not (yield from source.literal(form.call[0])):
            break
        if (name := (yield from source.name(FUNCTION_NAME, form.call[1]))) is None:
            source.back()
            break
        emit(CallStart(name))
        emit(CallPart("{"))
        yield from _arguments(form, source, emit, end_block, schemas.get(name))
        emit(CallPart("}"))
    yield from source.literal(end_block)


read_coder = partial(_read, CODER)
read_minimax = partial(_read, MINIMAX)


def _arguments(
    form: Form, source: Source, emit: Emit, end_block: str, schema: object
) -> Reader[None]:
    """Stops at what is no parameter."""
    separator = ""
    while True:
        yield from source.space()
        if not (yield from source.literal(form.parameter[0])):
            yield from source.literal(form.end_call)
            return
        name = yield from source.name(KEY_NAME, form.parameter[1])
        if name is None:
            if source.is_over:
                source.at = len(source.text)
            else:
                source.push_back(form.parameter[0])
            return
        argument = Argument(f"{separator}{quoted(name)}: ", types_of(schema, name), emit)
        is_whole = yield from _value(form, source, end_block, argument)
        argument.end(is_whole=is_whole)
        separator = ", "


class Argument:
    """One parameter, written as JSON as early as possible."""

    def __init__(self, key: str, types: Types, emit: Emit) -> None:
        self._key = key
        self._types = types
        self._emit = emit
        self._streams = types <= {"string", "null"}
        self._is_open = False
        self._held: list[str] = []

    def take(self, text: str) -> None:
        if not self._is_open:
            self._held.append(text)
            if not self._streams:
                return
            text = "".join(self._held)
            if not text or ("null" in self._types and "null".startswith(text.strip())):
                return
            self._emit(CallPart(self._key + '"'))
            self._is_open = True
        self._emit(CallPart(quoted(text)[1:-1]))

    def end(self, *, is_whole: bool) -> None:
        """A value that was cut short and is no string would mean something else: it is left out."""
        if self._is_open:
            self._emit(CallPart('"'))
        elif is_whole:
            self._emit(CallPart(self._key + as_json("".join(self._held), self._types)))


def _value(form: Form, source: Source, end_block: str, argument: Argument) -> Reader[bool]:
    """Reads up to and with the end of a value; whether it came.

    An end tag is one only where the next tag follows: values may hold the text of one.
    """
    if form.pad:
        yield from source.literal(form.pad)
    following = (form.parameter[0], form.end_call, end_block)
    while True:
        text, begin = source.text, source.at
        at = text.find(END_VALUE, begin)
        if at < 0:
            ends = (END_VALUE, form.pad + END_VALUE)
            held = 0 if source.is_over else max(held_back(text[begin:], end) for end in ends)
            source.at = len(text) - held
            argument.take(text[begin : source.at])
            if source.is_over:
                return False
            yield
            continue
        after = text[at + len(END_VALUE) :].lstrip()
        is_end = after.startswith(following)
        may_end = any(tag.startswith(after) for tag in following)
        if may_end and not is_end and not source.is_over:
            yield
            continue
        if is_end or may_end:
            has_pad = form.pad and text.endswith(form.pad, begin, at)
            argument.take(text[begin : at - len(form.pad) if has_pad else at])
            source.at = at + len(END_VALUE)
            return True
        source.at = at + 1
        argument.take(text[begin : at + 1])
