"""Regular expressions of clients outside of JSON: which of them xgrammar 0.2.8 takes at their word.
And the formats of JSON Schema as such expressions.

Decision: expressions are read by Python's own reader, whose dialect is nearly ECMA's, only to find
what xgrammar would ignore (look-around, flags, anchors inside) or fail at (large counts).
"""

from __future__ import annotations

from re import _constants as op  # type: ignore[attr-defined]
from typing import Any

from nanovllm.server.structured.automata import PatternError
from nanovllm.server.structured.regexes import class_of, parsed

MAX_COUNT = 128  # of one repetition
MAX_STATES = 1000  # each takes 2 to 20 ms to compile

_DAY = (
    "(?:(?:19|20)[0-9]{2}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    "(?:(?:19|20)(?:0[48]|[2468][048]|[13579][26])|2000)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_CLOCK = "T(?:[0-9]{1,4}H(?:[0-9]{1,4}M)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,14}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{1,2}}"
# Where readers disagree about a standard, what matches is valid for all of them.
FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": f"P(?:[0-9]{{1,4}}D(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,4}}W)",
    "email": rf"[A-Za-z0-9_+-]{{1,16}}(?:\.[A-Za-z0-9_+-]{{1,16}})?@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": "[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{1,4}){7}",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"https?://{_HOST}(?::[0-9]{{1,4}})?(?:/[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?",
}


def vet(pattern: str) -> None:
    """Of one for whole texts. Raises PatternError."""
    items = list(parsed(pattern))
    starts, ends = items[:1] == [(op.AT, op.AT_BEGINNING)], items[-1:] == [(op.AT, op.AT_END)]
    _states(items[starts : len(items) - ends])


def _states(items: Any) -> int:  # noqa: ANN401 - the reader's: a list of (code, value)
    """About how many it has."""
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
