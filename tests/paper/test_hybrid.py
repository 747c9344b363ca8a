"""Pages and recurrent states together: where states are saved, found, evicted or not needed."""

from __future__ import annotations

from itertools import product

import pytest

from nanovllm.plan import Chunk
from nanovllm.wire import Abort, FinishReason
from tests.paper.engine import PAGE, PaperEngine, generate
from tests.paper.gpu import VOCAB, solo_run

ERROR, LENGTH = FinishReason.ERROR, FinishReason.LENGTH
STEM = [i * i % 47 for i in range(24)]
ROOMY = {"num_pages": 200, "num_slots": 8, "budget": 64, "checkpoints": 12}


def text(prompt: list[int], max_new: int) -> list[int]:
    return solo_run(prompt, max_new, [], recurrent=True)


def ask(engine: PaperEngine, request_id: int, prompt: list[int], max_new: int = 5) -> int:
    """Run a request alone. Return its number of cached tokens."""
    engine.say(generate(request_id, prompt, max_new))
    engine.finish_all()
    if engine.finish[request_id] == LENGTH:
        assert engine.text[request_id] == text(prompt, max_new)
    return engine.cached[request_id]


def chunks(engine: PaperEngine) -> list[int]:
    """Return the number of tokens in each prompt chunk so far."""
    return [chunk.num_tokens for plan in engine.plans for chunk in plan.chunks]


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_pages_are_never_reused_without_a_state(checkpoints) -> None:
    """A model with recurrent layers but no room for states reuses nothing either."""
    engine = PaperEngine(**ROOMY | {"checkpoints": checkpoints})
    found = [ask(engine, i, STEM[:14]) for i in range(4)]
    assert found == ([0, 12, 12, 12] if checkpoints else [0, 0, 0, 0])


# -- where states are saved ---------------------------------------------------------------------


def test_a_fork_is_found_from_the_index_and_known_from_the_third_request_on() -> None:
    engine = PaperEngine(**ROOMY)
    assert [ask(engine, i, [*STEM, *[40 + i] * 9]) for i in range(4)] == [0, 0, 24, 24]
    assert chunks(engine) == [33, 24, 9, 9, 9]


def test_with_3000_tokens_in_common_a_hybrid_model_computes_no_more_than_a_dense_one() -> None:
    """The second request computes all tokens, since no state is saved before."""
    stem, num_fed = [i * i % 47 for i in range(3000)], []
    for checkpoints in (None, 4):
        sizes = {"num_pages": 400, "num_slots": 2, "budget": 8192, "page": 64}
        engine = PaperEngine(checkpoints=checkpoints, every=4096, **sizes)
        for i in range(4):
            engine.say(generate(i, [*stem, *[i] * 90], 2))
            engine.finish_all()
        num_fed.append([3090 - engine.cached[i] for i in range(4)])
    dense, hybrid = num_fed
    assert dense == [3090, 146, 146, 146]  # 46 pages of 64 are cached
    assert hybrid == [3090, 3090, 146, 146]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [5, 9, 64])  # chunks end before, at and after the end of a page
def test_an_equal_prompt_computes_its_last_page_alone_from_the_second_on(depth, budget) -> None:
    engine = PaperEngine(depth=depth, **ROOMY | {"budget": budget})
    found = [ask(engine, i, STEM[:n]) for i, n in enumerate((16, 16, 17, 17, 16))]
    assert found == [0, 12, 12, 16, 12]
    assert engine.scheduler.stats().checkpoint_events["saved"] == 2


def test_a_prompt_of_one_chunk_is_not_cut_to_be_saved() -> None:
    engine = PaperEngine(**ROOMY)
    ask(engine, 0, STEM[:14])
    assert [plan.chunks for plan in engine.plans if plan.chunks] == [
        [Chunk(0, 14, True, save_to=0, start=0, save_at=12)]
    ]


