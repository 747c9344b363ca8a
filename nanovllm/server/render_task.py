"""Messages between an API process and the subprocess that renders its prompts."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class Task(Struct, frozen=True):
    """A template and its variables."""

    source: str
    options: dict[str, Any]
    max_s: float
    arguments_as_text: bool = False  # of past calls; otherwise as objects
    is_continued: bool = False  # the prompt ends within the last message


class Rendered(Struct, frozen=True):
    """A prompt, or an error."""

    text: str
    # "broken": a syntax error in the template. "refused": the template raised an error. "changed":
    # the message to be continued is not in the prompt. "long": the prompt has too many characters.
    # "limit": the template exceeded time or memory, and the process ends.
    error: Literal["", "broken", "refused", "changed", "long", "limit"] = ""
