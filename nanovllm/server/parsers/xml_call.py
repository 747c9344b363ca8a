"""One call in XML, whose parameters are raw text between tags.

The schema of a parameter gives the type of its text. Strings stream; other values are converted
when they are complete.
"""

from __future__ import annotations

from msgspec import Struct

from nanovllm.server.detokenize import held_back
from nanovllm.server.parsers.base import (
    KEY_NAME,
    CallEnd,
    CallPart,
    CallStart,
    Emit,
    Reader,
    Source,
)
from nanovllm.server.parsers.json_types import Types, as_json, names_of, quoted, types_of


class Form(Struct, frozen=True):
    call: tuple[str, str]  # before and after a function's name
    parameter: tuple[str, str]  # before and after a parameter's name
    end_call: str
    end_block: str
    pad: str  # at both ends of every value
    begin_value: str = ""  # after a parameter's name
    end_value: str = "</parameter>"


class XmlCall:
    """Reader of one call.

    The call starts at its first parameter or its end tag. A tag around other text is not a call.
    """

    def __init__(
        self,
        form: Form,
        source: Source,
        emit: Emit,
        *,
        end_block: str,
        name: str,
        schema: object,
    ) -> None:
        self.is_started = False
        self._form = form
        self._source = source
        self._emit = emit
        self._end_block = end_block
        self._name = name
        self._schema = schema
        self._separator = ""

    def read(self, *, mends: bool) -> Reader[bool]:
        """Read the parameters and the end; return True if the end came.

        The arguments' object is closed only then. A truncated one stays open.
        """
        source, form = self._source, self._form
        missing = set(names_of(self._schema)) if mends else None
        while True:
            yield from source.space()
            if not (yield from source.literal(form.parameter[0])):
                return (yield from self._ended())
            name = yield from source.name(KEY_NAME, form.parameter[1])
            if name is None:
                self._broke_in_tag()
                return False
            if missing is not None:
                missing.discard(name)
            if form.begin_value:
                yield from source.space()
                if not (yield from source.literal(form.begin_value)):
                    self._broke_after_name(name)
                    return False
            self._start()
            key = f"{self._separator}{quoted(name)}: "
            argument = Argument(key, types_of(self._schema, name), self._emit)
            is_whole = yield from _Value(form, self._end_block, missing).read(source, argument)
            argument.end(is_whole=is_whole)
            self._separator = ", "

    def _ended(self) -> Reader[bool]:
        """Return True if the call ends here. Called if no parameter follows."""
        source, form = self._source, self._form
        following = (self._end_block, form.call[0])  # each ends the call without its own end tag
        if (yield from source.literal(form.end_call)) or (yield from source.comes(following)):
            self._start()
            self._emit(CallPart("}"))
            self._emit(CallEnd())
            return True
        if source.is_over and not source.text[source.at :].strip():
            self._start()
        return False

    def _broke_in_tag(self) -> None:
        source = self._source
        if not source.is_over:
            source.push_back(self._form.parameter[0])
            return
        self._start()
        name = KEY_NAME.match(source.text, source.at)
        source.at = len(source.text)
        if name is not None:
            self._emit(CallPart(self._separator + quoted(name[0])[:-1]))

    def _broke_after_name(self, name: str) -> None:
        if not self._source.is_over:
            before, after = self._form.parameter
            self._source.push_back(f"{before}{name}{after}")
            return
        self._start()
        self._emit(CallPart(self._separator + quoted(name)))

    def _start(self) -> None:
        if not self.is_started:
            self.is_started = True
            self._emit(CallStart(self._name))
            self._emit(CallPart("{"))


class Argument:
    """One parameter, converted to JSON as early as possible."""

    def __init__(self, key: str, types: Types, emit: Emit) -> None:
        self._key = key
        self._types = types
        self._emit = emit
        self._streams = "string" in types and types <= {"string", "null"}
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
        """Emit the rest. A truncated value stays open."""
        if self._is_open:
            self._emit(CallPart('"' if is_whole else ""))
            return
        text = "".join(self._held)
        if not is_whole and "string" not in self._types:
            shown = text.strip()
        else:
            shown = as_json(text, self._types)
            if not is_whole and shown.startswith('"'):
                shown = shown[:-1]
        self._emit(CallPart(self._key + shown))


class _Value(Struct, frozen=True):
    """Reader of a parameter's text up to its end.

    An end tag counts only if the next tag follows, since values may contain the text of a tag. With
    `missing` (parameters not given yet) the end tag may be absent. The value then ends before a
    line that begins with one of these parameters, or with the end of the call and of its block.
    """

    form: Form
    end_block: str
    missing: set[str] | None

    def read(self, source: Source, argument: Argument) -> Reader[bool]:
        """Read up to and including the end of a value; return True if it came."""
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
            if is_end or (is_end is None and self._may_be_last(text, at, tag)):
                has_pad = pad and text.endswith(pad, begin, at)
                argument.take(text[begin : at - len(pad) if has_pad else at])
                source.at = at + (len(tag) if tag == self.form.end_value else 0)
                return True
            source.at, is_begin = at + 1, False
            argument.take(text[begin : at + 1])

    @property
    def _tags(self) -> tuple[str, ...]:
        if self.missing is None:
            return (self.form.end_value,)
        return (self.form.end_value, self.form.parameter[0], self.form.end_call)

    def _next(self, text: str, begin: int, *, is_begin: bool) -> tuple[int, str]:
        """Return position and text of the next tag that may end the value; (-1, "") if none."""
        tags = [(text.find(self.form.end_value, begin), self.form.end_value)]
        for tag in self._tags[1:]:
            if is_begin and text.startswith(tag, begin):
                return begin, tag
            at = text.find(self.form.pad + tag, begin)
            tags.append((at + len(self.form.pad) if at >= 0 else -1, tag))
        return min((entry for entry in tags if entry[0] >= 0), default=(-1, ""))

    def _may_be_last(self, text: str, at: int, tag: str) -> bool:
        """Return True if the tag ends the value when no further text comes."""
        if tag == self.form.end_call:
            return not text[at + len(tag) :].strip()
        return tag == self.form.end_value

    def _is_end(self, text: str, at: int, tag: str) -> bool | None:
        """Return True if the tag ends the value, None if that depends on text to come."""
        form = self.form
        after = text[at + len(tag) :]
        if tag == form.parameter[0]:
            name = KEY_NAME.match(after)
            rest = after[name.end() :] if name else after
            if not form.parameter[1].startswith(rest[: len(form.parameter[1])]):
                return False
            is_missing = name is not None and name[0] in (self.missing or ())
            return is_missing if rest else None
        following: tuple[str, ...] = (self.end_block, form.call[0])
        if tag == self.form.end_value:
            following = (form.parameter[0], form.end_call, self.end_block)
        after = after.lstrip()
        if after.startswith(following):
            return True
        return None if any(tag.startswith(after) for tag in following) else False
