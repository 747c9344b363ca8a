"""JSON read as it is generated: whatever has been taken can be closed into valid JSON.

Decision: the model's own text is passed on, not a parsed and printed copy, so that strings stream
character by character and numbers keep their digits. Slips that models make in strings are
mended: control characters as they are, a backslash before a character that needs none, and half
of a surrogate pair, which many clients refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from nanovllm.server.parsers.base import Reader, Source

MAX_DEPTH = 100  # clients parse with recursion
MAX_SCALAR = 1000
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
CLOSER = {"{": "}", "[": "]"}
HEX = "0123456789abcdefABCDEF"
LOW_SURROGATE = ("\\", "u", "dD", "cdefCDEF", HEX, HEX)
Take = Callable[[str], None]


def value(source: Source, take: Take) -> Reader[bool]:
    """Reads one value; whether it was whole. If it is not, `take` still gets what closes it.

    After an error the source stands where the text that was not taken begins; what is cut short
    at the end of the source is dropped.
    """
    walk = _Walk(source, take)
    while (yield from walk.next()):
        if not walk.closers and walk.expected == ",":
            return True
    take("".join(reversed(walk.closers)))
    return False


class _Walk:
    def __init__(self, source: Source, take: Take) -> None:
        self.closers: list[str] = []
        self.expected = "value"
        self._source = source
        self._take = take
        self._held = ""  # read, and no place to close: commas, keys, colons

    def next(self) -> Reader[bool]:
        """Reads up to the next place where something else is expected."""
        source = self._source
        self._held += yield from source.space()
        character = yield from source.peek()
        if self.expected == "value":
            is_good = yield from self._value(character)
        elif self.expected == "key":
            is_good = yield from self._key(character)
        else:
            is_good = self._comma(character)
        if not is_good and source.at < len(source.text):
            source.push_back(self._held)
        return is_good

    def _value(self, character: str) -> Reader[bool]:
        source = self._source
        self.expected = ","
        if character == '"':
            source.at += 1
            self._took('"')
            is_whole = yield from string_body(source, self._take)
            self._take('"')
            return is_whole
        if character in CLOSER and len(self.closers) < MAX_DEPTH:
            source.at += 1
            self._took(character)
            self.closers.append(CLOSER[character])
            self._held = yield from source.space()
            if (yield from source.peek()) == self.closers[-1]:
                source.at += 1
                self._took(self.closers.pop())
            else:
                self.expected = "key" if character == "{" else "value"
            return True
        scalar = yield from _scalar(source)
        if scalar:
            self._took(scalar)
        return bool(scalar)

    def _key(self, character: str) -> Reader[bool]:
        if character != '"' or (key := (yield from string(self._source))) is None:
            return False
        self._held += key
        self._held += yield from self._source.space()
        self.expected = "value"
        if not (yield from self._source.literal(":")):
            return False
        self._held += ":"
        return True

    def _comma(self, character: str) -> bool:
        if character == ",":
            self._held += ","
            self.expected = "key" if self.closers[-1] == "}" else "value"
        elif character == self.closers[-1]:
            self._took(self.closers.pop())
        else:
            return False
        self._source.at += 1
        return True

    def _took(self, text: str) -> None:
        self._take(self._held + text)
        self._held = ""


def string(source: Source) -> Reader[str | None]:
    """Reads a string, quotes included; None at the end. The quote that begins it comes next."""
    parts = ['"']
    source.at += 1
    if not (yield from string_body(source, parts.append)):
        return None
    return "".join(parts) + '"'


def string_body(source: Source, take: Take) -> Reader[bool]:
    """Reads up to and with the quote that ends a string; whether it came."""
    while character := (yield from source.peek()):
        if found := PLAIN.match(source.text, source.at):
            take(found[0])
            source.at = found.end()
        elif character == '"':
            source.at += 1
            return True
        elif character == "\\":
            if not (escape := (yield from _escape(source))):
                break
            take(escape)
        else:
            source.at += 1
            take(json.dumps(character)[1:-1])
    return False


def _escape(source: Source) -> Reader[str]:
    """Reads what begins with the backslash that comes next; nothing if the text ends in it."""
    while True:
        text = source.text[source.at : source.at + 12]
        size = _escape_size(text)
        if size:
            source.at += size
            is_half = size == 6 and 0xD800 <= int(text[2:6], 16) < 0xE000
            return "\\ufffd" if is_half else text[:size]
        if size == 0:
            source.at += 1
            return "\\\\"
        if source.is_over:
            source.at = len(source.text)
            return ""
        yield


def _escape_size(text: str) -> int | None:
    """Of the escape that `text` begins with: 0 if it is none, None if more is needed."""
    if text[1:2] != "u":
        return None if len(text) < 2 else 2 if text[1] in '"\\/bfnrt' else 0
    if not all(character in HEX for character in text[2:6]):
        return 0
    if len(text) < 6:
        return None
    if not 0xD800 <= int(text[2:6], 16) < 0xDC00:
        return 6
    second = text[6:]
    if not all(character in form for character, form in zip(second, LOW_SURROGATE, strict=False)):
        return 6  # half a pair
    if len(second) < 6:
        return None
    return 12


def _scalar(source: Source) -> Reader[str]:
    """Reads a number or a word; nothing if there is none, or if the text ends in it."""
    while True:
        found = SCALAR_RUN.match(source.text, source.at)
        if found is None or len(found[0]) > MAX_SCALAR:
            return ""
        if found.end() < len(source.text):
            break
        if source.is_over:
            source.at = len(source.text)
            return ""
        yield
    if not SCALAR.fullmatch(found[0]):
        return ""
    source.at = found.end()
    return found[0]
