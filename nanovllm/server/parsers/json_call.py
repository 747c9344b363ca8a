"""Reader of a call as a JSON object, {"name": ..., "arguments": {...}}, and its variants.

The keys come in any order. `parameters` is an alias of `arguments`. The arguments may be a JSON
string that contains an object, and the object may be nested in {"type": "function", "function":
{...}}. Anything else is text and not a call, so that no function runs with arguments that the model
did not write.
"""

from __future__ import annotations

import contextlib
import json
import re

from nanovllm.server.parsers.base import CallEnd, CallPart, CallStart, Emit, Reader, Schemas, Source
from nanovllm.server.parsers.json_value import BLANKS, ignore, key, string, unparsed, value

NAMES = ('"name"', '"function"')
ARGUMENTS = ('"arguments"', '"parameters"')
REMARKS = ('"id"', '"type"', '"index"', '"call_id"')  # OpenAI API fields that are no arguments
NO_ARGUMENTS = "{}"
# The first half of a surrogate pair, perhaps with the beginning of the second.
HALF_AT_END = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?$")


class JsonCall:
    """Reader of one call. The call starts when its name is complete and its arguments begin."""

    def __init__(self, source: Source, emit: Emit, end: str, known: Schemas | None = None) -> None:
        """`end` follows a call, "" if nothing does. With `known`, other functions are refused."""
        self.is_started = False
        self._source = source
        self._emit = emit
        self._end = end
        self._known = known
        self._name = ""
        self._early: str | None = None  # arguments that came before the name
        self._is_broken = False  # the arguments are malformed and were read up to `end`
        self._depth = 0

    def read(self) -> Reader[bool]:
        """Read the object; return True if more text may follow it.

        If `is_started` is False afterwards, there was no call, and the text must be read again.
        """
        if not (yield from self._entries()):
            return False
        if not self.is_started and self._name:
            self._start(self._early or NO_ARGUMENTS, is_whole=True)
        return self.is_started

    def _entries(self) -> Reader[bool]:
        """Read from "{" to "}"; return True if the latter came."""
        source = self._source
        if not (yield from source.literal("{")):
            return False
        separator = ""
        while True:
            if self.is_started:  # from here on, text outside of the call is shown
                source.commit()
                source.keep()
            yield from source.space()
            if (yield from source.literal("}")):
                return True
            has_more = not separator or (yield from source.literal(separator))
            if not has_more or not (yield from self._entry()):
                if self.is_started and not self._is_broken:
                    source.back()
                return False
            separator = ","

    def _entry(self) -> Reader[bool]:
        """Read a key and its value; return True if they may belong to a call."""
        source = self._source
        if (name := (yield from key(source, ignore))) is None:
            return False
        yield from source.space()
        if name in NAMES and not self._name:
            if name == '"function"' and (yield from source.peek()) == "{":
                return (yield from self._wrapped())
            return (yield from self._named())
        if name in ARGUMENTS and self._early is None and not self.is_started:
            return (yield from self._arguments())
        return name in REMARKS and (yield from value(source, ignore))

    def _wrapped(self) -> Reader[bool]:
        self._depth += 1
        return self._depth == 1 and (yield from self._entries())

    def _named(self) -> Reader[bool]:
        source = self._source
        name = (yield from string(source)) if (yield from source.peek()) == '"' else None
        decoded = json.loads(name or '""')
        is_good = decoded.isprintable() and (self._known is None or decoded in self._known)
        self._name = decoded if is_good else ""
        if self._name and self._early is not None:
            self._start(self._early, is_whole=True)
        return bool(self._name)

    def _arguments(self) -> Reader[bool]:
        source = self._source
        if (yield from source.literal("null")):
            return True
        opener = yield from source.peek()
        if opener == '"':
            return (yield from self._quoted())
        if opener != "{":
            return False
        if self._name:
            self._start("")
            self._is_broken = not (yield from object_of(source, self._emit, self._end, "}"))
            return not self._is_broken
        early: list[str] = []
        is_whole = yield from value(source, early.append)
        self._early = "".join(early)
        return is_whole

    def _quoted(self) -> Reader[bool]:
        """Read arguments in the form of a JSON string that contains an object."""
        text, is_whole = yield from quoted_object(self._source)
        if text is None:
            return False
        if self._name:
            self._start(text, is_whole=is_whole)
            self._is_broken = not is_whole
        self._early = text
        return is_whole

    def _start(self, arguments: str, *, is_whole: bool = False) -> None:
        self.is_started = True
        self._emit(CallStart(self._name))
        self._emit(CallPart(arguments))
        if is_whole:
            self._emit(CallEnd())


def object_of(source: Source, emit: Emit, end: str, closers: str) -> Reader[bool]:
    """Emit arguments that begin with "{"; return True if they are JSON.

    Others are emitted unchanged up to `end`; see `unparsed`.
    """

    def take(text: str) -> None:
        emit(CallPart(text))

    is_json = yield from value(source, take)
    if is_json or (yield from unparsed(source, take, end, closers)):
        emit(CallEnd())
    return is_json


def quoted_object(source: Source) -> Reader[tuple[str | None, bool]]:
    """Read a string that contains a JSON object. Return the object's text, and True if it is
    complete.

    The text is None if the string has other content. A truncated string is returned as written.
    """
    parts: list[str] = []
    is_string = (yield from string(source, parts.append)) is not None
    literal = "".join(parts)
    text = json.loads(literal) if is_string else _begun(literal)
    parts_of_object: list[str] = []
    inner = Source()
    inner.feed(text)
    inner.is_over = True
    yield from inner.space()
    if is_string and not text:
        return NO_ARGUMENTS, True
    if (yield from inner.peek()) != "{":
        return None, False
    is_whole = yield from value(inner, parts_of_object.append)
    rest = inner.text[inner.at :].rstrip(BLANKS)
    if is_string and (rest or not is_whole):
        return None, False
    return "".join(parts_of_object) + rest, is_string


def _begun(literal: str) -> str:
    """Decode a truncated string, up to an incomplete escape."""
    literal = HALF_AT_END.sub("", literal)
    for end in range(len(literal), 0, -1):
        with contextlib.suppress(ValueError):
            return str(json.loads(literal[:end] + '"'))
    return ""
