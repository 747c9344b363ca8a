"""Constructors for the formats of xgrammar's structural tags."""

from __future__ import annotations

from typing import Any

Format = dict[str, Any]
ANY_TEXT: Format = {"type": "any_text"}


def grammar(text: str) -> Format:
    return {"type": "grammar", "grammar": text}


def constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def either(*branches: Format) -> Format:
    return {"type": "or", "elements": list(branches)} if len(branches) > 1 else branches[0]


def sequence(*elements: Format) -> Format:
    """Return the elements in sequence, without empty strings. One element is returned by itself.

    Only empty constants are dropped, since a client's format may be any JSON.
    """
    kept = [element for element in elements if element != constant("")]
    return {"type": "sequence", "elements": kept} if kept[1:] else next(iter(kept), constant(""))


def optional(*elements: Format) -> Format:
    return {"type": "optional", "content": sequence(*elements)}
