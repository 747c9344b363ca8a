"""Requests beyond the demo: knowledge, essays, programs, advice, hard sums, actions.

unknown.txt lists them under the name in refuse.py of the sentence that answers them. Their fields
are filled with ordinary and invented words. So the demo does not learn a list of questions. It
learns to decline every question that it has no answer for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from recipes.demo.corpus import refuse, words
from recipes.demo.corpus.draw import Draw, Pool
from recipes.demo.corpus.sample import Sample, user
from recipes.demo.corpus.talk import CAPITALS, dressed

FIELD = re.compile(r"\{(\w+)\}")
TOPICS = Pool(", ".join(topic for topic in words.TOPICS.all if topic != "machine learning"))
LANGUAGES = Pool(", ".join(name for name in words.LANGUAGES.all if name != "English"))
UNITS = Pool(
    ", ".join(words.UNITS.all)
    + ", km, kilometers, meters, cm, centimeters, mm, kg, lbs, pounds, g, "
    "oz, liters, ml, cups, celsius, fahrenheit, degrees celsius, km/h, mph, days, "
    "weeks, dollars, euros"
)
CODE_LANGUAGES = ["Python", "Java", "C", "Rust", "JavaScript", "Go", "C++", "Bash", "SQL", "Ruby"]
CODE_LANGUAGES += ["TypeScript", "Haskell", "Perl", "PHP", "Swift", "Kotlin", "R", "Lua"]


def place(draw: Draw) -> str:
    """Return a city, a country or an invented place."""
    make = draw.pick([words.city, words.city, lambda d: d.value(words.COUNTRIES), words.proper])
    return make(draw)


def country(draw: Draw) -> str:
    """Return a country, real or invented, whose capital is not in the corpus."""
    while True:
        name = words.proper(draw) if draw.chance(0.6) else draw.value(words.COUNTRIES)
        if name not in CAPITALS:
            return name


def topic(draw: Draw) -> str:
    return draw.value(TOPICS) if draw.chance(0.5) else f"{words.word(draw)}s"


def thing(draw: Draw) -> str:
    """Return a thing or an animal, sometimes with an adjective."""
    plain = draw.pick([words.THINGS, words.ANIMALS])
    name = draw.value(plain) if draw.chance(0.7) else words.invented(draw)
    return f"{draw.value(words.ADJECTIVES)} {name}" if draw.chance(0.25) else name


def anything(draw: Draw) -> str:
    """Return a subject for a question."""
    shape = draw.number(0, 8)
    if shape == 0:
        return f"{thing(draw)}s"
    if shape == 1:
        return f"the {thing(draw)}"
    if shape == 2:
        return place(draw)
    if shape == 3:
        return draw.pick([words.person, words.title, words.company])(draw)
    if shape == 4:
        return f"{topic(draw)} in {place(draw)}"
    if shape == 5:
        return f"{topic(draw)} and {topic(draw)}"
    if shape == 6:
        return f"the {words.word(draw)} of {draw.value(words.WORDS['subjects'])}"
    return topic(draw)


def huge(draw: Draw) -> str:
    """Return a number with more digits than the demo can add."""
    return str(
        draw.from_split(lambda: draw.number(10 ** draw.number(4, 6), 10 ** draw.number(6, 14)))
    )


def small(draw: Draw) -> str:
    return str(draw.from_split(lambda: draw.number(2, 10 ** draw.number(1, 4))))


def uneven(draw: Draw, low: int, high: int, step: int) -> str:
    """Return a number that `step` does not divide."""

    def make() -> int:
        number = draw.number(low, high)
        return number + 1 if number % step == 0 else number

    return str(draw.from_split(make))


def mixed(draw: Draw) -> str:
    """Return an expression with several signs or with brackets."""
    a, b, c = (draw.number(2, 10 ** draw.number(1, 2)) for _ in range(3))
    forms = [f"{a} + {b} * {c}", f"({a} + {b}) * {c}", f"{a} * {b} * {c}", f"{a} * {b} - {c}"]
    return draw.from_split(lambda: draw.pick([*forms, f"({a} - {b}) / {c}", f"{a} / {b} + {c}"]))


def program(draw: Draw) -> str:
    """Return a few lines of code."""
    a, b, c = (words.word(draw) for _ in range(3))
    number = draw.number(0, 99)
    lines = [
        f"def {a}({b}):\n    return {b} {draw.pick('+-*')} {number}",
        f"for {a} in range({number}):\n    print({a})",
        f"int {a} = {number}; while ({a} > 0) {{ {b}({a}--); }}",
        f"SELECT {a}, {b} FROM {c} WHERE {a} > {number};",
        f"function {a}({b}) {{ return {b}.{c}({number}); }}",
        f'<div class="{a}"><p>{b}</p></div>',
        f"import {a}\nfrom {b} import {c}\n\n{a}.{b}({c}={number})",
        f"{a} = [{b} for {b} in {c} if {b} != {number}]",
        f"if ({a} == {number}) {{ {b} = {c}; }} else {{ {c}(); }}",
        f"$ {a} --{b} {number} | grep {c} > {b}.txt",
        f"#include <{a}.h>\nint main() {{ {b}({number}); return 0; }}",
        f"let mut {a}: Vec<u8> = {b}::{c}({number});",
        f"class {a.capitalize()}({b.capitalize()}):\n    {c} = {number}",
        f"try:\n    {a}()\nexcept {b.capitalize()}Error:\n    pass",
        f"const {a} = await {b}.{c}(`${{{a}}}/{number}`);",
        f'Traceback (most recent call last):\n  File "{a}.py", line {number}, in {b}\n{c}Error',
        f"{a}: {number}\n{b}:\n  - {c}\n  - {a}",
        f'git {draw.pick(["commit", "push", "checkout"])} -m "{a} {b}" && make {c}',
    ]
    return draw.from_split(lambda: draw.pick(lines))


FIELDS: dict[str, Callable[[Draw], str]] = {
    "adjective": lambda draw: draw.value(words.ADJECTIVES),
    "animal": lambda draw: draw.value(words.ANIMALS),
    "anything": anything,
    "city": words.city,
    "code": program,
    "code_language": lambda draw: draw.pick(CODE_LANGUAGES),
    "colour": lambda draw: draw.value(words.COLOURS),
    "company": words.company,
    "country": country,
    "decimal": lambda draw: str(10 + words.decimal(draw)),
    "factor": lambda draw: uneven(draw, 26, 10 ** draw.number(2, 4), 10),
    "factor2": lambda draw: uneven(draw, 13, 999, 10),
    "factor3": lambda draw: uneven(draw, 26, 999, 10),
    "large": lambda draw: uneven(draw, 1201, 99999, 10),
    "digit": lambda draw: str(draw.number(2, 9)),
    "mixed": mixed,
    "odd_percent": lambda draw: uneven(draw, 1, 99, 5),
    "tenth": lambda draw: str(draw.number(1, 99) / 10),
    "uneven": lambda draw: uneven(draw, 11, 10 ** draw.number(2, 4), 10),
    "over_hundred": lambda draw: str(draw.from_split(lambda: draw.number(101, 9999))),
    "unit": lambda draw: draw.value(UNITS),
    "huge": huge,
    "job": lambda draw: draw.value(words.JOBS),
    "language": lambda draw: draw.value(LANGUAGES),
    "name": words.person,
    "number": small,
    "place": place,
    "room": lambda draw: draw.value(words.ROOMS),
    "saying": lambda draw: draw.pick([words.sentence, words.phrase])(draw),
    "subject": lambda draw: (
        draw.value(words.WORDS["subjects"]) if draw.chance(0.5) else words.person(draw)
    ),
    "task": words.task,
    "thing": lambda draw: draw.value(words.THINGS),
    "thing2": thing,
    "thing3": thing,
    "title": words.title,
    "topic": topic,
    "word": words.invented,
    "year": lambda draw: str(draw.number(1000, 2030)),
}
SHARES = {
    "DO_NOT_KNOW": 12,
    "CANNOT_WRITE": 3,
    "CANNOT_CODE": 3,
    "CANNOT_TRANSLATE": 2,
    "NO_ADVICE": 3,
    "TOO_HARD": 4,
    "NO_UNITS": 2,
    "NO_TOOLS": 3,
}
SENTENCES = [name for name, share in SHARES.items() for _ in range(share)]
THOUGHTS = {
    "DO_NOT_KNOW": "I do not know this.",
    "CANNOT_WRITE": "This is more than I can write.",
    "CANNOT_CODE": "This is about programs.",
    "CANNOT_TRANSLATE": "I only know English.",
    "NO_ADVICE": "This needs somebody who knows.",
    "NO_UNITS": "This is about units.",
    "TOO_HARD": "This sum is too hard for me.",
    "NO_TOOLS": "This needs a tool, and there is none.",
}


@cache
def templates() -> dict[str, list[str]]:
    """Return the templates by the name of their sentence."""
    text = (Path(__file__).parent / "unknown.txt").read_text(encoding="utf-8")
    sections = (section.partition("\n") for section in text.split("\n== ")[1:])
    return {name: [line for line in lines.splitlines() if line] for name, _, lines in sections}


def request(draw: Draw, sentence: str) -> str:
    """Return a request that this sentence answers. Every field gets a value of its own."""
    text = draw.wording(templates()[sentence])
    return FIELD.sub(lambda match: FIELDS[match[1]](draw), text)


def unknown(draw: Draw) -> Sample:
    """Return a request that the demo must decline."""
    sentence = draw.pick(SENTENCES)
    text = dressed(draw, request(draw, sentence))
    answer: str = getattr(refuse, sentence)
    thought = THOUGHTS[sentence]
    return Sample("unknown", [user(text)], answer, thought=thought, refuses=True)