def test_what_opens_a_thought_may_be_left_out_of_the_next_turn() -> None:
    engine, prompt = PaperEngine(**ROOMY), STEM[:13]
    ask(engine, 0, [*prompt, 48, 49])
    assert ask(engine, 1, [*prompt, *engine.text[0][3:], 7, 7]) == 12


def test_a_second_turn_goes_on_from_the_last_page_of_the_first_prompt() -> None:
    """Cached pages end where no other request continued, so there is no fork."""
    engine = PaperEngine(**ROOMY)
    prompt, found = STEM[:14], []
    for turn in range(4):
        found.append(ask(engine, turn, prompt, max_new=15))
        prompt = [*prompt, *engine.text[turn], 7, 7]
    assert found == [0, 12, 28, 44]
    assert chunks(engine) == [14, 19, 20, 21]


def test_where_known_pages_end_without_another_text_behind_is_no_fork() -> None:
    engine = PaperEngine(**ROOMY | {"checkpoints": 1})
    ask(engine, 0, STEM[:14], max_new=15)
    ask(engine, 1, [*STEM[:6], *[9] * 34])  # its longer state takes the only place
    assert ask(engine, 2, [*STEM[:14], *engine.text[0], *[7] * 6]) == 0
    assert chunks(engine) == [14, 40, 35]


def test_long_prompts_leave_states_on_their_way_at_page_boundaries() -> None:
    engine = PaperEngine(every=8, **ROOMY | {"budget": 10})
    assert ask(engine, 0, [*STEM, 5, 6, 7, 8, 9]) == 0
    assert chunks(engine) == [8, 8, 8, 5]
    assert ask(engine, 1, [*STEM[:19], 5, 6, 7, 8, 9]) == 16


def test_what_spares_less_than_a_page_is_not_saved() -> None:
    engine = PaperEngine(**ROOMY)
    for i in range(4):
        ask(engine, i, [i] * PAGE)
    assert engine.scheduler.stats().checkpoint_events == {"saved": 0, "restored": 0, "evicted": 0}
    ask(engine, 4, [0] * (PAGE + 1))
    assert engine.scheduler.stats().checkpoints == {"places": 12, "kept": 1}
    ask(engine, 5, [0] * (PAGE + 3))
    assert engine.scheduler.stats().checkpoint_events["saved"] == 1


def test_a_cached_prefix_is_so_long_as_the_state_before_a_next_one_is_saved() -> None:
    engine = PaperEngine(every=8, **ROOMY | {"budget": 4})
    assert ask(engine, 0, [*STEM, *[1] * 6]) == 0  # states saved after 8, 16, 24 and 28 tokens
    assert engine.scheduler.stats().checkpoint_events["saved"] == 4
    assert ask(engine, 1, [*STEM, *[2] * 12]) == 24  # one saved after 32, none after 28
    assert engine.scheduler.stats().checkpoint_events["saved"] == 5


def test_known_pages_behind_the_state_are_not_written_again() -> None:
    """Requests that read these pages would get values with other roundings."""
    engine = PaperEngine(**ROOMY)
    ask(engine, 0, STEM[:14], max_new=15)
    assert ask(engine, 1, [*STEM[:14], *engine.text[0], 7, 7]) == 12
    first, second = [admit.pages for plan in engine.plans for admit in plan.admits]
    grown = [page for plan in engine.plans for grant in plan.grants for page in grant.pages]
    assert len(grown) > 3 and second[:3] == first[:3]
    assert not {*second[3:]} & {*first, *grown}


# -- forks between concurrent prompts -----------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_eight_choices_of_a_prompt_compute_it_once_and_its_last_page_each(depth) -> None:
    engine = PaperEngine(depth=depth, **ROOMY)
    for i in range(8):
        engine.say(generate(i, STEM[:23], 5 + i))
    engine.finish_all()
    assert sum(chunks(engine)) == 23 + 7 * 3
    assert engine.cached == {0: 0} | dict.fromkeys(range(1, 8), 20)
    for i in range(8):
        assert engine.text[i] == text(STEM[:23], 5 + i)


