"""Incremental JSON reader that passes on the model's text unchanged, as soon as it is certain.

Decision: the client gets the model's own text, not a parsed and printed copy, so that strings
stream by character and numbers keep their digits. Frequent mistakes in strings are corrected: raw
control characters, a needless backslash, and a lone surrogate, which many clients refuse.

Decision: a truncated or malformed value is never closed. A client that parses it gets an error. If
it were closed, it would be a valid value with a part missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from nanovllm.server.detokenize import held_back
from nanovllm.server.parsers.base import Reader, Source

MAX_DEPTH = 100  # clients parse with recursion
MAX_SCALAR = 1000
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
PAIR = r"u[dD][89abAB]{0}{0}\\u[dD][c-fC-F]{0}{0}".format("[0-9a-fA-F]")  # of surrogates
ESCAPE = re.compile(rf'\\(["\\/bfnrt]|{PAIR}|u[0-9a-fA-F]{{4}})')
LONG, LONGEST = r"\u0000", r"\ud800\udc00"
HALF = re.compile(r"\\u[dD][89a-fA-F]..")  # a lone surrogate
SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
BLANKS = " \t\r\n"
CLOSER = {"{": "}", "[": "]"}
Take = Callable[[str], None]


def ignore(text: str) -> None: ...


def value(source: Source, take: Take) -> Reader[bool]:
    """Read one value and return True if it is complete.

    If it is not, `take` has received all text read so far. The source then stands at the first text
    that is not JSON, or at its end.
    """
    walk = _Walk(source, take)
    is_whole = yield from walk.value(MAX_DEPTH)
    if not is_whole and walk.held:
        take("".join(walk.held))
    return is_whole


class _Walk:
    def __init__(self, source: Source, take: Take) -> None:
        self.held: list[str] = []  # read but not yet passed on: commas, keys, colons
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
            if is_whole:
                self._take('"')
            return is_whole
        if character in CLOSER and depth:
            source.at += 1
            self._took(character)
            return (yield from self._entries(CLOSER[character], depth - 1))
        if scalar := (yield from _scalar(source, self.held.append)):
            self._took(scalar)
        return bool(scalar)

    def _entries(self, closer: str, depth: int) -> Reader[bool]:
        """Read up to and including the closer."""
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
    """Read a key and its colon. Return the key with its quotes, None if there is no key.

    `take` receives the text read in either case.
    """
    take((yield from source.space()))
    if (yield from source.peek()) != '"' or (text := (yield from string(source, take))) is None:
        return None
    take((yield from source.space()))
    if not (yield from source.literal(":")):
        return None
    take(":")
    return text


def string(source: Source, take: Take = ignore) -> Reader[str | None]:
    """Read a string that begins with the next character. Return it with its quotes.

    Return None if the string does not end. `take` receives the text read in either case.
    """
    parts = ['"']
    source.at += 1
    if (yield from string_body(source, parts.append)):
        parts.append('"')
        take("".join(parts))
        return "".join(parts)
    take("".join(parts))
    return None


def string_body(source: Source, take: Take) -> Reader[bool]:
    """Read up to and including the closing quote. Return True if there was one."""
    while character := (yield from source.peek()):
        if match := PLAIN.match(source.text, source.at):
            take(match[0])
            source.at = match.end()
        elif character == '"':
            source.at += 1
            return True
        elif character == "\\":
            take((yield from _escape(source)))
        else:
            source.at += 1
            take(json.dumps(character)[1:-1])
    return False


def _escape(source: Source) -> Reader[str]:
    """Read the escape that comes next, or part of one at the end of the text."""
    while _may_grow(source.text[source.at : source.at + len(LONGEST)]):
        if source.is_over:
            begun, source.at = source.text[source.at :], len(source.text)
            return begun
        yield
    escape = ESCAPE.match(source.text, source.at)
    if escape is None:
        source.at += 1
        return "\\\\"
    source.at = escape.end()
    return "\\ufffd" if HALF.fullmatch(escape[0]) else escape[0]


def _may_grow(text: str) -> bool:
    """Return True if the text is the beginning of an escape."""
    whole = (text + form[len(text) :] for form in (LONG, LONGEST) if len(text) < len(form))
    return any(map(ESCAPE.fullmatch, whole))


def _scalar(source: Source, take: Take) -> Reader[str]:
    """Read a number or a word; return "" if there is none.

    At the end of the text it may be incomplete: `take` then receives that part, and the result is
    "".
    """
    while True:
        run = SCALAR_RUN.match(source.text, source.at)
        if run is None or len(run[0]) > MAX_SCALAR:
            return ""
        if run.end() < len(source.text):
            break
        if source.is_over:
            source.at = len(source.text)
            take(run[0])
            return ""
        yield
    if not SCALAR.fullmatch(run[0]):
        return ""
    source.at = run.end()
    return run[0]


def unparsed(source: Source, take: Take, end: str, closers: str) -> Reader[bool]:
    """Read the rest of malformed arguments unchanged, up to but not including `end`.

    Return True if `end` came; an empty `end` never comes. `closers` belong to the call, not to its
    arguments: before `end` they are dropped with the white space around them.
    """
    while True:
        text = source.text[source.at :]
        at = text.find(end) if end else -1
        if at >= 0:
            take(text[:at].rstrip(BLANKS).removesuffix(closers).rstrip(BLANKS))
            source.at += at
            return True
        if source.is_over:
            source.at = len(source.text)
            take(text)
            return False
        sure = text[: len(text) - held_back(text, end)] if end else text
        sure = sure.rstrip(closers + BLANKS) if end else sure
        take(sure)
        source.at += len(sure)
        yield
