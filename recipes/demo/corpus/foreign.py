"""Texts in other languages and scripts, and the demo's answers to them.

The answer is one sentence: the demo reads only English. For Chinese, the sentence is in Chinese and
English.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.refuse import CANNOT_TRANSLATE, ONLY_ENGLISH, ONLY_ENGLISH_CHINESE
from recipes.demo.corpus.sample import Sample, user

# Ranges of letters for invented words. Their bytes are enough to recognise the script.
LETTERS = {
    "Chinese": [(0x4E00, 0x9FA5)],
    "Japanese": [(0x3041, 0x3093), (0x30A1, 0x30F3)],
    "Korean": [(0xAC00, 0xD7A3)],
    "Russian": [(0x0430, 0x044F)],
    "Arabic": [(0x0627, 0x063A), (0x0641, 0x064A)],
    "Greek": [(0x03B1, 0x03C9)],
    "Hebrew": [(0x05D0, 0x05EA)],
    "Hindi": [(0x0905, 0x0939), (0x0995, 0x09A8), (0x0B95, 0x0BB9)],
    "Thai": [(0x0E01, 0x0E2E)],
    "Georgian": [(0x10D0, 0x10F0), (0x0561, 0x0586), (0x1200, 0x1240)],
}
UNSPACED = ("Chinese", "Japanese", "Thai")
OFTEN = {"Chinese": 8, "Japanese": 3, "Russian": 3, "Korean": 2, "Arabic": 2, "German": 3}
OFTEN |= {"French": 3, "Spanish": 3}
ASIDE = [
    "(What does|What is) {0}( mean|)?",
    "(What is the meaning of|Explain|Read) {0}(.|?)",
    "(Translate|Please translate) {0}( to English| for me|)(.|)",
    "(In|Which|What) language is (this: |){0}?",
]


@dataclass(frozen=True)
class Language:
    phrases: list[str]
    words: list[str]


@cache
def languages() -> dict[str, Language]:
    by_name: dict[str, Language] = {}
    text = (Path(__file__).parent / "foreign.txt").read_text(encoding="utf-8")
    for section in text.split("\n== ")[1:]:
        name, phrases, terms = section.strip().split("\n")
        lists = [line.partition(": ")[2].split(" | ") for line in (phrases, terms)]
        by_name[name] = Language(*lists)
    return by_name


def letters(draw: Draw, name: str) -> str:
    """Return invented words in this script."""
    ranges = LETTERS[name]
    low, high = draw.pick(ranges)
    many = 2 if name in ("Chinese", "Korean") else 5
    return ("" if name in UNSPACED else " ").join(
        "".join(chr(draw.number(low, high)) for _ in range(draw.number(1, 2 * many)))
        for _ in range(draw.number(1, 5))
    )


def written(draw: Draw, name: str) -> str:
    """Return a text in this language: one phrase or several, shuffled words, or invented words."""
    known = languages().get(name)
    shape = draw.random.random()
    if known is None or (name in LETTERS and shape < 0.25):
        return letters(draw, name)
    if shape < 0.6:
        return draw.pick(known.phrases)
    if shape < 0.7:
        ends = [draw.pick(known.phrases) for _ in range(draw.number(2, 3))]
        return draw.pick([" ", ", ", ". ", "\n"]).join(ends)
    link = "" if name in UNSPACED else " "
    text = link.join(draw.pick(known.words) for _ in range(draw.number(3, 14)))
    text += draw.pick(["", "", ".", "?", "!", "。" if name in ("Chinese", "Japanese") else "?"])
    return text[0].upper() + text[1:] if draw.chance(0.5) else text


def any_language(draw: Draw) -> tuple[str, str]:
    """Return a language's name and a text in it, on this side of the split."""
    names = sorted({*languages(), *LETTERS})
    often = [name for name in names for _ in range(OFTEN.get(name, 1))]

    def make() -> tuple[str, str]:
        name = draw.pick(often)
        return name, written(draw, name)

    return draw.from_split(make, key=lambda name_and_text: name_and_text[1])


def foreign(draw: Draw) -> Sample:
    name, text = any_language(draw)
    if draw.chance(0.08):
        quoted = draw.pick(['"{0}"', "{0}", "'{0}'"]).replace("{0}", text.strip(".?!。"))
        text = draw.wording(ASIDE).replace("{0}", quoted)
        thought = "I cannot translate."
        return Sample("foreign", [user(text)], CANNOT_TRANSLATE, thought=thought, refuses=True)
    if draw.chance(0.15):
        text = text.lower().rstrip(".?!。")
    answer = ONLY_ENGLISH_CHINESE if name == "Chinese" else ONLY_ENGLISH
    return Sample("foreign", [user(text)], answer, thought="This is not English.", refuses=True)
