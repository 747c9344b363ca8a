"""The whole corpus: kinds of samples with their shares, system messages and earlier turns."""

from __future__ import annotations

from collections.abc import Callable

from recipes.demo.corpus import (
    emoji,
    extract,
    follow,
    foreign,
    harder,
    keyed,
    noise,
    persona,
    personal,
    plainly,
    rewrite,
    sums,
    talk,
    tools,
    unknown,
    verse,
)
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Message, Sample, system

Make = Callable[[Draw], Sample]


def remember(draw: Draw) -> Sample:
    """Return a sample about facts of the user, maybe with other turns in between."""
    turns = draw.number(1, 3) if draw.chance(0.5) else 0
    return personal.remember(draw, history(draw, turns))


PLAIN: dict[Make, int] = {  # with their shares
    talk.about: 14,
    talk.chat: 9,
    remember: 9,
    sums.arithmetic: 11,
    harder.harder: 14,
    keyed.keyed: 7,
    verse.verse: 6,
    persona.persona: 7,
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
ALONE = [make for make in PLAIN if make not in (remember, follow.follow_up, persona.persona)]
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
    "memory": remember,
    "harder": harder.harder,
    "key": keyed.keyed,
    "verse": verse.verse,
    "persona": persona.persona,
}


def history(draw: Draw, turns: int) -> list[Message]:
    """Return `turns` earlier questions with their answers."""
    messages: list[Message] = []
    for _ in range(turns):
        sample = draw.pick(ALONE)(draw)
        messages += [*sample.messages, sample.turn()]
    return messages


def document(draw: Draw) -> Sample:
    """Return one training sample."""
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
    """Return the request's `enable_thinking`, or None where the request leaves it out."""
    return draw.pick([None] * 5 + [True] * 2 + [False] * (1 if sample.thinks else 3))
