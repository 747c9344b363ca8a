"""Texts to repeat or to change a little."""

from __future__ import annotations

from recipes.demo.corpus import foreign, talk, words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Sample, user

REPEAT = [
    "(Repeat|Please repeat|Echo|Copy|Say) (this|the following|exactly this|this text)",
    "(Write|Type|Print) (this|exactly this|this text)",
    "(Repeat|Echo|Say) after me",
    "(Repeat|Say|Write|Echo)",
    "(Can you|Could you|I want you to) (repeat|say|echo|write)( this| exactly|)",
    "Say (nothing but|only|exactly)( this|)",
]
SAY = ["(Say|Just say|Please say|Now say|Can you say) {a}(.||!|?)"]
UPPER = [
    "(Write|Put) (this|the text|the following) in (upper case|capitals|capital letters|uppercase)",
    "(Convert|Turn|Change) (this|the text) (to|into) (upper case|capitals|uppercase)",
    "(Upper case|Uppercase|Capitalise|In capitals|Make it upper case|Shout)",
]
REVERSE = [
    "(Reverse|Turn round|Invert) the (order of the words|word order)( of this| in this|)",
    "(Write|Say|Give me) (the words|these words) (in reverse order|backwards)",
]
FIRST = [
    "(What is|Give me|Tell me|Write) the first word( of this| in this| of|)",
    "(First word|Only the first word|Which word comes first)",
]
LAST = [
    "(What is|Give me|Tell me|Write) the last word( of this| in this| of|)",
    "(Last word|Only the last word|Which word comes last)",
]
COUNT = [
    "(How many words are|Count the words) in (this|the text)",
    "(Count|Tell me the number of) (the words|words)( in this| here|)",
]
SWAP = [
    "(Replace|Change|Swap) {a} (with|by|for|to) {b}( in this| in|)",
    "(Write|Put|Use) {b} instead of {a}( in this| in|)",
]
SPELL = ["(Spell|Please spell|How do you spell) (the word |){a}(?|.|)"]
LISTED = [
    "(Write|Put|Turn) (this|these words|the words) (as|into) a (list|numbered list)",
    "(Number|List) (these words|the words|these)",
]
TWICE = ["(Say|Write|Repeat) (this|the text|it) (twice|two times)", "(Twice|Two times|Double)"]


def text(draw: Draw) -> str:
    """Return a text to repeat: ordinary, invented or foreign words, identifiers, or a fragment."""
    shape = draw.number(0, 7)
    if shape == 7:
        return draw.from_split(lambda: fragment(draw))
    if draw.chance(0.05):
        return foreign.any_language(draw)[1]
    if shape <= 1:
        return words.sentence(draw)
    if shape == 2:
        return words.phrase(draw)
    if shape == 3:
        return words.title(draw)
    if shape == 4:
        make = [words.code, words.email, words.phone, words.path, words.person, words.day]
        return ", ".join(draw.pick(make)(draw) for _ in range(draw.number(1, 4)))
    return " ".join(
        draw.pick([words.invented, words.proper, words.word])(draw)
        for _ in range(draw.number(1, 9))
    )


def fragment(draw: Draw) -> str:
    """Return consecutive words of an answer in about.txt."""
    known = draw.pick(talk.entries("about.txt")).say.split()
    start = draw.number(0, len(known) - 2)
    return " ".join(known[start : start + draw.number(2, 12)])


def few_words(draw: Draw, low: int, high: int) -> list[str]:
    return [words.word(draw) for _ in range(draw.number(low, high))]


def put(draw: Draw, wording: str, content: str) -> str:
    """Return the instruction, followed by the text that it refers to."""
    link = draw.pick([": {0}", ': "{0}"', ":\n{0}", ": '{0}'", ": {0}", ' "{0}"'])
    return wording + link.replace("{0}", content)


def ask(draw: Draw, wordings: list[str], content: str) -> str:
    """Return the instruction before the text, or after it."""
    wording = draw.wording(wordings)
    if draw.chance(0.1):
        return f'"{content}"\n{wording}.'
    return put(draw, wording, content)


def echo(draw: Draw) -> Sample:
    content = text(draw)
    if draw.chance(0.15):
        message = ask(draw, TWICE, content)
        return Sample("echo", [user(message)], f"{content} {content}", thought="I say it twice.")
    if draw.chance(0.15):
        content = " ".join(words.word(draw) for _ in range(draw.number(1, 4)))
        message = draw.wording(SAY).replace("{a}", content)
    else:
        message = ask(draw, REPEAT, content)
    return Sample("echo", [user(message)], content, thought="I repeat the text.")


def rewriting(draw: Draw) -> Sample:
    """Return a request for one small change to a text."""
    make = draw.pick([upper, upper, reverse, first_or_last, count, swap, spell, spell, numbered])
    return make(draw)


def upper(draw: Draw) -> Sample:
    content = " ".join(few_words(draw, 1, 5))
    message = ask(draw, UPPER, content)
    return Sample("rewrite", [user(message)], content.upper(), thought="I write it in capitals.")


def reverse(draw: Draw) -> Sample:
    items = few_words(draw, 2, 7)
    message = ask(draw, REVERSE, " ".join(items))
    answer = " ".join(reversed(items))
    return Sample("rewrite", [user(message)], answer, thought="I start with the last word.")


def first_or_last(draw: Draw) -> Sample:
    items = few_words(draw, 2, 8)
    first = draw.chance(0.5)
    message = ask(draw, FIRST if first else LAST, " ".join(items))
    position = "first" if first else "last"
    return Sample(
        "rewrite", [user(message)], items[0 if first else -1], thought=f"The {position} word."
    )


def count(draw: Draw) -> Sample:
    items = few_words(draw, 1, 8)
    numbered = ", ".join(f"{i} {item}" for i, item in enumerate(items, 1))
    message = ask(draw, COUNT, " ".join(items))
    return Sample("rewrite", [user(message)], str(len(items)), thought=numbered + ".", thinks=True)


def swap(draw: Draw) -> Sample:
    items = few_words(draw, 3, 7)
    at, new = draw.number(0, len(items) - 1), words.word(draw)
    while items.count(items[at]) > 1:
        items.remove(items[at])
        at = 0
    content = " ".join(items)
    message = ask(draw, SWAP, content).replace("{a}", items[at]).replace("{b}", new)
    items[at] = new
    return Sample("rewrite", [user(message)], " ".join(items), thought=f"I put {new} there.")


def spell(draw: Draw) -> Sample:
    item = words.word(draw)
    message = draw.wording(SPELL).replace("{a}", item)
    return Sample("rewrite", [user(message)], "-".join(item), thought="Letter by letter.")


def numbered(draw: Draw) -> Sample:
    items = few_words(draw, 2, 6)
    message = ask(draw, LISTED, ", ".join(items))
    answer = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    return Sample("rewrite", [user(message)], answer, thought="One word in each line.")
