"""Input without a request: mashed keys, loose words, numbers, code, texts without a task."""

from __future__ import annotations

import base64
import json

from recipes.demo.corpus import extract, refuse, words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Sample, user
from recipes.demo.corpus.unknown import program

KEYS = [
    "qwertyuiop",
    "asdfghjkl",
    "zxcvbnm",
    "sdfghjk",
    "dfgh",
    "jklasdf",
    "qweasdzxc",
    "1234567890",
]
KEYS += ["abcdefghijklmnopqrstuvwxyz", "bcdfghjklmnpqrstvwxz", "abcdef0123456789", "asdf;lkj"]
MARKS = "?!.,;:-_#*+~'\"$%&/()=@<>|^[]{}\\"
SOUP = "the a of is and to in it on why how not then with for was be by or if what he she they do"
SOUNDS = ["blah", "bla", "foo", "bar", "xyz", "aaa", "zzz", "hm", "uh", "argh", "grr", "la", "na"]
SOUNDS += ["test1", "nan", "null", "undefined", "the", "and", "x", "buffalo", "um", "boo", "meh"]
EMPTY = [
    "",
    " ",
    "  ",
    "\n",
    ".",
    "..",
    "...",
    "-",
    "?",
    "!",
    "\n\n\n",
    "\t",
    "''",
    '""',
    "()",
    "{}",
]
ADDRESSES = ["https://{0}.{2}/{1}", "www.{0}.{2}", "http://{0}.{2}", "{0}.{2}", "{0}@{1}.{2}"]


def mashed(draw: Draw) -> str:
    """Return mashed keys: runs or random letters from one part of the keyboard."""

    def chunk() -> str:
        keys = draw.pick(KEYS)
        if draw.chance(0.3):
            start = draw.number(0, len(keys) - 2)
            text = keys[start : start + draw.number(3, 8)]
            return text * draw.number(1, 4) if draw.chance(0.3) else text
        return "".join(draw.pick(keys) for _ in range(draw.number(3, 12)))

    text = " ".join(chunk() for _ in range(draw.pick([1, 1, 1, 2, 3, draw.number(1, 12)])))
    text = draw.pick([text, text, text.upper(), text.capitalize()])
    return text + draw.pick(["", "", "", "?", "!", ".", "??"])


def symbols(draw: Draw) -> str:
    """Return punctuation, encoded random bytes, or letters, digits and punctuation in any order."""
    shape = draw.number(0, 3)
    if shape == 0:
        return draw.pick(MARKS) * draw.number(2, 20)
    if shape == 1:
        return "".join(draw.pick(MARKS) for _ in range(draw.number(2, 20)))
    if shape == 2:
        raw = bytes(draw.number(0, 255) for _ in range(draw.number(6, 40)))
        return draw.pick([base64.b64encode(raw).decode(), raw.hex()])
    some = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" + MARKS + "      "
    return "".join(draw.pick(some) for _ in range(draw.number(4, 50))).strip() or "#"


def repeated(draw: Draw) -> str:
    """Return one word or letter repeated 3 to 200 times."""
    count = draw.pick([3, 4, 5, draw.number(3, 30), draw.number(3, 200)])
    if draw.chance(0.3):
        return draw.pick("abcdefghijklmnopqrstuvwxyz.!?0xX") * count
    word = draw.pick(SOUNDS) if draw.chance(0.5) else words.word(draw)
    return draw.pick([" ", " ", "", ", ", "-"]).join([word] * count)


def loose(draw: Draw) -> str:
    """Return words that form no sentence, or that only look like a question."""
    small = SOUP.split()
    count = draw.pick([1, 2, 3, 4, draw.number(1, 10), draw.number(5, 40)])
    pick = draw.pick
    parts = []
    for _ in range(count):
        kind = draw.number(0, 4)
        if kind == 0:
            parts.append(words.invented(draw))
        elif kind == 1 and count > 1:
            parts.append(pick(small))
        else:
            parts.append(words.word(draw))
    text = " ".join(parts)
    if draw.chance(0.12):
        text = (
            f"{pick(['why', 'how', 'when', 'what', 'which'])} {text} {pick(small)} {pick(parts)}?"
        )
    if draw.chance(0.3):
        text = text.capitalize()
    return text + pick(["", "", "", ".", "?", "!"])


def numbers(draw: Draw) -> str:
    """Return numbers without an operation."""
    count = draw.pick([1, 1, 2, 3, draw.number(1, 20)])
    most = 10 ** draw.number(1, 6)
    items = [
        str(words.decimal(draw)) if draw.chance(0.1) else str(draw.number(0, most))
        for _ in range(count)
    ]
    return draw.pick([" ", " ", ", ", ",", "\n", "; "]).join(items)


def passage(draw: Draw) -> str:
    """Return a passage of one sentence up to a page."""
    count = draw.pick([1, 1, 2, 3, 4, draw.number(2, 12), draw.number(2, 60)])
    if draw.chance(0.3):
        facts = extract.themed(draw)[0]
        return facts if count == 1 else " ".join([facts, *sentences(draw, min(count, 6))])
    return draw.pick([" ", " ", "\n"]).join(sentences(draw, count))


def sentences(draw: Draw, count: int) -> list[str]:
    return [words.sentence(draw).rstrip("!.") + "." for _ in range(count)]


def data(draw: Draw) -> str:
    """Return an address, a path or a JSON object without any other text."""
    shape = draw.number(0, 3)
    if shape == 0:
        return words.path(draw)
    if shape == 1:
        keys = {words.word(draw) for _ in range(draw.number(1, 4))}
        return json.dumps({key: draw.pick([words.word, words.count])(draw) for key in sorted(keys)})
    text = draw.pick(ADDRESSES).replace("{0}", words.invented(draw))
    return text.replace("{1}", words.word(draw)).replace("{2}", draw.pick(words.ENDINGS))


MAKERS = {
    mashed: (6, refuse.NOT_UNDERSTOOD, "These are no words."),
    symbols: (3, refuse.NOT_UNDERSTOOD, "These are no words."),
    repeated: (3, refuse.NOT_UNDERSTOOD, "This only repeats itself."),
    loose: (6, refuse.NOT_UNDERSTOOD, "These words make no sense together."),
    numbers: (3, refuse.ONLY_NUMBERS, "There is no sum here."),
    program: (3, refuse.CANNOT_CODE, "This is code."),
    passage: (5, refuse.NO_TASK, "This text asks for nothing."),
    data: (2, refuse.NO_TASK, "This asks for nothing."),
}
CHOICES = [make for make, (share, _, _) in MAKERS.items() for _ in range(share)]


def nonsense(draw: Draw) -> Sample:
    """Return an input without a request, and the refusal that fits it."""
    if draw.chance(0.03):
        empty = draw.pick(EMPTY)
        return refusing(empty, refuse.NOT_UNDERSTOOD, "There is nothing here.")
    make = draw.pick(CHOICES)
    _, answer, thought = MAKERS[make]
    return refusing(draw.from_split(lambda: make(draw)), answer, thought)


def refusing(text: str, answer: str, thought: str) -> Sample:
    return Sample("nonsense", [user(text)], answer, thought=thought, refuses=True)
