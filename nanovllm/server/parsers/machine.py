"""State machine shared by all families: reasoning, then text that contains calls.

- White space next to a marker belongs to the marker. Between two texts separated by a call, the
  last of it is kept.
- <think> is a marker only at the beginning of the output. A call's opener is one only if the client
  sent tools. A call inside reasoning ends the reasoning.
- Text that only looks like a call is shown: the opener becomes text, and the rest is read again.
- A call that has started (its name was sent) and is truncated keeps its arguments as written, not
  closed. The text outside of calls is shown.
- A call without its opener is accepted at the beginning of a line, outside of fenced code. Under a
  grammar it is accepted only at the beginning of the text.
"""

from __future__ import annotations

import re

from nanovllm.server.detokenize import held_back
from nanovllm.server.parsers.base import (
    CallEnd,
    CallPart,
    CallStart,
    Event,
    Family,
    Marks,
    Reader,
    Reasoning,
    Schemas,
    Source,
    Text,
)
from nanovllm.server.parsers.markers import END_THINK, THINK

WHITE = re.compile(r"\s*")
FENCE = "```"


class OutputParser:
    """Parser of one output."""

    def __init__(
        self,
        family: Family,
        marks: Marks,
        turn: str,
        schemas: Schemas | None,
        *,
        is_spelled: bool = False,
        mends: bool = True,
    ) -> None:
        """`turn` is the part of the turn in the prompt. `schemas` is None if calls are not wanted.

        `is_spelled` means that a grammar constrained the output. It works on letters, not tokens,
        so markers count in any tokenisation. `mends` accepts calls with missing parts; it must be
        False under a grammar.
        """
        self._family = family
        self._shown = {ord(mark): name for name, mark in marks.items() if mark != name}
        self._is_spelled = is_spelled
        if is_spelled:
            marks = {name: name for name in marks}
        self._marks = marks
        self._schemas: Schemas = schemas or {}
        self._think = marks[THINK] if family.thinks else ""
        self._end_think = marks[END_THINK] if family.thinks else ""
        self._opener = marks[family.opener] if schemas is not None and family.read_calls else ""
        self._mends = family.mends if mends and self._opener else None
        self._is_amid_text = mends  # a call without an opener is accepted within the text
        self._bare = family.bare if self._opener else ()
        self._read_bare = family.read_bare
        if self._mends is not None:
            self._bare, self._read_bare = (self._mends.begin,), self._mends.read_bare
        self._awaited = {  # by `in_reasoning`
            True: [mark for mark in (self._end_think, self._opener) if mark],
            False: [mark for mark in (self._opener, *self._bare) if mark],
        }
        self._are_tokens = len(self._shown) == len(marks) and not is_spelled and not self._bare
        self._line = ""  # beginning of the text's last line
        self._is_fenced = False
        self._events: list[Event] = []
        self._parts: list[str] = []  # of the arguments of the current call
        self._space = ""  # at the end of the text; dropped if a marker follows
        self._has_text = False
        self._is_called = False  # the current attempt has started a call
        self.is_amid_call = False  # a call has started, and its arguments are incomplete
        self._is_flowing = False  # in text or reasoning, with nothing held back
        begun, self._is_fresh = family.begun(turn)  # fresh: directly after a marker
        self.in_reasoning = bool(begun)  # the text fed so far ends inside reasoning
        self._source = Source()
        self._reader = self._read(has_begun=begun is not None)

    def feed(self, text: str) -> list[Event]:
        if self._is_flowing and not self._awaited[self.in_reasoning]:
            return [Text(self._named(text))] if text else []  # nothing ends this state
        self._events = []
        if self._is_flowing and self._are_tokens and text.isascii():
            self._add_text(text)  # no marker is ASCII
            return self._events
        self._source.feed(self._named(text) if self._is_spelled else text)
        next(self._reader, None)
        if self._parts:
            self._flush()
        return self._events

    def finish(self) -> list[Event]:
        """Return the events that were held back until the end of the stream."""
        self._source.is_over = True
        events = self.feed("")
        if not self._is_fresh:
            self._emit_text(self._space)
        return events

    def _read(self, *, has_begun: bool) -> Reader[None]:
        if not has_begun:
            yield from self._begin()
        while True:
            if self._is_fresh:
                yield from self._settle()
            mark = yield from self._marker()
            if not mark:
                return
            if mark in self._bare:
                self._source.push_back(mark)
                is_begin = not self._has_text or self._is_amid_text
                may_call = is_begin and not self._line and not self._is_fenced
                if not (may_call and (yield from self._calls(is_bare=True))):
                    self._source.at += len(mark)
                    self._add_text(mark)
            elif mark != self._opener:
                self._enter_text()
            elif not (yield from self._calls()):
                self._add_text(mark)

    def _begin(self) -> Reader[None]:
        source = self._source
        source.keep()
        yield from source.space(WHITE)
        if (yield from source.literal(self._think)):
            self.in_reasoning = self._is_fresh = True
        elif (yield from source.literal(self._end_think)):
            self._enter_text()
        else:
            source.back()
        source.commit()

    def _settle(self) -> Reader[None]:
        """Drop white space and redundant markers, if anything follows."""
        source = self._source
        known = self._think if self.in_reasoning else self._end_think
        gap = ""
        is_known = True
        while is_known:
            gap += yield from source.space(WHITE)
            source.keep()
            is_known = bool(known) and (yield from source.literal(known))
            if not is_known:
                source.back()
            source.commit()
        if (yield from source.peek()):
            self._is_fresh = False
            if self._has_text:
                self._space = gap or self._space

    def _marker(self) -> Reader[str]:
        """Emit the text before the next marker; read the marker and return it, "" at the end."""
        source = self._source
        awaited = self._awaited[self.in_reasoning]
        while True:
            text = source.text[source.at :]
            positions = [(at, mark) for mark in awaited if (at := text.find(mark)) >= 0]
            at, mark = min(positions, default=(0, ""))
            if not mark:
                held = max((held_back(text, mark) for mark in awaited), default=0)
                at = len(text) - (0 if source.is_over else held)
            self._add_text(text[:at])
            source.at += at + len(mark)
            if mark or source.is_over:
                return mark
            self._is_flowing = at == len(text)
            yield
            self._is_flowing = False

    def _calls(self, *, is_bare: bool = False) -> Reader[bool]:
        """Read the calls after an opener. Return True if there are any; otherwise read nothing."""
        source = self._source
        read = self._family.read_calls
        if is_bare:
            read = self._read_bare
        elif self._mends is not None:
            read = self._mends.read_calls
        source.keep()
        self._is_called = False
        assert read is not None
        yield from read(source, self._call, self._marks, self._schemas)
        if not self._is_called:
            source.back()
        source.commit()
        return self._is_called

    def _enter_text(self) -> None:
        """Enter the text after a marker. The white space is kept only between two texts."""
        self.in_reasoning = False
        self._is_fresh = True
        self._line = ""
        self._is_fenced = False
        if not self._has_text:
            self._space = ""

    def _call(self, event: CallStart | CallPart | CallEnd) -> None:
        if isinstance(event, CallPart):
            self._parts.append(event.text)
            return
        self.is_amid_call = isinstance(event, CallStart)
        if isinstance(event, CallEnd):
            return
        self._source.commit()
        self._is_called = True
        self._enter_text()
        self._flush()
        self._events.append(event)

    def _flush(self) -> None:
        if text := "".join(self._parts):
            self._events.append(CallPart(self._named(text)))
        self._parts.clear()

    def _add_text(self, text: str) -> None:
        """Emit text, but hold back white space at its end, which a marker would drop."""
        if not text:
            return
        if self._bare:
            self._follow_lines(text)
        if not text[-1].isspace() or not self._awaited[self.in_reasoning]:
            self._emit_text(self._space + text)
            self._space = ""
        elif stripped := text.rstrip():
            self._emit_text(self._space + stripped)
            self._space = text[len(stripped) :]
        else:
            self._space += text

    def _follow_lines(self, text: str) -> None:
        for part in text.splitlines(keepends=True):
            self._line = (self._line + part).lstrip()[: len(FENCE)]
            if part.endswith("\n"):
                self._is_fenced ^= self._line == FENCE
                self._line = ""

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        if self._parts:
            self._flush()
        text = self._named(text)
        if self.in_reasoning:
            self._events.append(Reasoning(text))
        else:
            self._has_text = True
            self._events.append(Text(text))

    def _named(self, text: str) -> str:
        """Return the text with each marker's stand-in character replaced by the marker's name.

        The detokenizer writes a stand-in for the special token of a marker. Stand-ins that remain
        in shown text did not act as markers.
        """
        return text if text.isascii() else text.translate(self._shown)
