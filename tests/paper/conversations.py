"""Random conversations from random.Random. Hypothesis would take as long as the engines do."""

from __future__ import annotations

from collections.abc import Callable
from random import Random, SystemRandom
from typing import NamedTuple

from nanovllm.wire import Abort
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import POISON, VOCAB, solo_run

# Few stems and few token values make requests share pages often.
STEMS = [[1] * 5, [2] * 8, [1, 1, 2, 1, 1, 2, 1, 1]]


class Turn(NamedTuple):
    """Requests that are submitted together, and their common fields."""

    prompt: list[int]  # appended to the text of the continued request, or the whole prompt
    max_new: list[int]  # of each request
    stop_ids: list[int]
    continues: int | None  # index of a turn; its first request is continued
    pause: int  # steps until the next turn
    priority: int
    salt: str
    mixed: int  # token budget of later steps that also decode


class Asked(NamedTuple):
    """A submitted request and its expected text."""

    prompt: list[int]
    max_new: int
    stop_ids: list[int]
    text: list[int]  # result of solo_run


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
    """Run the conversations to their end and return all requests."""
    asked: list[Asked] = []
    first_of: list[Asked] = []  # first request of each turn
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
    """Run `count` new random conversations. A failure's note has the seed that repeats it."""
    first = SystemRandom().randrange(1 << 32)
    for seed in range(first, first + count):
        try:
            converse(Random(seed))
        except Exception as error:
            error.add_note(f"{converse.__name__}(Random({seed}))")
            raise
