"""The whole corpus: every kind of sample with its share, system messages and earlier turns."""

from __future__ import annotations

from collections.abc import Callable

from recipes.demo.corpus import (
    emoji,
    extract,
    follow,
    foreign,
    noise,
    plainly,
    rewrite,
    sums,
    talk,
    tools,
    unknown,
    words,
)
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Message, Sample, system, user

FACTS = {
    "name": (words.person, "(My name is|I am called|Call me|I'm) {0}(.|!|)"),
    "favourite colour": (
        lambda draw: draw.value(words.COLOURS),
        "(My favourite colour is|I like best the colour) {0}(.|)",
    ),
    "home town": (words.city, "(I live in|My home is|My home town is|I come from) {0}(.|)"),
    "job": (lambda draw: draw.value(words.JOBS), "(I work as a|I am a|My job is) {0}(.|)"),
    "code": (words.code, "(Remember the code|My code is|The code is) {0}(.|)"),
    "dog": (words.proper, "(My dog is called|The name of my dog is|My dog is named) {0}(.|)"),
}
RECALL = {
    "name": "(What is|What's|Do you know|Do you remember|Tell me) my name(?|.)",
    "favourite colour": "(What is|What's|Do you remember) my favourite colour?",
    "home town": "(Where do I live|Where is my home|What is my home town|Which town do I live in)?",
    "job": "(What is my job|What do I do|What is my work|Do you remember my job)?",
    "code": "(What is the code|What was the code|Which code did I tell you|Tell me the code)(?|)",
    "dog": "(What is the name of my dog|What is my dog called|Do you remember my dog)?",
}
PERSONA = [
    "You are {0}.",
    "You are {0}, a helpful assistant.",
    "Your name is {0}. Be brief.",
    "You are {0}, an assistant made by a small company.",
]
WHO = ["(Who|What) are you?", "What('s| is) your name?", "(Introduce yourself|Tell me your name)."]


def remember(draw: Draw) -> Sample:
    """Something that the user said before, or the name that the system message gives."""
    if draw.chance(0.25):
        name = words.first_name(draw)
        persona = system(draw.wording(PERSONA).replace("{0}", name))
        question = user(talk.dressed(draw, draw.wording(WHO)))
        return Sample("chat", [persona, question], f"I am {name}.", thought=f"My name is {name}.")
    kind = draw.pick(list(FACTS))
    make, tell = FACTS[kind]
    value = make(draw)
    told = [user(draw.wording([tell]).replace("{0}", value)), user("")]
    told[1] = {"role": "assistant", "content": f"I will remember: your {kind} is {value}."}
    if draw.chance(0.3):
        return Sample(
            "chat", told[:1], told[1]["content"], thought=f"The user's {kind} is {value}."
        )
    between = history(draw, draw.number(0, 3))
    question = user(draw.wording([RECALL[kind]]))
    return Sample(
        "chat",
        [*told, *between, question],
        f"Your {kind} is {value}.",
        thought=f"The user said that the {kind} is {value}.",
    )


Make = Callable[[Draw], Sample]
PLAIN: dict[Make, int] = {  # with their shares
    talk.about: 12,
    talk.chat: 9,
    remember: 4,
    sums.arithmetic: 11,
    sums.counting: 1,
    extract.extraction: 14,
    rewrite.echo: 5,
    rewrite.rewriting: 11,
    plainly.plain_json: 9,
    follow.follow_up: 11,
    foreign.foreign: 5,
    emoji.emoji: 4,
    noise.nonsense: 8,
    unknown.unknown: 14,
}
TOOLED: dict[Make, int] = {
    tools.calling: 18,
    tools.parallel: 14,
    tools.result: 10,
    tools.no_call: 8,
}
ALONE = [make for make in PLAIN if make not in (remember, follow.follow_up)]
CHOICES = [make for make, share in (PLAIN | TOOLED).items() for _ in range(share)]
EVALUATED: dict[str, Make] = {
    "about": talk.about,
    "chat": talk.chat,
    "sum": sums.arithmetic,
    "extract": extract.extraction,
    "echo": rewrite.echo,
    "rewrite": rewrite.rewriting,
    "call": tools.calling,
    "parallel": tools.parallel,
    "result": tools.result,
    "no_call": tools.no_call,
    "json": plainly.plain_json,
    "followup": follow.follow_up,
    "foreign": foreign.foreign,
    "emoji": emoji.emoji,
    "nonsense": noise.nonsense,
    "unknown": unknown.unknown,
}


def history(draw: Draw, turns: int) -> list[Message]:
    """Questions and answers that came before."""
    messages: list[Message] = []
    for _ in range(turns):
        sample = draw.pick(ALONE)(draw)
        messages += [*sample.messages, sample.turn()]
    return messages


def document(draw: Draw) -> Sample:
    """One training sample."""
    make = draw.pick(CHOICES)
    sample = make(draw)
    if make in ALONE:
        chance = draw.random.random()
        if chance < 0.015:
            sample.messages = history(draw, draw.number(5, 40)) + sample.messages
        elif chance < 0.2:
            sample.messages = history(draw, draw.number(1, 3)) + sample.messages
        if draw.chance(0.2):
            sample.messages = [system(draw.pick(tools.SYSTEMS)), *sample.messages]
    return sample


def thinking(draw: Draw, sample: Sample) -> bool | None:
    """What the request says about enable_thinking; mostly nothing."""
    return draw.pick([None] * 5 + [True] * 2 + [False] * (1 if sample.thinks else 3))
