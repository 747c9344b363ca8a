"""Conversations by chance, of plain random numbers: Hypothesis would take as long as engines do."""

from __future__ import annotations

from collections.abc import Callable
from random import Random, SystemRandom
from typing import NamedTuple

from nanovllm.wire import Abort
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import POISON, VOCAB, solo_run

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
    mixed: int  # tokens of a step that also decodes, from now on


class Asked(NamedTuple):
    """A request, and what it must be told."""

    prompt: list[int]
    max_new: int
    stop_ids: list[int]
    text: list[int]  # as solo_run gives it


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
        salt, mixed = rng.choice(["", "", "", "a"]), rng.randint(1, 20)
        turns.append(Turn(prompt, max_new, stops, continues, pause, priority, salt, mixed))
    return turns


def held(
    engine: PaperEngine,
    turns: list[Turn],
    *,
    abort_every: int,
    grammar_every: int,
    recurrent: bool,
    unlucky: int = 0,
) -> list[Asked]:
    """All requests of the conversations, which the engine has had and ended."""
    asked: list[Asked] = []
    first_of: list[Asked] = []  # of each turn's requests
    for turn in turns:
        prompt = turn.prompt
        if turn.continues is not None:
            first = first_of[turn.continues]
            prompt = first.prompt + [token for token in first.text if token >= 0] + prompt
        for max_new in turn.max_new:
            request_id, wanted = len(asked), (prompt, max_new, turn.stop_ids)
            grammar = grammar_every > 0 and request_id % grammar_every == 0
            text = solo_run(*wanted, recurrent=recurrent, grammar=grammar, unlucky=unlucky)
            asked.append(Asked(*wanted, text))
            told = *wanted, turn.priority, "toy" * grammar, turn.salt
            engine.say(generate(request_id, *told, logprobs=request_id % 3 - 1))
        first_of.append(asked[-len(turn.max_new)])
        engine.scheduler.mixed_step_tokens = turn.mixed
        engine.mixed = max(engine.mixed, turn.mixed)
        for _ in range(turn.pause):
            engine.step()
        if abort_every and request_id % abort_every == 2:
            engine.say(Abort(request_id - 1))
    engine.finish_all()
    return asked


def by_chance(converse: Callable[[Random], None], count: int) -> None:
    """Other conversations each time; of one that goes wrong the error says how to repeat it."""
    first = SystemRandom().randrange(1 << 32)
    for seed in range(first, first + count):
        try:
            converse(Random(seed))
        except Exception as error:
            error.add_note(f"{converse.__name__}(Random({seed}))")
            raise