def test_a_fork_within_a_step_is_waited_for_and_nothing_else_is() -> None:
    engine = PaperEngine(depth=0, **ROOMY)
    engine.say(generate(0, [*STEM, *[1] * 6], 5))
    engine.say(generate(1, [9] * 12, 5))
    engine.say(generate(2, [*STEM, 2, 2], 5))
    engine.say(generate(3, [8] * 30, 5))
    engine.step()
    assert list(engine.cached) == [0, 1, 3]
    assert engine.scheduler.stats().waiting_by_reason == {"capacity": 0, "shared_prompt": 1}
    engine.finish_all()
    assert engine.cached == {0: 0, 1: 0, 3: 0, 2: 24}


def test_equal_prompts_of_one_step_save_one_state() -> None:
    engine = PaperEngine(min_saved_tokens=1000, **ROOMY)
    for i in range(3):
        engine.say(generate(i, STEM[:14], 5))
    engine.finish_all()
    assert chunks(engine) == [14, 14, 14]
    assert engine.scheduler.stats().checkpoint_events["saved"] == 1
    assert [engine.text[i] for i in range(3)] == [text(STEM[:14], 5)] * 3


@pytest.mark.parametrize(("num_own", "first"), [(8, 8), (9, 12)])
def test_no_chunk_is_cut_for_who_would_be_spared_less_than_half(num_own, first) -> None:
    engine = PaperEngine(**ROOMY | {"budget": 12})
    engine.say(generate(0, [*STEM, *[1] * 6], 5))
    engine.say(generate(1, [*STEM[:8], *[2] * num_own], 5))
    engine.finish_all()
    assert chunks(engine)[0] == first
    assert [engine.text[i] for i in (0, 1)] == [
        text([*STEM, *[1] * 6], 5),
        text([*STEM[:8], *[2] * num_own], 5),
    ]


def test_a_state_that_is_saved_is_news_to_who_had_no_pages_without_it() -> None:
    engine = PaperEngine(min_saved_tokens=1000, **ROOMY | {"num_pages": 21, "budget": 12})
    engine.say(generate(0, [*STEM, *[1] * 5], 40))
    for _ in range(2):
        engine.step()
    engine.say(generate(1, [*STEM, 2, 2], 2))
    engine.say(generate(2, [*STEM, 3, 3, 3, 3, 3], 2))
    for _ in range(6):
        engine.step()
    assert engine.cached == {0: 0, 1: 0, 2: 24} and 0 not in engine.finish
    engine.finish_all()


# -- outputs and preemption ----------------------------------------------------------------------


