"""How texts and classes of characters are spelled in a grammar that xgrammar reads. No rules."""

from __future__ import annotations

from nanovllm.server.structured.automata import Ranges


def is_rule(item: str) -> bool:
    return item[0] not in '"['


def bare(item: str) -> str:
    """Without its counts."""
    return item.partition("{")[0]


def is_plain(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def literal(text: str) -> str:
    return '"' + "".join(
        c if " " <= c <= "~" and c not in '"\\' else f"\\{c}" if c in '"\\' else _code(ord(c))
        for c in text
    ) + '"'  # fmt: skip


def class_text(ranges: Ranges) -> str:
    parts = (_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges)
    return f"[{''.join(parts)}]"


def _code(code: int) -> str:
    if 0x30 <= code <= 0x39 or 0x41 <= code <= 0x5A or 0x61 <= code <= 0x7A:
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def without(ranges: Ranges, others: Ranges) -> Ranges:
    made = []
    for begin, end in ranges:
        low = begin
        for a, b in others:
            if b < low or a > end:
                continue
            if a > low:
                made.append((low, a - 1))
            low = b + 1
        if low <= end:
            made.append((low, end))
    return tuple(made)
