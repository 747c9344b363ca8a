"""Contract of the output parsers, and a text source that generators read as it arrives.

A parser is fed text as it arrives and returns events. However the text is split into pieces, the
joined events are the same. A parser that depends on the boundaries of pieces is wrong.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TypeAlias, TypeVar

from msgspec import Struct

from nanovllm.server.parsers.markers import END_THINK, THINK

T = TypeVar("T")
SPACE = re.compile(r"[ \t\r\n]*")  # JSON's
BLANK = re.compile(r"\s*")
# A name must not contain a mark; see `Vocabulary.marks`.
FUNCTION_NAME = re.compile(r'[^\s<>"\ud800-\udfff]{1,256}')
KEY_NAME = re.compile(r'[^\r\n<>"\ud800-\udfff]{1,256}')


class Text(Struct, frozen=True):
    text: str


class Reasoning(Struct, frozen=True):
    text: str


class CallStart(Struct, frozen=True):
    name: str


class CallPart(Struct, frozen=True):
    """Part of the arguments of the call started last.

    All parts of a complete call form one JSON object. Truncated or malformed arguments stay as the
    model wrote them.
    """

    text: str


class CallEnd(Struct, frozen=True):
    """End of the call started last. Only readers emit it; clients get no such event."""


Event = Text | Reasoning | CallStart | CallPart
Emit = Callable[[CallStart | CallPart | CallEnd], None]
Schemas = Mapping[str, object]  # function name -> JSON Schema of its arguments
Marks = Mapping[str, str]  # marker -> its form in the text that is fed
Reader = Generator[None, None, T]  # yields when it needs more text
Read: TypeAlias = "Callable[[Source, Emit, Marks, Schemas], Reader[None]]"


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the events with adjacent ones of a kind merged."""
    out: list[Event] = []
    for kind, run in itertools.groupby(events, type):
        if kind is CallStart:
            out.extend(run)
        else:
            out.append(kind("".join(e.text for e in run if not isinstance(e, CallStart))))
    return out


class Syntax(Struct, frozen=True):
    """Exact form of a call. NAME stands for the name of a function or parameter, QUOTED for the
    same as a JSON string.
    """

    call: tuple[str, str]  # before and after the arguments
    block: tuple[str, str] = ("", "")  # before the first call and after the last
    between: str = "\n"
    is_single: bool = False  # a turn has at most one call
    style: str = "json"  # of the arguments
    parameter: tuple[str, str] = ("", "")  # before and after a parameter in XML
    has_words: bool = False  # templates write True, False and None for values of parameters


class Mends(Struct, frozen=True):
    """Readers for calls with missing parts, which a family's models write if no grammar prevents
    it.
    """

    begin: str  # of a call without an opener
    read_bare: Read  # reads such a call, starting with `begin`
    read_calls: Read  # replaces the family's `read_calls`


class Family(Struct, frozen=True):
    """Output format of a model family. Without `read_calls` its models make no calls."""

    thinks: bool = True
    turns: tuple[str, ...] = ()  # the model's turn begins after the last of these in a prompt
    tool_template: str = ""  # one of ours, for chat templates that ignore tools
    opener: str = ""  # begins calls
    call_markers: tuple[str, ...] = ()  # further markers that may be single tokens
    bare: tuple[str, ...] = ()  # beginnings of a call without an opener, for `read_bare`
    read_bare: Read | None = None
    syntax: Syntax | None = None  # of calls in the models' output and in templates
    read_calls: Read | None = None
    mends: Mends | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        thinking = (THINK, END_THINK) if self.thinks else ()
        return thinking + ((self.opener, *self.call_markers) if self.read_calls else ())

    def last_turn(self, prompt: str) -> str:
        """Return the part of the model's turn that the prompt contains already.

        In a template of another family no turn is found. Then only a marker at the very end counts.
        """
        if begins := [at + len(turn) for turn in self.turns if (at := prompt.rfind(turn)) >= 0]:
            return prompt[max(begins) :]
        end = prompt.rstrip()
        return next((marker for marker in (THINK, END_THINK) if end.endswith(marker)), "")

    def begun(self, turn: str) -> tuple[bool | None, bool]:
        """Return the state at the end of `turn`: in reasoning, and directly after a marker.

        The first is None if the turn is empty. Markers count at the beginning of the turn, and at
        its very end. A turn that the client began may mention them in its text.
        """
        if not self.thinks:
            return False, False
        end = turn.rstrip()
        if end.endswith((THINK, END_THINK)) or not end:
            return (end.endswith(THINK) if end else None), bool(end)
        at = len(end) - len(end.lstrip())
        while end.startswith((THINK, END_THINK), at):
            if (closed := end.find(END_THINK, at)) < 0:
                return True, False
            blank = BLANK.match(end, closed + len(END_THINK))
            at = blank.end() if blank else closed + len(END_THINK)
        return False, False


class Source:
    """Text that arrives in pieces. Readers must not depend on where a piece ends."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # text before this index has been read
        self.is_over = False  # no more text will come
        self._kept: int | None = None  # text from this index on may be read again

    def feed(self, text: str) -> None:
        begin = self.at if self._kept is None else self._kept
        self.text = self.text[begin:] + text
        self.at -= begin
        self._kept = None if self._kept is None else 0

    def keep(self) -> None:
        """Begin an attempt. Until `commit`, `back` returns to this place."""
        if self._kept is None:
            self._kept = self.at

    def back(self) -> None:
        if self._kept is not None:
            self.at = self._kept

    def commit(self) -> None:
        self._kept = None

    def push_back(self, text: str) -> None:
        """Return text to the source as unread.

        During an attempt this does nothing, since `back` follows.
        """
        if self._kept is None:
            self.text = text + self.text[self.at :]
            self.at = 0

    def peek(self) -> Reader[str]:
        """Return the next character, "" at the end."""
        while self.at >= len(self.text):
            if self.is_over:
                return ""
            yield
        return self.text[self.at]

    def space(self, pattern: re.Pattern[str] = SPACE) -> Reader[str]:
        """Read and return white space."""
        space = ""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            space += match[0]
            self.at = match.end()
            if self.at < len(self.text) or self.is_over:
                return space
            yield

    def comes(self, marks: tuple[str, ...]) -> Reader[bool]:
        """Return True if one of the marks comes next. Read nothing."""
        while not self.text.startswith(marks, self.at):
            rest = self.text[self.at :]
            if self.is_over or not any(mark.startswith(rest) for mark in marks):
                return False
            yield
        return True

    def literal(self, mark: str) -> Reader[bool]:
        """Read `mark` if it comes next, and return True. A part of it at the end of the text is
        read too.
        """
        while not self.text.startswith(mark, self.at):
            if len(self.text) - self.at >= len(mark) or not mark.startswith(self.text[self.at :]):
                return False
            if self.is_over:
                self.at = len(self.text)
                return False
            yield
        self.at += len(mark)
        return True

    def name(self, pattern: re.Pattern[str], end: str) -> Reader[str | None]:
        """Read a name and its `end`; return the name. Read nothing and return None if absent."""
        while True:
            match = pattern.match(self.text, self.at)
            after = match.end() if match is not None else self.at
            rest = self.text[after : after + len(end)]
            if match is not None and rest == end:
                self.at = after + len(end)
                return match[0]
            if self.is_over or not end.startswith(rest):
                return None
            yield