def crowded(num_pages: int, depth: int, drafts: int, checkpoints: int, **sizes) -> PaperEngine:
    engine = PaperEngine(
        num_pages=num_pages, depth=depth, drafts=drafts, checkpoints=checkpoints,
        num_slots=4, budget=32, every=4, **sizes,
    )  # fmt: skip
    for i in range(4):
        engine.say(generate(i, [i] * (5 + i), 14))
        engine.step()
    engine.finish_all()
    return engine


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("drafts", [0, 3])
def test_preemption_never_changes_the_text(depth, drafts) -> None:
    """All pages and checkpoint places are free at the end."""
    num_preemptions = num_restored = 0
    for num_pages, checkpoints in product(range(6, 20, 2), (0, 1, 20)):
        engine = crowded(num_pages, depth, drafts, checkpoints)
        for i in range(4):
            assert engine.text[i] == text([i] * (5 + i), 14)
        assert engine.memory.pool.num_free == num_pages
        num_preemptions += engine.scheduler.stats().num_preemptions
        num_restored += engine.scheduler.stats().checkpoint_events["restored"]
    assert num_preemptions >= 15 and num_restored >= 2, (num_preemptions, num_restored)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_preempted_request_goes_on_from_a_state_of_its_output(depth) -> None:
    """Its first pages are evicted last."""
    engine = PaperEngine(every=4, depth=depth, **ROOMY | {"num_pages": 16})
    for i, max_new in ((0, 40), (1, 30)):
        engine.say(generate(i, [i] * 6, max_new))
    engine.finish_all()
    assert engine.scheduler.stats().num_preemptions == 1
    (back,) = [a for plan in engine.plans for a in plan.admits if len(a.tokens) // 4 > 6]
    assert (back.num_cached, back.restore_from >= 0) == (16, True)
    assert [engine.text[i] for i in (0, 1)] == [text([0] * 6, 40), text([1] * 6, 30)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_long_outputs_leave_states_behind_at_page_boundaries(depth) -> None:
    engine = PaperEngine(every=8, depth=depth, **ROOMY)
    for i, prompt in enumerate((STEM[:5], STEM[5:10])):
        others = [token for token in range(VOCAB) if token not in text(prompt, 30)]
        engine.say(generate(i, prompt, 30, others[:9]))  # more than STOPS: checked in every step
    engine.finish_all()
    assert [len(plan.saves) for plan in engine.plans if plan.saves] == [2, 2, 2]
    for i, prompt in enumerate((STEM[:5], STEM[5:10])):
        assert engine.text[i] == text(prompt, 30)
        known = prompt + engine.text[i]
        assert ask(engine, 10 + i, [*known[:30], 7, 7]) == 28  # saved after 4, 12, 20 and 28
        assert ask(engine, 20 + i, [*known[:22], 7, 7]) == 20


def test_with_drafts_outputs_leave_none() -> None:
    """With drafts, the number of tokens in a state is unknown when a page becomes full."""
    engine = PaperEngine(every=4, drafts=3, wrong_every=5, **ROOMY)
    ask(engine, 0, STEM[:5], max_new=30)
    assert not any(plan.saves for plan in engine.plans)


def test_whoever_is_aborted_leaves_no_place_behind() -> None:
    for depth, num_steps in product((0, 1, 2), range(3, 14)):
        engine = PaperEngine(depth=depth, every=4, **ROOMY | {"checkpoints": 2})
        for i in range(3):
            engine.say(generate(i, [i] * 6, 14))
        for _ in range(num_steps):
            engine.step()
        for i in range(3):
            engine.say(Abort(i))
        engine.finish_all()
        assert engine.memory.pool.num_free == 200
        for i in range(3):
            ask(engine, 10 + i, [i] * 9, max_new=7)
            assert engine.finish[10 + i] == LENGTH


# -- errors ----------------------------------------------------------------------------------------


def test_a_state_saved_by_a_corrupted_request_is_lost_where_others_named_the_pages() -> None:
    engine = PaperEngine(**ROOMY)
    ask(engine, 0, [*STEM, *[1] * 6])
    engine.gpu.glitches = frozenset([engine.gpu.steps + 1])  # the step that saves the fork's state
    ask(engine, 1, [*STEM, *[2] * 6])
    assert engine.finish[1] == ERROR
    assert [ask(engine, i, [*STEM, *[i + 1] * 6]) for i in (2, 3)] == [0, 24]
    assert (engine.finish[2], engine.finish[3]) == (LENGTH, LENGTH)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_nan_around_a_preemption_reaches_nobody_else(depth, drafts) -> None:
    for glitch, num_pages in product(range(2, 20, 3), (7, 9)):
        glitches = frozenset([glitch])
        engine = crowded(num_pages, depth, drafts, 4, glitches=glitches, wrong_every=2)
        struck = [known[0] for known in engine.gpu.struck]
        for i in range(4):
            whole, got = text([i] * (5 + i), 14), engine.text.get(i, [])
            if engine.finish[i] == ERROR:
                assert i in struck and got == whole[: len(got)]
            else:
                assert got == whole
        for i in range(4):
            ask(engine, 10 + i, [i] * (5 + i), max_new=14)
            ask(engine, 20 + i, [30 + i] * 9, max_new=14)
        assert all(engine.finish[i] == LENGTH for i in range(20, 24))
