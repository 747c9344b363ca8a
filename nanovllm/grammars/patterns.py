"""Checks of clients' regular expressions outside JSON against xgrammar 0.2.8.

Decision: Python's own parser reads the expressions, since its dialect is nearly ECMA's. It only
serves to find parts that xgrammar would ignore (look-around, flags, inner anchors) or fail at
(large counts).
"""

from __future__ import annotations

from re import _constants as op  # type: ignore[attr-defined]
from typing import Any

from nanovllm.grammars.automata import PatternError
from nanovllm.grammars.regexes import class_of, parsed

MAX_COUNT = 128  # of one repetition
MAX_STATES = 1000  # each takes 2 to 20 ms to compile


def vet(pattern: str) -> None:
    """Check a pattern for whole texts. Raise PatternError."""
    items = list(parsed(pattern))
    starts, ends = items[:1] == [(op.AT, op.AT_BEGINNING)], items[-1:] == [(op.AT, op.AT_END)]
    _states(items[starts : len(items) - ends])


def _states(items: Any) -> int:  # noqa: ANN401 - the reader's: a list of (code, value)
    """Return an estimate of the number of states."""
    states = 0
    for code, value in items:
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, repeated = value
            high = 0 if most is op.MAXREPEAT else most
            if max(low, high) > MAX_COUNT:
                raise PatternError(f"a repetition of more than {MAX_COUNT} times")
            states += max(low, high or 1) * _states(repeated)
        elif code in (op.BRANCH, op.SUBPATTERN) and not (code is op.SUBPATTERN and any(value[1:3])):
            states += sum(map(_states, value[1] if code is op.BRANCH else [value[3]]))
        else:
            class_of(code, value)
            states += 1
        if states > MAX_STATES:
            raise PatternError(f"repetitions that come to more than {MAX_STATES} characters")
    return states
