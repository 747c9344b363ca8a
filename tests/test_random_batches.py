"""Any schedule must give every request the text it would get alone: conversations by chance."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from nanovllm.kv.pages import PagePool
from nanovllm.wire import Abort, FinishReason, RefusalKind
from tests.paper_engine import PaperEngine, generate
from tests.paper_gpu import VOCAB, solo_run

NUM_ENGINES = 200 * settings().max_examples  # 20,000; --hypothesis-profile=quick: 1,000
# Few stems and few token values, so that requests often share pages.
stems = st.sampled_from([[1] * 5, [2] * 8, [1, 1, 2, 1, 1, 2, 1, 1]])
tails = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@st.composite
def conversations(draw) -> list[tuple[list[int], int, list[int], int | None, int, int]]:
    """(prompt tail, max_new, stop ids, request continued, steps until the next, priority)."""
    turns = []
    for i in range(draw(st.integers(1, 12))):
        continues = draw(st.none() | st.integers(0, i - 1)) if i else None
        prompt = draw(tails) if continues is not None else draw(stems) + draw(tails)
        stops = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
        pause, priority = draw(st.integers(0, 6)), draw(st.integers(-1, 1))
        turns.append((prompt, draw(st.integers(1, 9)), stops, continues, pause, priority))
    return turns


@settings(max_examples=NUM_ENGINES, deadline=None)
@given(
    turns=conversations(),
    num_pages=st.integers(8, 14),
    num_slots=st.integers(1, 5),
    budget=st.integers(1, 20),
    mixed=st.integers(1, 20),
    depth=st.integers(0, 2),
    drafts=st.sampled_from([0, 1, 3]),
    checkpoints=st.sampled_from([0, 1, 3]),
    abort_every=st.sampled_from([0, 3]),
    prefix=st.sampled_from([True, True, False]),
    grammar_every=st.sampled_from([0, 0, 1, 2, 3]),
)
def test_batching_never_changes_the_text(
    turns,
    num_pages,
    num_slots,
    budget,
    mixed,
    depth,
    drafts,
    checkpoints,
    abort_every,
    prefix,
    grammar_every,
) -> None:
    engine = PaperEngine(
        num_pages=num_pages,
        num_slots=num_slots,
        budget=budget,
        mixed=mixed,
        depth=depth,
        checkpoints=checkpoints,
        drafts=drafts,
        prefix=prefix,
    )
    expected: dict[int, list[int]] = {}
    prompts: list[list[int]] = []
    for request_id, (tail, max_new, stop_ids, continues, pause, priority) in enumerate(turns):
        earlier = prompts[continues] + expected[continues] if continues is not None else []
        prompts.append(earlier + tail)
        prompt, grammar = prompts[-1], grammar_every > 0 and request_id % grammar_every == 0
        expected[request_id] = solo_run(
            prompt, max_new, stop_ids, recurrent=checkpoints > 0, grammar=grammar
        )
        asked = generate(request_id, prompt, max_new, stop_ids, priority, "toy" * grammar)
        engine.say(asked)
        for _ in range(pause):
            engine.step()
        if abort_every and request_id % abort_every == 2:
            engine.say(Abort(request_id - 1))
    engine.finish_all()
    for request_id, text in expected.items():
        got = engine.text.get(request_id, [])
        max_new, stop_ids = turns[request_id][1:3]
        if not engine.memory.fits(len(prompts[request_id]) + max_new + drafts):
            assert got == [] and engine.refused[request_id] == RefusalKind.TOO_LONG
        elif engine.finish[request_id] == FinishReason.ABORT:
            assert abort_every and request_id % abort_every == 1
            assert got == text[: len(got)]  # cut short, never wrong
        else:
            assert got == text
            by_stop = text[-1] in stop_ids
            reason = FinishReason.STOP if by_stop else FinishReason.LENGTH
            assert engine.finish[request_id] == reason
            assert engine.stop_id[request_id] == (text[-1] if by_stop else -1)
    assert engine.memory.pool.num_free == num_pages, "a finished request still holds pages"


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
