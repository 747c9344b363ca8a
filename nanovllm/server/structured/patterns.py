"""Regular expressions of clients: which of them xgrammar 0.2.8 takes at their word, and the formats
of JSON Schema as such expressions.

Decision: expressions are read by Python's own reader, whose dialect is nearly ECMA's, only to find
what xgrammar would ignore (look-around, flags, anchors inside), would take literally inside a JSON
string (quotes, backslashes) or fail at (large counts).
Decision: for JSON strings they are written anew. There `(ab*)?c` would match "bbc": what repeats a
group goes wrong where the group ends in a repetition. Branches and single characters are right.
"""

from __future__ import annotations

import re
import warnings
from re import _constants as op, _parser as reader  # type: ignore[attr-defined]
from typing import Any

MAX_CHARS = 2048
MAX_COUNT = 128  # of one repetition; with more it fails inside a JSON schema
MAX_STATES = 1000  # each takes 2 to 20 ms to compile
CHARACTERS = (op.IN, op.LITERAL, op.NOT_LITERAL, op.ANY, op.RANGE, op.CATEGORY, op.NEGATE)
NOTHING = "(?:)"  # parts states that would be taken for one: `a|a{1,2}` would match "aaa"
Items = Any  # the reader's: a list of (code, value)

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
_FORMATS = {
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


class PatternError(ValueError):
    """Says what in the expression cannot be enforced."""


def whole(pattern: str) -> str:
    """An expression for whole texts, in JSON strings, in which `pattern` is found.

    Raises PatternError.
    """
    starts, inner, ends = _read(pattern, in_json=True)
    return f"{'' if starts else '.*'}{inner}{NOTHING if ends else '.*'}"


def vet(pattern: str) -> None:
    """Of one for whole texts outside of JSON. Raises PatternError."""
    _read(pattern, in_json=False)


def _read(pattern: str, *, in_json: bool) -> tuple[bool, str, bool]:
    """Whether it is anchored at its start, what is between, and whether it is at its end."""
    if len(pattern) > MAX_CHARS:
        raise PatternError(f"more than {MAX_CHARS} characters")
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = reader.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"a form that is not known ({error})") from None
    if tree.state.flags != re.UNICODE:
        raise PatternError("flags")
    items = list(tree)
    starts, ends = items[:1] == [(op.AT, op.AT_BEGINNING)], items[-1:] == [(op.AT, op.AT_END)]
    return starts, _written(items[starts : len(items) - ends], in_json)[0], ends


def _written(items: Items, in_json: bool) -> tuple[str, int]:
    """Written anew, and about how many states it has: groups repeat by branches, some empty."""
    text, states = "", 0
    for code, value in items:
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, most, repeated = value
            high: int | None = None if most is op.MAXREPEAT else most
            if max(low, high or 0) > MAX_COUNT:
                raise PatternError(f"a repetition of more than {MAX_COUNT} times")
            inner, count = _written(repeated, in_json)
            states += max(low, high or 1) * count
            if len(repeated) == 1 and repeated[0][0] in CHARACTERS and high != 0:
                counted = f"{inner}{{{low or 1},{'' if high is None else high}}}"
                text += counted if low else f"(?:|{counted})"
                continue
            more = f"(?:|(?:{inner})+)" if high is None else ""
            for _ in range(low, high or low):
                more = f"(?:|(?:{inner}){more})"
            text += f"(?:{inner})" * low + more
        elif code in (op.BRANCH, op.SUBPATTERN) and not (code is op.SUBPATTERN and any(value[1:3])):
            branches = value[1] if code is op.BRANCH else [value[3]]
            made = [_written(branch, in_json) for branch in branches]
            text += f"(?:{'|'.join(inner for inner, _ in made)}){NOTHING}"
            states += sum(count for _, count in made)
        elif code in CHARACTERS:
            parts = value if code is op.IN else [(code, value)]
            inner = "".join(_class(part, in_json) for part in parts)
            text += "." if code is op.ANY else f"[{inner}]"
            states += 1
        else:
            name = (
                str(code).lower().replace("assert", "look-around").replace("groupref", "reference")
            )
            raise PatternError(f"{name}, a form that is not known")
        if states > MAX_STATES:
            raise PatternError(f"repetitions that come to more than {MAX_STATES} characters")
    return text, states


def _class(part: tuple[Any, Any], in_json: bool) -> str:
    code, value = part
    if code in (op.NEGATE, op.ANY):
        return "^"
    if code is op.CATEGORY:
        name = str(value).removeprefix("CATEGORY_")
        return "\\" + (name[4] if name.startswith("NOT_") else name[0].lower())
    ends = value if code is op.RANGE else (value,)
    is_quoted = code is op.LITERAL and chr(value) in '"\\'
    if in_json and code is not op.NOT_LITERAL and (ends[0] < 0x20 or is_quoted):
        raise PatternError("a quote, a backslash or a control character")
    return "^" * (code is op.NOT_LITERAL) + "-".join(f"\\u{{{end:x}}}" for end in ends)


FORMATS = _FORMATS
