"""Each request gets the same text with any schedule as alone, shown by random conversations."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.kv.pages import PagePool
from nanovllm.plan import CORRUPTED
from nanovllm.wire import FinishReason, RefusalKind
from tests.paper.conversations import Asked, by_chance, conversations, held
from tests.paper.engine import PAGE, PaperEngine

NUM_ENGINES = 14 * settings().max_examples  # 1,400; 5,600 with --hypothesis-profile=thorough
NUM_PARTS = 2


def sizes_of_engines(rng: Random) -> dict[str, Any]:
    page = rng.choice([PAGE, PAGE, 1, 2, 3, 8])
    return dict(
        page=page,
        num_pages=rng.randint(8, 14) * PAGE // page,
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
        min_saved_tokens=rng.choice([1, 4, 1000]),
        unlucky=rng.choice([0, 0, 15]),
        glitches=frozenset(rng.randint(1, 30) for _ in range(rng.choice([0, 0, 0, 1, 2, 3]))),
    )


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_batching_never_changes_the_text(part: int) -> None:
    by_chance(converse, NUM_ENGINES // NUM_PARTS)


@settings(deadline=None)
@given(st.randoms())
def test_the_smallest_conversation_that_goes_wrong(rng: Random) -> None:
    """Run the same with few engines. Hypothesis reduces a failure to the smallest one."""
    converse(rng)


def converse(rng: Random, sizes_of: Callable[[Random], dict[str, Any]] = sizes_of_engines) -> None:
    turns, sizes = conversations(rng), sizes_of(rng)
    abort_every, grammar_every = rng.choice([0, 3]), rng.choice([0, 0, 1, 2, 3])
    engine = PaperEngine(**sizes)
    asked = held(
        engine, turns, abort_every=abort_every, grammar_every=grammar_every,
        recurrent=sizes["checkpoints"] is not None, unlucky=sizes["unlucky"],
    )  # fmt: skip
    for request_id, (prompt, max_new, stop_ids, text) in enumerate(asked):
        got, reason = engine.text.get(request_id, []), engine.finish.get(request_id)
        if not engine.memory.fits(len(prompt) + max_new):
            assert got == [] and engine.refused[request_id] == RefusalKind.TOO_LONG
        elif reason == FinishReason.ABORT:
            assert abort_every and request_id % abort_every == 1
            assert got == text[: len(got)]  # truncated, never wrong
        elif reason == FinishReason.ERROR:
            assert got == text[: len(got)]
            assert got == text[:-1] or may_have_read_nan(request_id, asked, engine)
        else:
            assert got == text
            by_stop = text[-1] in stop_ids
            assert reason == (FinishReason.STOP if by_stop else FinishReason.LENGTH)
    pool = engine.memory.pool
    assert pool.num_free == pool.num_pages, "a finished request still holds pages"


def may_have_read_nan(request_id: int, asked: list[Asked], engine: PaperEngine) -> bool:
    """Return True if this request or another with the same first page had NaN.

    These requests read the same memory. A preempted request is admitted again with its output after
    its prompt, so pages contain both.
    """
    page = engine.memory.page_tokens
    first = [(one.prompt + one.text)[:page] for one in asked]
    sharing = [i for i, tokens in enumerate(first) if tokens == first[request_id]]
    wrong = any(asked[i].text[-1] == CORRUPTED for i in sharing if i != request_id)
    return wrong or any(
        known[:page] == first[request_id][: len(known)] for known in engine.gpu.struck
    )


@given(st.lists(st.sampled_from(["take", "hold", "drop", "make_ready"]), max_size=60), st.data())
def test_every_page_is_in_exactly_one_place(actions, data) -> None:
    forgotten: list[int] = []
    pool = PagePool(6, forgotten.append)
    held: list[int] = []
    for action in actions:
        if action == "take":
            held += pool.take(data.draw(st.integers(0, 3))) or []
        elif action == "make_ready":
            pool.make_ready(data.draw(st.integers(1, 6)))
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
