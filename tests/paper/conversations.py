"""Conversations by chance, of plain random numbers: Hypothesis would take as long as engines do."""

from __future__ import annotations

from collections.abc import Callable
from random import Random, SystemRandom
from typing import NamedTuple

from tests.paper.gpu import POISON, VOCAB

# Few stems and few token values, so that requests often share pages.
STEMS = [[1] * 5, [2] * 8, [1, 1, 2, 1, 1, 2, 1, 1]]


class Turn(NamedTuple):
    """Some requests that come together, and what they have in common."""

    prompt: list[int]  # what follows the text of the request continued, or is all
    max_new: list[int]  # of each
    stop_ids: list[int]
    continues: int | None  # which turn's first request
    pause: int  # steps until the next turn
    priority: int
    salt: str


def conversations(rng: Random) -> list[Turn]:
    turns = []
    bad = rng.randint(0, 2) == 2
    for i in range(rng.randint(1, 10)):
        continues = rng.randrange(i) if i and rng.randint(0, 1) else None
        values = [0, 1, 2, POISON] if bad and rng.randint(0, 3) == 0 else [0, 1, 2]
        prompt = rng.choices(values, k=rng.randint(1, 7))
        if continues is None:
            prompt = rng.choice(STEMS) + prompt
        max_new = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
        stops = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
        pause, priority = rng.randint(0, 6), rng.randint(-1, 1)
        turns.append(
            Turn(prompt, max_new, stops, continues, pause, priority, rng.choice(["", "", "", "a"]))
        )
    return turns


def by_chance(converse: Callable[[Random], None], count: int) -> None:
    """Other conversations each time; of one that goes wrong the error says how to repeat it."""
    first = SystemRandom().randrange(1 << 32)
    for seed in range(first, first + count):
        try:
            converse(Random(seed))
        except Exception as error:
            error.add_note(f"{converse.__name__}(Random({seed}))")
            raise
