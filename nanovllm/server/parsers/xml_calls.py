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
    Family,
    Marks,
    Mends,
    Reader,
    Schemas,
    Source,
    Syntax,
)
from nanovllm.server.parsers.json_types import Types, as_json, names_of, quoted, types_of

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


def _read(
    form: Form, mends: bool, source: Source, emit: Emit, marks: Marks, schemas: Schemas
) -> Reader[None]:
    """After what opens a block: calls, then what closes it. `mends`: end tags may be missing."""
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
        yield from _arguments(form, mends, source, emit, end_block, schemas.get(name))
        emit(CallPart("}"))
    yield from source.literal(end_block)


def _read_bare(
    form: Form, source: Source, emit: Emit, marks: Marks, schemas: Schemas
) -> Reader[None]:
    """The same where nothing opened a block: only a known function that a tag follows is called."""
    source.keep()
    yield from source.literal(form.call[0])
    name = yield from source.name(FUNCTION_NAME, form.call[1])
    if name is None or name not in schemas:
        return
    yield from source.space()
    if (yield from source.comes((form.parameter[0], form.end_call))):
        source.back()
        yield from _read(form, True, source, emit, marks, schemas)


read_coder = partial(_read, CODER, False)
mend_coder = partial(_read, CODER, True)
read_bare_coder = partial(_read_bare, CODER)
read_minimax = partial(_read, MINIMAX, False)


def _arguments(
    form: Form, mends: bool, source: Source, emit: Emit, end_block: str, schema: object
) -> Reader[None]:
    """Stops at what is no parameter."""
    separator = ""
    missing = set(names_of(schema)) if mends else None
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
        if missing is not None:
            missing.discard(name)
        argument = Argument(f"{separator}{quoted(name)}: ", types_of(schema, name), emit)
        is_whole = yield from _Value(form, end_block, missing).read(source, argument)
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


class _Value(Struct, frozen=True):
    """What ends the text of a parameter.

    An end tag is one only where the next tag follows: values may hold the text of one. With
    `missing` (parameters that were not given yet), it may be left out where a line begins with
    one of these parameters, or with the end of a call that the end of its block follows.
    """

    form: Form
    end_block: str
    missing: set[str] | None

    def read(self, source: Source, argument: Argument) -> Reader[bool]:
        """Reads up to and with the end of a value; whether it came."""
        if pad := self.form.pad:
            yield from source.literal(pad)
        is_begin = True
        while True:
            text, begin = source.text, source.at
            at, tag = self._next(text, begin, is_begin=is_begin)
            if not tag:
                ends = [end for tag in self._tags for end in (tag, pad + tag)]
                held = 0 if source.is_over else max(held_back(text[begin:], end) for end in ends)
                source.at = len(text) - held
                argument.take(text[begin : source.at])
                if source.is_over:
                    return False
                is_begin = is_begin and source.at == begin
                yield
                continue
            is_end = self._is_end(text, at, tag)
            if is_end is None and not source.is_over:
                yield
                continue
            if is_end or (is_end is None and tag != self.form.parameter[0]):
                has_pad = pad and text.endswith(pad, begin, at)
                argument.take(text[begin : at - len(pad) if has_pad else at])
                source.at = at + (len(END_VALUE) if tag == END_VALUE else 0)
                return True
            source.at, is_begin = at + 1, False
            argument.take(text[begin : at + 1])

    @property
    def _tags(self) -> tuple[str, ...]:
        if self.missing is None:
            return (END_VALUE,)
        return (END_VALUE, self.form.parameter[0], self.form.end_call)

    def _next(self, text: str, begin: int, *, is_begin: bool) -> tuple[int, str]:
        """Where the next tag is that may be an end, and which; none: ""."""
        found = [(text.find(END_VALUE, begin), END_VALUE)]
        for tag in self._tags[1:]:
            if is_begin and text.startswith(tag, begin):
                return begin, tag
            at = text.find(self.form.pad + tag, begin)
            found.append((at + len(self.form.pad) if at >= 0 else -1, tag))
        return min((entry for entry in found if entry[0] >= 0), default=(-1, ""))

    def _is_end(self, text: str, at: int, tag: str) -> bool | None:
        """None: what comes will say."""
        form, after = self.form, text[at + len(tag) :]
        if tag == form.parameter[0]:
            found = KEY_NAME.match(after)
            rest = after[found.end() :] if found else after
            if not form.parameter[1].startswith(rest[: len(form.parameter[1])]):
                return False
            is_named = found is not None and found[0] in (self.missing or ())
            return is_named if rest else None
        following: tuple[str, ...] = (self.end_block, form.call[0])
        if tag == END_VALUE:
            following = (form.parameter[0], form.end_call, self.end_block)
        after = after.lstrip()
        if after.startswith(following):
            return True
        return None if any(tag.startswith(after) for tag in following) else False


# Qwen3-Coder, and Qwen3.5 after it.
QWEN3_CODER = Family(
    turns=("<|im_start|>assistant\n", "<|im_end|>"),
    opener="<tool_call>",
    call_markers=("</tool_call>",),
    syntax=Syntax(
        ("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>"),
        style="qwen_xml",
        parameter=("<parameter=NAME>\n", "\n</parameter>\n"),
    ),
    read_calls=read_coder,
    mends=Mends(CODER.call[0], read_bare_coder, mend_coder),
)

MINIMAX_M2 = Family(
    turns=("]~b]ai\n", "[e~["),
    opener="<minimax:tool_call>",
    call_markers=("</minimax:tool_call>",),
    syntax=Syntax(
        ('<invoke name="NAME">\n', "</invoke>\n"),
        block=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        between="",
        style="minimax_xml",
        parameter=('<parameter name="NAME">', "</parameter>\n"),
    ),
    read_calls=read_minimax,
)
