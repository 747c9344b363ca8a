"""Emoji: alone, which the demo cannot read, or among words, where they change nothing."""

from __future__ import annotations

from collections.abc import Callable

from recipes.demo.corpus import sums, talk, unknown
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.refuse import ONLY_WORDS
from recipes.demo.corpus.sample import Sample, user

RANGES = [(0x1F600, 0x1F64F), (0x1F300, 0x1F5FF), (0x1F680, 0x1F6C5), (0x1F90C, 0x1F9FF)]
RANGES += [(0x1F600, 0x1F640), (0x1FA70, 0x1FA7C), (0x2600, 0x26FF), (0x2702, 0x27BF)]
COMMON = "😀😂🤣😊😍😘😎😢😭😡👍👎👋🙏👏💪🔥🎉✨⭐❤💔💯🚀🤔🙄😴🐱🐶🍕☕🌍✅❌🎂🤖"
TONES = ["", "", "", "", "\U0001f3fb", "\U0001f3fd", "\U0001f3ff"]
JOINED = ["👨‍👩‍👧", "👩‍💻", "🏳️‍🌈", "❤️", "☀️", "👨‍🚀", "🧑‍🍳", "❤️‍🔥"]
FACES = [":-)", ":)", ":D", ";-)", ":(", ":-(", "<3", "^^", "xD", ":P", ":-/", "=)", ":O", "(:"]


def one(draw: Draw) -> str:
    shape = draw.random.random()
    if shape < 0.35:
        return draw.pick(COMMON)
    if shape < 0.45:
        return draw.pick(JOINED)
    if shape < 0.5:  # a flag is two letters
        return "".join(chr(0x1F1E6 + draw.number(0, 25)) for _ in range(2))
    low, high = draw.pick(RANGES)
    return chr(draw.number(low, high)) + draw.pick(TONES if low == 0x1F90C else [""])


def some(draw: Draw, most: int) -> str:
    """Return one emoji, the same one several times, or several different ones."""
    count = draw.pick([1, 1, 2, 3, draw.number(1, most)])

    def make() -> str:
        if draw.chance(0.3):
            return one(draw) * count
        return draw.pick(["", "", " "]).join(one(draw) for _ in range(count))

    return draw.from_split(make)


def amid(draw: Draw, text: str) -> str:
    """Return the text with emoji before it, after it, or between its words."""
    shape = draw.number(0, 3)
    if shape == 0:
        return f"{some(draw, 3)} {text}"
    if shape == 1:
        at = [i for i, letter in enumerate(text) if letter == " "]
        if at:
            place = draw.pick(at)
            return f"{text[:place]} {some(draw, 2)}{text[place:]}"
    end = draw.pick(FACES) if draw.chance(0.2) else some(draw, 4)
    return text + draw.pick([" ", " ", ""]) + end


def emoji(draw: Draw) -> Sample:
    if draw.chance(0.4):
        text = draw.pick(FACES) if draw.chance(0.1) else some(draw, 12)
        thought = "These are emoji."
        return Sample("emoji", [user(text)], ONLY_WORDS, thought=thought, refuses=True)
    makers: list[Callable[[Draw], Sample]] = [talk.about, talk.chat, talk.chat, sums.arithmetic]
    sample = draw.pick([*makers, unknown.unknown])(draw)
    sample.kind = "emoji"
    sample.messages[-1] = user(amid(draw, sample.messages[-1]["content"]))
    return sample
