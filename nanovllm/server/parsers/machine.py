"""The machine all families share: reasoning, then text with calls in it.

White space beside a marker belongs to the marker; between two texts with a call between them, the
last of it stays. <think> is a marker only where the output begins, what opens a call only when
the client sent tools. A call inside reasoning ends the reasoning. What looks like a call and is
none is shown as what it is: the opener becomes text, and what follows is read again. A call that
has started (its name was sent) and breaks off is closed; what did not fit is text.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.server.detokenize import held_back
from nanovllm.server.parsers.base import (
    END_THINK,
    THINK,
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

# States: plain numbers, because the attributes of an Enum cost 0.1 us each, some times a token.
START = 0  # nothing but white space so far
REASONING = 1
TEXT = 2


class Machine:
    """`OutputParser` for one output."""

    def __init__(
        self,
        family: Family,
        marks: Marks,
        turn: str,
        schemas: Schemas | None,
        *,
        is_spelled: bool = False,
    ) -> None:
        """`turn`: what the prompt has already written of it. `schemas` None: no calls wanted.

        `is_spelled`: a grammar ruled the output. It knows letters and not tokens, so that markers
        count however they were written.
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
        self._awaited = {
            REASONING: [mark for mark in (self._end_think, self._opener) if mark],
            TEXT: [self._opener] if self._opener else [],
        }
        self._are_tokens = len(self._shown) == len(marks) and not is_spelled
        self._events: list[Event] = []
        self._parts: list[str] = []  # of the arguments of the call that goes on
        self._buffer = ""
        self._space = ""  # at the end of what was said: a marker may take it
        self._gap = ""  # white space since the marker
        self._has_text = False
        self._source: Source | None = None  # while a reader is at work
        self._reader: Reader[None]
        self._is_called = False  # the reader has started a call
        self._is_over = False
        self._state, self._is_fresh = _begun(family, turn)

    @property
    def in_reasoning(self) -> bool:
        return self._state == REASONING

    @property
    def _is_flowing(self) -> bool:
        """Amid text or reasoning."""
        return not self._is_fresh and self._source is None and self._state != START

    def feed(self, text: str) -> list[Event]:
        if self._state == TEXT and not self._opener and not self._is_fresh:
            return [Text(self._named(text))] if text else []  # nothing ends this state
        self._events = []
        if self._are_tokens and self._is_flowing and text.isascii():
            self._say(text)  # no marker is ASCII
            return self._events
        self._buffer += self._named(text) if self._is_spelled else text
        while self._step():
            pass
        if self._parts:
            self._flush()
        return self._events

    def finish(self) -> list[Event]:
        self._is_over = True
        events = self.feed("")
        if self._state == START:
            self._state = TEXT
        if self._buffer:
            if self._is_fresh:
                self._end_gap()
            self._say(self._buffer)
        if not self._is_fresh:
            self._emit_text(self._space)
        return events

    def _step(self) -> bool:
        """Take what is sure from the buffer; whether there may be more."""
        if self._source is not None:
            return self._read(self._source)
        if self._state == START:
            return self._begin()
        if self._is_fresh and not self._settle():
            return False
        awaited = self._awaited[self._state]
        at, mark = first(self._buffer, awaited)
        if mark:
            self._say(self._buffer[:at])
            self._buffer = self._buffer[at + len(mark) :]
            if mark == self._opener:
                self._open()
            else:
                self._enter_text()
            return True
        sure = len(self._buffer) - max((held_back(self._buffer, m) for m in awaited), default=0)
        if sure:
            self._say(self._buffer[:sure])
            self._buffer = self._buffer[sure:]
        return False

    def _begin(self) -> bool:
        begun = self._buffer.lstrip()
        if begun.startswith(self._think):
            self._buffer = begun[len(self._think) :]
            self._state, self._is_fresh = REASONING, True
        elif begun.startswith(self._end_think):
            self._enter_text()
        elif self._think.startswith(begun) or self._end_think.startswith(begun):
            return False
        else:
            self._state = TEXT
        return True

    def _settle(self) -> bool:
        """Drop white space, and a marker that says again what is known; whether text follows."""
        known = self._think if self._state == REASONING else self._end_think
        while True:
            text = self._buffer.lstrip()
            self._gap += self._buffer[: len(self._buffer) - len(text)]
            self._buffer = text
            if not text or (known.startswith(text) and text != known):
                return False
            if not known or not text.startswith(known):
                break
            self._buffer = text[len(known) :]
        self._end_gap()
        return True

    def _end_gap(self) -> None:
        if self._has_text:
            self._space = self._gap or self._space
        self._is_fresh = False

    def _enter_text(self) -> None:
        """A marker was read: its white space is not shown, unless it parts two texts."""
        self._state, self._is_fresh = TEXT, True
        self._gap = ""
        if not self._has_text:
            self._space = ""

    def _open(self) -> None:
        self._source = Source()
        self._source.keep()
        self._is_called = False
        assert self._family.read_calls is not None
        self._reader = self._family.read_calls(self._source, self._call, self._marks, self._schemas)

    def _read(self, source: Source) -> bool:
        source.feed(self._buffer)
        source.is_over = self._is_over
        self._buffer = ""
        if next(self._reader, True) is None:
            return False
        self._source = None
        if not self._is_called:
            source.back()
            self._say(self._opener)
        self._buffer = source.text[source.at :]
        return True

    def _call(self, event: CallStart | CallPart) -> None:
        if isinstance(event, CallPart):
            self._parts.append(event.text)
            return
        assert self._source is not None
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
        if not text[-1].isspace() or not self._awaited[self._state]:
            self._emit_text(self._space + text)
            self._space = ""
        elif said := text.rstrip():
            self._emit_text(self._space + said)
            self._space = text[len(said) :]
        else:
            self._space += text

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        if self._parts:
            self._flush()
        text = self._named(text)
        if self._state == REASONING:
            self._events.append(Reasoning(text))
        else:
            self._has_text = True
            self._events.append(Text(text))

    def _named(self, text: str) -> str:
        """Markers that are none here read as their text."""
        return text if text.isascii() else text.translate(self._shown)


def _begun(family: Family, turn: str) -> tuple[int, bool]:
    """The state a prompt leaves the machine in, and whether a marker came last."""
    if not family.thinks:
        return TEXT, False
    end = turn.rstrip()
    if turn.rfind(THINK) > turn.rfind(END_THINK):
        return REASONING, end.endswith(THINK)
    if end:
        return TEXT, end.endswith(END_THINK)
    return START, False


def first(text: str, marks: Iterable[str]) -> tuple[int, str]:
    """Where the first of the marks is, and which; an empty one if there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(0, ""))
