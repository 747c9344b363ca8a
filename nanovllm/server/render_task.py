"""What passes between an API process and the process that renders its prompts."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Task(Struct, frozen=True):
    """A template, and the variables it is rendered with."""

    source: str
    options: dict[str, Any]
    max_s: float
    arguments_as_text: bool = False  # of past calls; otherwise as objects
    is_continued: bool = False  # the prompt ends within the last message


class Rendered(Struct, frozen=True):
    """A prompt, or why there is none."""

    text: str
    error: str = ""  # one of ERRORS


ERRORS = (
    "broken",  # the template's syntax
    "refused",  # the template raised an error
    "changed",  # the message to be continued is not in the prompt
    "long",  # the prompt has too many characters
    "limit",  # the template took too much time or memory; the process ends
)
