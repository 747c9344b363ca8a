"""Formats of a structural tag, as xgrammar reads them, put together."""

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
    """Nothing is in it for an empty text: only for that, as a client's format may say anything.
    What is alone in it stands for itself."""
    kept = [element for element in elements if element != constant("")]
    return {"type": "sequence", "elements": kept} if kept[1:] else next(iter(kept), constant(""))


def optional(*elements: Format) -> Format:
    return {"type": "optional", "content": sequence(*elements)}
