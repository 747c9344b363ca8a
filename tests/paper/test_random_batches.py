"""Any schedule must give every request the text it would get alone: conversations by chance."""

from __future__ import annotations

from random import Random, SystemRandom
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.kv.pages import PagePool
from nanovllm.plan import CORRUPTED
from nanovllm.wire import Abort, FinishReason, RefusalKind
from tests.paper.engine import PAGE, PaperEngine, generate
from tests.paper.gpu import POISON, VOCAB, solo_run

NUM_ENGINES = 200 * settings().max_examples  # 20,000; --hypothesis-profile=quick: 1,000
NUM_PARTS = 8
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


def sizes_of_engines(rng: Random) -> dict[str, Any]:
    return dict(
        num_pages=rng.randint(8, 14),
        num_slots=rng.randint(1, 5),
        budget=rng.randint(1, 20),
        mixed=rng.randint(1, 20),
        depth=rng.randint(0, 2),
        drafts=rng.choice([0, 1, 3]),
        wrong_every=rng.choice([1, 3, 20]),
        checkpoints=rng.choice([None, None, 0, 1, 3, 8]),
        every=rng.choice([4, 8, 1000]),
        prefix=rng.choice([True, True, False]),
        overtake=rng.choice([0, 1, 64]),
        least_spared=rng.choice([1, 4, 1000]),
        unlucky=rng.choice([0, 0, 15]),
        glitches=frozenset(rng.randint(1, 30) for _ in range(rng.choice([0, 0, 0, 1, 2, 3]))),
    )


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_batching_never_changes_the_text(part: int) -> None:
    first = SystemRandom().randrange(1 << 32)
    for seed in range(first, first + NUM_ENGINES // NUM_PARTS):
        try:
            converse(Random(seed))
        except Exception as error:
            error.add_note(f"converse(Random({seed}))")
            raise


@settings(deadline=None)
@given(st.randoms())
def test_the_smallest_conversation_that_goes_wrong(rng: Random) -> None:
    """The same for few engines: of one that fails, Hypothesis makes the smallest that fails."""
    converse(rng)


def converse(rng: Random) -> None:
    turns, sizes = conversations(rng), sizes_of_engines(rng)
    abort_every, grammar_every = rng.choice([0, 3]), rng.choice([0, 0, 1, 2, 3])
    engine, unlucky = PaperEngine(**sizes), sizes["unlucky"]
    recurrent = sizes["checkpoints"] is not None
    expected: list[list[int]] = []
    asked: list[tuple[list[int], int, list[int]]] = []
    first_of: list[int] = []  # request of each turn
    for turn in turns:
        earlier: list[int] = []
        if turn.continues is not None:
            first = first_of[turn.continues]
            earlier = asked[first][0] + [t for t in expected[first] if t >= 0]
        first_of.append(len(asked))
        for max_new in turn.max_new:
            request_id, prompt = len(asked), earlier + turn.prompt
            grammar = grammar_every > 0 and request_id % grammar_every == 0
            asked.append((prompt, max_new, turn.stop_ids))
            expected.append(
                solo_run(*asked[-1], recurrent=recurrent, grammar=grammar, unlucky=unlucky)
            )
            told = *asked[-1], turn.priority, "toy" * grammar, turn.salt
            engine.say(generate(request_id, *told, logprobs=request_id % 3 - 1))
        for _ in range(turn.pause):
            engine.step()
        if abort_every and request_id % abort_every == 2:
            engine.say(Abort(request_id - 1))
    engine.finish_all()
    for request_id, (text, (prompt, max_new, stop_ids)) in enumerate(
        zip(expected, asked, strict=True)
    ):
        got, reason = engine.text.get(request_id, []), engine.finish.get(request_id)
        if not engine.memory.fits(len(prompt) + max_new):
            assert got == [] and engine.refused[request_id] == RefusalKind.TOO_LONG
        elif reason == FinishReason.ABORT:
            assert abort_every and request_id % abort_every == 1
            assert got == text[: len(got)]  # cut short, never wrong
        elif reason == FinishReason.ERROR:
            assert got == text[: len(got)]
            assert got == text[:-1] or may_have_read_nan(request_id, asked, expected, engine)
        else:
            assert got == text
            by_stop = text[-1] in stop_ids
            assert reason == (FinishReason.STOP if by_stop else FinishReason.LENGTH)
            assert engine.stop_id[request_id] == (text[-1] if by_stop else -1)
    pool = engine.memory.pool
    assert pool.num_free == pool.num_pages, "a finished request still holds pages"


def may_have_read_nan(
    request_id: int,
    asked: list[tuple[list[int], int, list[int]]],
    expected: list[list[int]],
    engine: PaperEngine,
) -> bool:
    """Whether somebody with the same first page went wrong: what is shared is read together."""
    first = asked[request_id][0][:PAGE]
    sharing = [i for i, (prompt, _, _) in enumerate(asked) if prompt[:PAGE] == first]
    wrong = any(expected[i][-1] == CORRUPTED for i in sharing if i != request_id)
    return wrong or any(known[:PAGE] == first for known in engine.gpu.struck)


@given(st.lists(st.sampled_from(["take", "hold", "drop"]), max_size=60), st.data())
def test_every_page_is_in_exactly_one_place(actions, data) -> None:
    forgotten: list[int] = []
    pool = PagePool(6, forgotten.append)
    held: list[int] = []
    for action in actions:
        if action == "take":
            held += pool.take(data.draw(st.integers(0, 3))) or []
        elif held:
            page = data.draw(st.sampled_from(held))
            if action == "hold":
                pool.hold(page)
                held.append(page)
            else:
                pool.drop(page, keep=data.draw(st.booleans()))
                held.remove(page)
        pool.check()
        assert pool.num_free == 6 - len(set(held))
        assert 0 not in held
