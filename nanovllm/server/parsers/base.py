"""What parsers return and what they promise, and text read by generators as it arrives.

A parser is fed text as it arrives and returns events. However the text is cut into pieces, the
events add up to the same: a parser that peeks at piece boundaries is wrong.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TypeAlias, TypeVar

from msgspec import Struct

T = TypeVar("T")
THINK, END_THINK = "<think>", "</think>"
SPACE = re.compile(r"[ \t\r\n]*")  # JSON's
# No mark may be part of a name: see Vocabulary.marks.
FUNCTION_NAME = re.compile(r'[^\s<>"\ud800-\udfff]{1,256}')
KEY_NAME = re.compile(r'[^\r\n<>"\ud800-\udfff]{1,256}')


class Text(Struct, frozen=True):
    text: str


class Reasoning(Struct, frozen=True):
    text: str


class CallStart(Struct, frozen=True):
    name: str


class CallPart(Struct, frozen=True):
    """A part of the arguments of the call started last. All parts together are one JSON object
    if the call is whole. Arguments that were cut or broken stay as the model wrote them."""

    text: str


class CallEnd(Struct, frozen=True):
    """The call started last is whole. Only readers emit it; clients see no such event."""


Event = Text | Reasoning | CallStart | CallPart
Emit = Callable[[CallStart | CallPart | CallEnd], None]
Schemas = Mapping[str, object]  # function name -> JSON Schema of its arguments
Marks = Mapping[str, str]  # a marker -> how it reads in the text that is fed
Reader = Generator[None, None, T]  # yields when it needs more text
Read: TypeAlias = "Callable[[Source, Emit, Marks, Schemas], Reader[None]]"


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with as few events as possible."""
    out: list[Event] = []
    for kind, run in itertools.groupby(events, type):
        if kind is CallStart:
            out.extend(run)
        else:
            out.append(kind("".join(e.text for e in run if not isinstance(e, CallStart))))
    return out


class Syntax(Struct, frozen=True):
    """What a call looks like, to the byte. NAME is a function's or a parameter's, QUOTED the same
    as JSON."""

    call: tuple[str, str]  # before and after the arguments
    block: tuple[str, str] = ("", "")  # before the first call and after the last
    between: str = "\n"
    is_single: bool = False  # a turn has at most one call
    style: str = "json"  # of the arguments
    parameter: tuple[str, str] = ("", "")  # before and after one in XML


class Mends(Struct, frozen=True):
    """What a family's models leave out of calls at times, where no grammar makes them write it."""

    begin: str  # of a call that nothing opened
    read_bare: Read  # such a call, from `begin` on
    read_calls: Read  # instead of the family's


class Family(Struct, frozen=True):
    """How the models of one family write. Without `read_calls` they call nothing."""

    thinks: bool = True
    turns: tuple[str, ...] = ()  # after the last of these in a prompt, the model's own turn begins
    tool_template: str = ""  # ours, for chat templates that ignore tools
    opener: str = ""  # begins calls
    call_markers: tuple[str, ...] = ()  # the others that may be single tokens
    bare: tuple[str, ...] = ()  # what a call without an opener begins with; then `read_bare`
    read_bare: Read | None = None
    syntax: Syntax | None = None  # as its models write calls, and its templates
    read_calls: Read | None = None
    mends: Mends | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        thinking = (THINK, END_THINK) if self.thinks else ()
        return thinking + ((self.opener, *self.call_markers) if self.read_calls else ())

    def last_turn(self, prompt: str) -> str:
        """What a prompt has already written of the model's turn.

        A template of another family shows no turns: then only a marker at the very end counts.
        """
        if begins := [at + len(turn) for turn in self.turns if (at := prompt.rfind(turn)) >= 0]:
            return prompt[max(begins) :]
        end = prompt.rstrip()
        return next((marker for marker in (THINK, END_THINK) if end.endswith(marker)), "")

    def begun(self, turn: str) -> tuple[bool | None, bool]:
        """Whether it ends in reasoning (None: nothing has begun), and whether with a marker."""
        if not self.thinks:
            return False, False
        end = turn.rstrip()
        if turn.rfind(THINK) > turn.rfind(END_THINK):
            return True, end.endswith(THINK)
        return (False, end.endswith(END_THINK)) if end else (None, False)


class Source:
    """Text that arrives in pieces. Its readers decide nothing by where a piece ends."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # what is before was read
        self.is_over = False  # no more will come
        self._kept: int | None = None  # from here it may be read again

    def feed(self, text: str) -> None:
        begin = self.at if self._kept is None else self._kept
        self.text = self.text[begin:] + text
        self.at -= begin
        self._kept = None if self._kept is None else 0

    def keep(self) -> None:
        """An attempt begins: `back` returns here until `commit`."""
        if self._kept is None:
            self._kept = self.at

    def back(self) -> None:
        if self._kept is not None:
            self.at = self._kept

    def commit(self) -> None:
        self._kept = None

    def push_back(self, text: str) -> None:
        """It was not read after all. During an attempt nothing is: `back` will follow."""
        if self._kept is None:
            self.text = text + self.text[self.at :]
            self.at = 0

    def peek(self) -> Reader[str]:
        """The next character; none at the end."""
        while self.at >= len(self.text):
            if self.is_over:
                return ""
            yield
        return self.text[self.at]

    def space(self, pattern: re.Pattern[str] = SPACE) -> Reader[str]:
        """Reads white space."""
        space = ""
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            space += found[0]
            self.at = found.end()
            if self.at < len(self.text) or self.is_over:
                return space
            yield

    def comes(self, marks: tuple[str, ...]) -> Reader[bool]:
        """Whether one of the marks comes next. Reads nothing."""
        while not self.text.startswith(marks, self.at):
            rest = self.text[self.at :]
            if self.is_over or not any(mark.startswith(rest) for mark in marks):
                return False
            yield
        return True

    def literal(self, mark: str) -> Reader[bool]:
        """Reads `mark` if it comes next. The half of one at the end is read as well."""
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
        """Reads a name and what ends it; None, and nothing is read, if there is no such thing."""
        while True:
            found = pattern.match(self.text, self.at)
            after = found.end() if found is not None else self.at
            rest = self.text[after : after + len(end)]
            if found is not None and rest == end:
                self.at = after + len(end)
                return found[0]
            if self.is_over or not end.startswith(rest):
                return None
            yield
