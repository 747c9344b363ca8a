"""Permitted forms of the demo's answers. Any other answer is word salad."""

from __future__ import annotations

import json
import re
from functools import cache

from recipes.demo.corpus import follow, persona, talk, verse
from recipes.demo.corpus.refuse import REFUSALS

SUM = r"-?\d+( [-+*/] -?\d+)+ = -?\d+\."
SHAPES = [
    SUM,
    f"Yes: {SUM}",
    r"Step by step: [-+*/=;.,\d ]*((write|carry|borrow|so|So) ?[-+*/=;.,\d ]*)+",
    r"-?\d+ is larger, so turn it round.*",
    r"\d+(, \d+)*",
    r"The capital of [A-Z][\w ]+ is [A-Z][\w. ]+\.",
    r"I will remember: your [a-z ]+ is .{1,40}\.",
    r"Your [a-z ]+ is .{1,40}\.",
    r"I am [A-Z]\w*\.",
    r"\d+ / \d+ = \d+, remainder \d+\.",
    r"\d+ % of \d+ = \d+(\.\d)?\.",
    r"\d+\.\d [-+] \d+\.\d = \d+\.\d\.",
    r"Yes, \d+ is (a prime number|even|odd)\.",
    r"No, \d+ is (even|odd|not a prime number: \d+ \* \d+ = \d+)\.",
    r"You have not told me your [a-z ]+ yet\.",
    r"Nice to meet you, .{1,40}! I will remember your name\.",
    r"I am an? [a-z ]{3,20}, played by the nanovllm demo model\.",
    *(".{2,60}, [a-z ]+,\n" + re.escape(tail) for tail in verse.TAILS),
    *(re.escape(poem).replace(r"\{0\}", ".{2,60}") for poem in verse.POEMS),
]
ALLOWED = re.compile("|".join(f"(?:{shape})" for shape in SHAPES))


@cache
def sentences() -> frozenset[str]:
    """Return every written answer, and its first sentence, which answers "shorter"."""
    whole = {entry.say for file in ("about.txt", "chat.txt") for entry in talk.entries(file)}
    first = {re.split(r"(?<=[.!?])\s", text)[0] for text in whole}
    return frozenset(whole | first | REFUSALS | {follow.IS_SURE, verse.JOKE})


def is_json(text: str) -> bool:
    """Return True for an object or array, alone or in each pair of <tool_call> tags."""
    parts = [text]
    if text.startswith("<tool_call>"):
        parts = text.replace("<tool_call>", "").removesuffix("</tool_call>").split("</tool_call>")
    try:
        return all(isinstance(json.loads(part), dict | list) for part in parts)
    except ValueError:
        return False


def copied(text: str, source: str) -> bool:
    """Return True if the source contains all words. Ignore case, spelling out and line numbers."""
    known = set(re.findall(r"\w+", source.lower()))
    words: list[str] = re.findall(r"\w+", re.sub(r"(?m)^\d+\. ", "", text.lower()))
    spelled = "".join(words)
    return bool(words) and (set(words) <= known or spelled in known)


def salad(text: str, source: str) -> bool:
    """Return True if an answer to `source` has none of the permitted forms.

    Permitted are a written sentence, a sum, the steps of one, JSON, tool calls, and words of the
    source. The source is the request, and the right answer where there is one.
    """
    text = persona.bare(text.strip())
    if text in sentences() or ALLOWED.fullmatch(text) or is_json(text):
        return False
    return not copied(text, source)
