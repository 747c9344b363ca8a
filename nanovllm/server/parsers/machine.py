"""The machine all families share: reasoning, then text with calls in it.

White space beside a marker belongs to the marker; between two texts with a call between them, the
last of it stays. <think> is a marker only where the output begins, what opens a call only when
the client sent tools. A call inside reasoning ends the reasoning. What looks like a call and is
none is shown as what it is: the opener becomes text, and what follows is read again. A call that
has started (its name was sent) and breaks off keeps its arguments as they were written, not
closed; what belongs to no call is text. A call without its opener counts where a line of the text
begins with it, outside of fenced code; under a grammar only where the text begins.
"""

from __future__ import annotations

import re

from nanovllm.server.detokenize import held_back
from nanovllm.server.parsers.base import (
    END_THINK,
    THINK,
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

WHITE = re.compile(r"\s*")
FENCE = "```"


class OutputParser:
    """Reads one output."""

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
        """`turn`: what the prompt has already written of it. `schemas` None: no calls wanted.

        `is_spelled`: a grammar ruled the output. It knows letters and not tokens, so that markers
        count however they were written. `mends`: the family's may be missing; not under a grammar.
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
        self._is_amid_text = mends  # a call without an opener counts there, too
        self._bare = family.bare if self._opener else ()
        self._read_bare = family.read_bare
        if self._mends is not None:
            self._bare, self._read_bare = (self._mends.begin,), self._mends.read_bare
        self._awaited = {  # by `in_reasoning`
            True: [mark for mark in (self._end_think, self._opener) if mark],
            False: [mark for mark in (self._opener, *self._bare) if mark],
        }
        self._are_tokens = len(self._shown) == len(marks) and not is_spelled and not self._bare
        self._line, self._is_fenced = "", False  # of the text: how its last line begins
        self._events: list[Event] = []
        self._parts: list[str] = []  # of the arguments of the call that goes on
        self._space = ""  # at the end of what was said: a marker may take it
        self._has_text = False
        self._is_called = False  # the calls that are read have begun
        self.is_amid_call = False  # a call has started, and its arguments are not whole
        self._is_flowing = False  # amid text or reasoning, and nothing is held back
        begun, self._is_fresh = family.begun(turn)  # fresh: a marker came last
        self.in_reasoning = bool(begun)  # whether the text fed so far ends inside reasoning
        self._source = Source()
        self._reader = self._read(has_begun=begun is not None)

    def feed(self, text: str) -> list[Event]:
        if self._is_flowing and not self._awaited[self.in_reasoning]:
            return [Text(self._named(text))] if text else []  # nothing ends this state
        self._events = []
        if self._is_flowing and self._are_tokens and text.isascii():
            self._say(text)  # no marker is ASCII
            return self._events
        self._source.feed(self._named(text) if self._is_spelled else text)
        next(self._reader, None)
        if self._parts:
            self._flush()
        return self._events

    def finish(self) -> list[Event]:
        """The stream ended: what was held back."""
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
                    self._say(mark)
            elif mark != self._opener:
                self._enter_text()
            elif not (yield from self._calls()):
                self._say(mark)

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
        """Drops white space, and markers that say again what is known, if anything follows."""
        source = self._source
        known = self._think if self.in_reasoning else self._end_think
        gap, is_known = "", True
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
        """Says what comes before the next marker, and reads that; none at the end."""
        source, awaited = self._source, self._awaited[self.in_reasoning]
        while True:
            text = source.text[source.at :]
            found = [(at, mark) for mark in awaited if (at := text.find(mark)) >= 0]
            at, mark = min(found, default=(0, ""))
            if not mark:
                held = max((held_back(text, mark) for mark in awaited), default=0)
                at = len(text) - (0 if source.is_over else held)
            self._say(text[:at])
            source.at += at + len(mark)
            if mark or source.is_over:
                return mark
            self._is_flowing = at == len(text)
            yield
            self._is_flowing = False

    def _calls(self, *, is_bare: bool = False) -> Reader[bool]:
        """Reads what an opener opens: whether there was a call. If not, nothing was read."""
        source, read = self._source, self._family.read_calls
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
        """A marker was read: its white space is not shown, unless it parts two texts."""
        self.in_reasoning, self._is_fresh = False, True
        self._line, self._is_fenced = "", False
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

    def _say(self, text: str) -> None:
        """White space at the end waits: a marker would take it."""
        if not text:
            return
        if self._bare:
            self._follow_lines(text)
        if not text[-1].isspace() or not self._awaited[self.in_reasoning]:
            self._emit_text(self._space + text)
            self._space = ""
        elif said := text.rstrip():
            self._emit_text(self._space + said)
            self._space = text[len(said) :]
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
        """Markers that are none here read as their text."""
        return text if text.isascii() else text.translate(self._shown)
