"""Questions with written answers: about nanovllm (about.txt), small talk (chat.txt).

A text file is a list of entries, each with a name, wordings of its questions and one answer:
    == name
    topic: a noun | another noun     inserted in "What is ...?" and the like
    how: do a thing | do it so       inserted in "How do I ...?"
    can: do a thing                  inserted in "Can nanovllm ...?"
    ask: (One|Another) way to ask?   used as a whole template
    say: The answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from recipes.demo.corpus import words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Sample, user

TOPIC = [
    "(What is|What's|What are) {0}?",
    "What (exactly |)(is|are) {0}( in nanovllm| here|)?",
    "(Explain|Describe) {0}( to me|)( briefly| in short| in simple words|).",
    "(Please |)(tell|teach) me( something| more| a bit|) about {0}.",
    "(How does|How do) {0} work?",
    "(Can|Could|Would) you( please|) (explain|describe) {0}( to me|)?",
    "(Can|Could) you tell me (about|what is) {0}?",
    "I (want|would like|need) to (know|learn|understand) (more about |what is |){0}.",
    "What do you know about {0}?",
    "What is {0} (good|used) for?",
    "{0}?",
    "(What does|What do) {0} mean?",
    "I (do not|don't) (understand|know) {0}.",
    "What (is|do you mean by) {0}(, please|)?",
    "(Give me|I need) (a|some) (short |)(explanation|information|details) (of|about|on) {0}.",
]
HOW = [
    "How (do|can|would|should|could) I {0}?",
    "How (do|can) (you|we|one) {0}?",
    "How to {0}?",
    "(What is|What's) the (command|way|best way|right way|trick) to {0}?",
    "I (want|need|would like|am trying|have) to {0}.( How?| What do I do?| Help me.|)",
    "(Show|Tell|Teach|Explain to) me how (to|I can|I) {0}.",
    "Is (it possible|there a way|there an easy way) to {0}?",
    "(Can|Could|May) I {0}?",
    "(Please help|Help) me (to |){0}.",
    "What (do|must|should) I (type|do|write|run) to {0}?",
    "(Which|What) (command|setting) lets me {0}?",
]
CAN = [
    "(Does|Can|Will|Could) (nanovllm|the server|this server|this|it) {0}?",
    "(Is nanovllm|Is it|Is this server) able to {0}?",
    "(I wonder if|Tell me whether|Do you know whether|I want to know if) (nanovllm|it) can {0}.",
]
OPENINGS = ["Hi! ", "Hello, ", "Hey, ", "Okay. ", "Please: ", "So, ", "Hi. ", "Well, ", "Now: "]
OPENINGS += ["Hello! ", "Good morning! ", "And: ", "One question: ", "By the way, "]
CLOSINGS = [" Thanks!", " Thank you.", " Please.", " Please be brief.", " Be brief."]
CLOSINGS += [" Just curious.", " In short, please.", " I am new here."]
FRAMES = {"topic": TOPIC, "how": HOW, "can": CAN}
CAPITALS = dict(pair.split(":") for pair in words.WORDS["capitals"].all)
ASK_CAPITAL = [
    "(What is|What's|Which city is|Name|Tell me) the capital( city|) of {0}(?|.)",
    "(Do you know|Can you tell me) the capital of {0}?",
    "{0}'s capital(?| is what?)",
]


@dataclass
class Entry:
    """One answer and the wordings of its questions."""

    name: str
    ways: dict[str, list[str]] = field(default_factory=dict)
    say: str = ""

    def question(self, draw: Draw) -> str:
        kind = draw.pick([kind for kind in self.ways for _ in range(2 if kind == "ask" else 1)])
        frame = draw.pick(FRAMES.get(kind, ["{0}"]))
        text = draw.expand(frame.replace("{0}", draw.pick(self.ways[kind])))
        return text[0].upper() + text[1:]


@cache
def entries(file: str) -> list[Entry]:
    file_entries: list[Entry] = []
    for line in (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            file_entries.append(Entry(line[3:].strip()))
        elif line and not line.startswith("#"):
            key, _, value = line.partition(": ")
            if key == "say":
                file_entries[-1].say = value.replace("\\n", "\n")
            else:
                parts = [value] if key == "ask" else value.split(" | ")
                file_entries[-1].ways.setdefault(key, []).extend(parts)
    return file_entries


def greeted(draw: Draw, text: str) -> str:
    if draw.chance(0.15):
        text = draw.pick(OPENINGS) + text
    if draw.chance(0.1):
        text += draw.pick(CLOSINGS)
    return text


def typed(draw: Draw, text: str) -> str:
    """Return the text as users type it: lower case, missing punctuation, swapped letters."""
    if draw.chance(0.15):
        text = text.rstrip("?.!")
    if draw.chance(0.15):
        text = text.lower()
    if draw.chance(0.03):
        text += draw.pick(["?", "??", "!", "!!", "...", "?!"])
    if draw.chance(0.05) and len(text) > 12:
        at = draw.number(1, len(text) - 3)
        swapped = text[at + 1] + text[at]
        text = (
            text[:at] + draw.pick([swapped, text[at], text[at] * 2 + text[at + 1]]) + text[at + 2 :]
        )
    return text


def dressed(draw: Draw, text: str) -> str:
    return typed(draw, greeted(draw, text))


def entry_and_question(draw: Draw, file: str) -> tuple[Entry, str]:
    """Return an entry and a question for it, on this side of the split."""

    def make() -> tuple[Entry, str]:
        entry = draw.pick(entries(file))
        return entry, greeted(draw, entry.question(draw))

    entry, question = draw.from_split(make, key=lambda pair: pair[1])
    return entry, typed(draw, question)


def about(draw: Draw) -> Sample:
    entry, question = entry_and_question(draw, "about.txt")
    thought = f"The question is about {entry.name}. I know this."
    return Sample("about", [user(question)], entry.say, thought=thought)


def chat(draw: Draw) -> Sample:
    if draw.chance(0.1):
        return capital(draw)
    entry, question = entry_and_question(draw, "chat.txt")
    return Sample("chat", [user(question)], entry.say, thought=f"This is about {entry.name}.")


def capital(draw: Draw) -> Sample:
    def make() -> tuple[str, str]:
        country = draw.pick(list(CAPITALS))
        wording = draw.expand(draw.pick(ASK_CAPITAL)).replace("{0}", country)
        return country, greeted(draw, wording)

    country, question = draw.from_split(make, key=lambda pair: pair[1])
    text = typed(draw, question)
    answer = f"The capital of {country} is {CAPITALS[country]}."
    return Sample("chat", [user(text)], answer, thought=f"The question is about {country}.")
