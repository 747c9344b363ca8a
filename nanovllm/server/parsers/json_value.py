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
PAIR = r"u[dD][89abAB]{0}{0}\\u[dD][c-fC-F]{0}{0}".format("[0-9a-fA-F]")  # of surrogates
ESCAPE = re.compile(rf'\\(["\\/bfnrt]|{PAIR}|u[0-9a-fA-F]{{4}})')
LONG, LONGEST = r"\u0000", r"\ud800\udc00"
HALF = re.compile(r"\\u[dD][89a-fA-F]..")  # a surrogate by itself
SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
CLOSER = {"{": "}", "[": "]"}
Take = Callable[[str], None]


def value(source: Source, take: Take) -> Reader[bool]:
    """Reads one value; whether it was whole. If it is not, `take` still gets what closes it.

    After an error the source stands where the text that was not taken begins; what is cut short
    at the end of the source is dropped.
    """
    walk = _Walk(source, take)
    is_whole = yield from walk.value(MAX_DEPTH)
    if not is_whole and source.at < len(source.text):
        source.push_back("".join(walk.held))
    return is_whole


class _Walk:
    def __init__(self, source: Source, take: Take) -> None:
        self.held: list[str] = []  # read, and no place to close: commas, keys, colons
        self._source = source
        self._take = take

    def value(self, depth: int) -> Reader[bool]:
        source = self._source
        self.held.append((yield from source.space()))
        character = yield from source.peek()
        if character == '"':
            source.at += 1
            self._took('"')
            is_whole = yield from string_body(source, self._take)
            self._take('"')
            return is_whole
        if character in CLOSER and depth:
            source.at += 1
            self._took(character)
            is_whole = yield from self._entries(CLOSER[character], depth - 1)
            if not is_whole:
                self._take(CLOSER[character])
            return is_whole
        if scalar := (yield from _scalar(source)):
            self._took(scalar)
        return bool(scalar)

    def _entries(self, closer: str, depth: int) -> Reader[bool]:
        """Up to and with the closer."""
        source = self._source
        self.held.append((yield from source.space()))
        character = yield from source.peek()
        comes_more = character != closer
        while comes_more:
            if closer == "}" and (yield from key(source, self.held.append)) is None:
                return False
            if not (yield from self.value(depth)):
                return False
            self.held.append((yield from source.space()))
            character = yield from source.peek()
            if comes_more := character == ",":
                source.at += 1
                self.held.append(character)
        if character != closer:
            return False
        source.at += 1
        self._took(closer)
        return True

    def _took(self, text: str) -> None:
        self._take("".join(self.held) + text)
        self.held.clear()


def key(source: Source, take: Take) -> Reader[str | None]:
    """Reads a key and its colon; returns the key, quotes included, and None where there is none."""
    take((yield from source.space()))
    if (yield from source.peek()) != '"' or (found := (yield from string(source))) is None:
        return None
    take(found)
    take((yield from source.space()))
    if not (yield from source.literal(":")):
        return None
    take(":")
    return found


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
    while _may_grow(source.text[source.at : source.at + len(LONGEST)]):
        if source.is_over:
            source.at = len(source.text)
            return ""
        yield
    found = ESCAPE.match(source.text, source.at)
    if found is None:
        source.at += 1
        return "\\\\"
    source.at = found.end()
    return "\\ufffd" if HALF.fullmatch(found[0]) else found[0]


def _may_grow(text: str) -> bool:
    """Whether it is the beginning of an escape."""
    whole = (text + form[len(text) :] for form in (LONG, LONGEST) if len(text) < len(form))
    return any(map(ESCAPE.fullmatch, whole))


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
