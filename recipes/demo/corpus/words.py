"""Values to fill prompts with: lists of ordinary words, and makers of invented ones."""

from __future__ import annotations

import re
from pathlib import Path

from recipes.demo.corpus.draw import Draw, Pool


def pools() -> dict[str, Pool]:
    """Return the lists of words.txt by their names."""
    text = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8")
    sections = (section.partition("\n") for section in text.split("\n== ")[1:])
    return {name: Pool(values) for name, _, values in sections}


WORDS = pools()
CITIES = WORDS["cities"]
COUNTRIES = WORDS["countries"]
FIRST_NAMES = WORDS["first names"]
THINGS = WORDS["things"]
ADJECTIVES = WORDS["adjectives"]
ANIMALS = WORDS["animals"]
VERBS = WORDS["verbs"]
COLOURS = WORDS["colours"]
JOBS = WORDS["jobs"]
FOODS = WORDS["foods"]
LANGUAGES = WORDS["languages"]
TOPICS = WORDS["topics"]
SKIES = WORDS["skies"]
DAYS = WORDS["days"]
ROOMS = WORDS["rooms"]
CURRENCIES = WORDS["currencies"]
UNITS = WORDS["units"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September"]
MONTHS += ["October", "November", "December"]
ENDINGS = ["com", "org", "net", "io", "eu", "de", "info"]
ONSET, NUCLEUS, CODA = (WORDS[name].all for name in ("onset", "nucleus", "coda"))
ABOUT = (Path(__file__).parent / "about.txt").read_text(encoding="utf-8")
KNOWN: list[str] = sorted(
    {*re.findall("[a-z]{4,}", ABOUT), *(w for p in WORDS.values() for w in p.train)}
)
KNOWN = [word for word in KNOWN if re.fullmatch("[a-z]{4,}", word)]
CLOSED = 0.65  # probability that a syllable ends in consonants
ACCENTS = {"a": "á", "e": "é", "o": "ö", "u": "ü", "i": "í"}


def invented(draw: Draw) -> str:
    """Return an invented lower-case word: some syllables, or the ends of two known words.

    Known words contribute letter pairs that the syllables lack, so their tokens are trained, too.
    """

    def make() -> str:
        if draw.chance(0.35):
            return draw.pick(KNOWN)[: draw.number(1, 4)] + draw.pick(KNOWN)[-draw.number(2, 5) :]
        syllables = draw.number(1, 3) if draw.chance(0.7) else 2
        return "".join(
            draw.pick(ONSET) + draw.pick(NUCLEUS) + (draw.pick(CODA) if draw.chance(CLOSED) else "")
            for _ in range(syllables)
        )

    return draw.from_split(make)


def word(draw: Draw) -> str:
    """Return a lower-case word, ordinary with probability 0.6."""
    if draw.chance(0.4):
        return invented(draw)
    return draw.value(draw.pick([THINGS, ADJECTIVES, ANIMALS, COLOURS]))


def proper(draw: Draw) -> str:
    name = invented(draw).capitalize()
    if draw.chance(0.04):
        letter = draw.pick("aeoui")
        name = name.replace(letter, ACCENTS[letter])
    return name


def city(draw: Draw) -> str:
    return draw.value(CITIES) if draw.chance(0.6) else proper(draw)


def first_name(draw: Draw) -> str:
    return draw.value(FIRST_NAMES) if draw.chance(0.6) else proper(draw)


def full_name(draw: Draw) -> str:
    return f"{first_name(draw)} {proper(draw)}"


def person(draw: Draw) -> str:
    return full_name(draw) if draw.chance(0.4) else first_name(draw)


def company(draw: Draw) -> str:
    return proper(draw) + draw.pick(["", "", " Ltd", " Labs", " Group", " & Sons", " Systems"])


def title(draw: Draw) -> str:
    """Return a title of one to three capitalised words, maybe after "The"."""
    words = [draw.pick([word, invented])(draw) for _ in range(draw.number(1, 3))]
    text = " ".join(part.capitalize() for part in words)
    return f"The {text}" if draw.chance(0.4) else text


def phrase(draw: Draw) -> str:
    """Return a few lower-case words that belong together: a search, a task, a topic."""
    shape = draw.number(0, 5)
    if shape == 0:
        return draw.value(TOPICS)
    if shape == 1:
        return f"{draw.value(ADJECTIVES)} {word(draw)} {draw.pick(['shop', 'repair', 'prices'])}"
    if shape == 2:
        return f"{draw.value(TOPICS)} in {city(draw)}"
    if shape == 3:
        return f"how to {draw.pick(['fix', 'paint', 'clean', 'build', 'draw'])} a {word(draw)}"
    if shape == 4:
        return f"{word(draw)} {draw.pick(['for', 'with', 'and', 'near', 'without'])} {word(draw)}"
    return " ".join(word(draw) for _ in range(draw.number(1, 4)))


def task(draw: Draw) -> str:
    """Return something to do, in spoken form."""
    shape = draw.number(0, 4)
    if shape == 0:
        return f"{draw.pick(['call', 'email', 'visit', 'meet', 'thank', 'pay'])} {person(draw)}"
    if shape == 1:
        return f"{draw.pick(['buy', 'fix', 'clean', 'find', 'return'])} the {word(draw)}"
    if shape == 2:
        return f"{draw.pick(['water', 'feed', 'wash', 'walk'])} the {draw.value(ANIMALS)}"
    if shape == 3:
        return f"book {draw.pick(['a table', 'a room', 'a ticket', 'a seat'])} in {city(draw)}"
    return f"{draw.pick(['read', 'finish', 'send', 'print'])} the {word(draw)} {word(draw)}"


def sentence(draw: Draw) -> str:
    """Return a short sentence about nothing in particular."""
    shape = draw.number(0, 4)
    if shape == 0:
        subject = f"the {draw.value(ADJECTIVES)} {draw.value(ANIMALS)}"
        text = f"{subject} {draw.value(VERBS)} the {word(draw)}"
    elif shape == 1:
        text = f"{person(draw)} {draw.value(VERBS)} a {word(draw)} in {city(draw)}"
    elif shape == 2:
        text = f"we meet {person(draw)} on {day(draw)} at {clock(draw)}"
    elif shape == 3:
        text = f"my {word(draw)} is {draw.value(COLOURS)} and {draw.value(ADJECTIVES)}"
    else:
        text = f"there are {draw.number(2, 99)} {draw.value(THINGS)}s in the {draw.value(ROOMS)}"
    return text[0].upper() + text[1:] + draw.pick([".", ".", ".", "!", ""])


def code(draw: Draw) -> str:
    """Return an identifier such as an order number."""

    def make() -> str:
        letters = "".join(draw.pick("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(draw.number(1, 3)))
        digits = "".join(draw.pick("0123456789") for _ in range(draw.number(2, 5)))
        return draw.pick([f"{letters}-{digits}", f"{letters}{digits}", f"#{digits}"])

    return draw.from_split(make)


def email(draw: Draw) -> str:
    name = draw.pick([invented(draw), f"{first_name(draw)}.{invented(draw)}".lower()])
    return f"{name}@{invented(draw)}.{draw.pick(ENDINGS)}"


def phone(draw: Draw) -> str:
    digits = "".join(draw.pick("0123456789") for _ in range(draw.number(6, 9)))
    return draw.pick([f"{digits[:3]}-{digits[3:]}", f"+{draw.number(1, 99)} {digits}", digits])


def path(draw: Draw) -> str:
    name = f"{word(draw)}.{draw.pick(['txt', 'md', 'csv', 'json', 'py', 'log'])}"
    return draw.pick([name, f"{word(draw)}/{name}", f"/home/{word(draw)}/{name}"])


def clock(draw: Draw) -> str:
    return draw.from_split(lambda: any_clock(draw))


def any_clock(draw: Draw) -> str:
    hour, minute = draw.number(0, 23), draw.pick([0, 15, 30, 45, draw.number(0, 59)])
    if draw.chance(0.3):
        return f"{draw.number(1, 12)} {draw.pick(['am', 'pm'])}"
    return f"{hour:02}:{minute:02}"


def day(draw: Draw) -> str:
    return draw.from_split(lambda: any_day(draw))


def any_day(draw: Draw) -> str:
    shape = draw.number(0, 3)
    if shape == 0:
        return f"{draw.number(2024, 2031)}-{draw.number(1, 12):02}-{draw.number(1, 28):02}"
    if shape == 1:
        return f"{draw.number(1, 28)} {draw.pick(MONTHS)}"
    if shape == 2:
        return f"{draw.pick(MONTHS)} {draw.number(1, 28)}"
    return draw.value(DAYS)


def count(draw: Draw) -> int:
    """Return a number of which small values are more frequent."""
    return draw.from_split(lambda: draw.number(2, 10 ** draw.number(1, 4)))


def decimal(draw: Draw) -> float:
    return draw.from_split(
        lambda: draw.number(1, 999) + draw.pick([0.5, 0.25, 0.75, 0.1, 0.9, 0.2])
    )


def listing(items: list[str]) -> str:
    """Return the items in the form "a, b and c"."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
