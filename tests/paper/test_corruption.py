"""A corrupted row ends with an error, and its NaN reaches no other request."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from nanovllm.kv.memory import KVMemory
from nanovllm.plan import StepPlan, StepResult
from nanovllm.sched.scheduler import Scheduler
from nanovllm.speculate import Drafts
from nanovllm.wire import Abort, FinishReason
from tests.paper.engine import PAGE, PaperEngine, generate
from tests.paper.gpu import POISON, ids, solo_run

STOP_ID = 9
ERROR, LENGTH, STOP = FinishReason.ERROR, FinishReason.LENGTH, FinishReason.STOP


def text(prompt: list[int], max_new: int, *, recurrent: bool = False) -> list[int]:
    return solo_run(prompt, max_new, [], recurrent=recurrent)


def cleaned(engine: PaperEngine) -> list[int]:
    return [page for plan in engine.plans for page in plan.clean]


def test_poison_in_a_prompt_is_an_error_of_that_request_alone() -> None:
    engine = PaperEngine(num_pages=40, num_slots=4, budget=64)
    for i in range(3):
        engine.say(generate(i, [i] * 6 + [POISON] * (i == 1) + [i] * 3, 8))
    engine.finish_all()
    assert engine.finish == {0: LENGTH, 1: ERROR, 2: LENGTH}
    assert 1 not in engine.text
    for i in (0, 2):
        assert engine.text[i] == text([i] * 9, 8)
    assert engine.memory.pool.num_free == 40


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_told_before_stay_right_and_lines_on_their_way_are_dropped(depth) -> None:
    engine = PaperEngine(num_pages=40, num_slots=4, budget=64, depth=depth, glitches=frozenset([5]))
    for i in range(2):
        engine.say(generate(i, [i] * 6, 12))
    engine.finish_all()
    assert engine.finish == {0: LENGTH, 1: ERROR}
    assert engine.text == {0: text([0] * 6, 12), 1: text([1] * 6, 12)[:4]}


@pytest.mark.parametrize("recurrent", [False, True])
def test_no_page_of_a_corrupted_request_is_found_again(recurrent) -> None:
    engine = PaperEngine(
        num_pages=40,
        num_slots=2,
        budget=64,
        checkpoints=3 if recurrent else None,
        glitches=frozenset([1]),
    )
    for i in range(4):
        engine.say(generate(i, [1] * 14, 5))
        engine.finish_all()
        assert engine.finish[i] == (LENGTH if i else ERROR)
        assert not i or engine.text[i] == text([1] * 14, 5, recurrent=recurrent)
    assert list(engine.cached.values()) == ([0, 0, 12, 12] if recurrent else [0, 0, 13, 13])


def test_pages_of_a_corrupted_request_are_cleaned_once_for_their_next_owner() -> None:
    engine = PaperEngine(num_pages=4, num_slots=1, budget=64, glitches=frozenset([1]))
    for i in range(4):
        engine.say(generate(i, [i] * 9, 3))
        engine.finish_all()
    assert engine.finish == {0: ERROR, 1: LENGTH, 2: LENGTH, 3: LENGTH}
    bad = engine.plans[0].admits[0].pages
    admitted = [plan for plan in engine.plans if plan.admits]
    got = [(sorted(plan.clean), plan.admits[0].pages) for plan in admitted]
    assert not any(plan.clean for plan in engine.plans if not plan.admits)
    assert sorted(cleaned(engine)) == sorted(bad)
    assert all(set(clean) <= set(pages) for clean, pages in got)
    for i in (1, 2, 3):
        assert engine.text[i] == text([i] * 9, 3)


def test_a_page_that_a_row_grows_into_is_cleaned() -> None:
    engine = PaperEngine(num_pages=3, num_slots=1, budget=64, glitches=frozenset([1]))
    engine.say(generate(0, [0] * 9, 3))
    engine.finish_all()
    engine.say(generate(1, [1] * 4, 7))
    engine.finish_all()
    assert (engine.finish[0], engine.text[1]) == (ERROR, text([1] * 4, 7))
    granted = [plan for plan in engine.plans if plan.grants]
    assert [plan.clean == plan.grants[0].pages for plan in granted] == [True, True]


def test_a_page_that_is_copied_to_is_cleaned() -> None:
    engine = PaperEngine(num_pages=5, num_slots=1, budget=64, glitches=frozenset([2]))
    engine.say(generate(0, [1] * 6, 1))
    engine.finish_all()
    engine.say(generate(1, [2] * 9, 3))  # takes the other three pages
    engine.finish_all()
    engine.say(generate(2, [1] * 6, 3))
    engine.finish_all()
    assert engine.finish == {0: LENGTH, 1: ERROR, 2: LENGTH}
    (copies,) = [plan for plan in engine.plans if plan.copies]
    assert copies.clean == [copies.copies[0][1]]
    assert engine.text[2] == text([1] * 6, 3)


def test_others_keep_the_pages_they_share_with_a_corrupted_request() -> None:
    engine = PaperEngine(num_pages=20, num_slots=3, budget=64, glitches=frozenset([4]))
    prompt = [1] * 9
    engine.say(generate(0, prompt, 12))
    for _ in range(3):
        engine.step()
    engine.say(generate(1, [*prompt, 2], 12))
    engine.finish_all()
    assert engine.cached == {0: 0, 1: 8}
    assert engine.finish == {0: LENGTH, 1: ERROR}
    assert engine.text[0] == text(prompt, 12)
    engine.say(generate(2, prompt, 12))
    engine.finish_all()
    assert engine.cached[2] == 0  # pages of the first request are no longer trusted either
    assert engine.text[2] == text(prompt, 12)


@pytest.mark.parametrize("num_prompt", [5, 6, 7, 8])
def test_nan_behind_the_last_token_of_a_finished_request_reaches_nobody(num_prompt) -> None:
    """A finished request keeps its pages until the result of its surplus row has arrived."""
    prompt = [1] * num_prompt
    free = text(prompt, 9)
    at = next(i for i in range(1, 9) if free[i] not in free[:i])
    engine = PaperEngine(num_pages=5, num_slots=2, budget=64, glitches=frozenset([at + 2]))
    engine.say(generate(0, prompt, 9, [free[at]]))
    for i in range(1, 4):
        engine.say(generate(i, [i + 1] * 10, 6))  # gets no pages before request 0 ends
    engine.finish_all()
    assert engine.gpu.struck == [prompt]
    assert engine.finish == {0: STOP, 1: LENGTH, 2: LENGTH, 3: LENGTH}
    for i in range(1, 4):
        assert engine.text[i] == text([i + 1] * 10, 6)
    assert len(cleaned(engine)) == 1


def test_pages_of_a_prompt_that_was_aborted_half_way_are_cleaned() -> None:
    engine = PaperEngine(num_pages=6, num_slots=1, budget=5)
    engine.say(generate(0, [1, POISON] * 9, 3))
    engine.step()
    engine.step()
    engine.say(Abort(0))
    for i in (1, 2):
        engine.say(generate(i, [i] * 17, 3))
        engine.finish_all()
        assert engine.text[i] == text([i] * 17, 3)
    assert 2 <= len(cleaned(engine)) <= 3


def test_nan_of_a_token_in_flight_when_its_request_is_preempted() -> None:
    for glitch in range(1, 24):
        engine = PaperEngine(num_pages=8, num_slots=3, budget=32, glitches=frozenset([glitch]))
        for i in range(3):
            engine.say(generate(i, [i] * 6, 14))
        engine.finish_all()
        struck = [known[0] for known in engine.gpu.struck]
        for i in range(3):
            whole, got = text([i] * 6, 14), engine.text.get(i, [])
            if i in struck and engine.finish[i] == ERROR:
                assert got == whole[: len(got)]
            else:
                assert (engine.finish[i], got) == (LENGTH, whole)
        found = engine.memory.pool.num_free
        assert found == 8
        for i in struck:  # tokens computed then are not reused
            engine.say(generate(10 + i, [i] * 6, 14))
            engine.finish_all()
            assert engine.text[10 + i] == text([i] * 6, 14)


@pytest.mark.parametrize(
    ("sizes", "num_prompt", "max_new"),
    [
        ({"num_pages": 9}, 6, [14, 14, 14]),
        ({"num_pages": 7}, 6, [3, 12, 14]),  # full pages stay in the prefix index
        # Its last page, too.
        ({"num_pages": 7, "page": 8, "drafts": 5, "depth": 2}, 8, [10, 10, 14]),
    ],
)
def test_a_preempted_request_whose_token_in_flight_is_wrong_is_over(
    sizes, num_prompt, max_new
) -> None:
    def begin(glitches: frozenset[int]) -> PaperEngine:
        engine = PaperEngine(num_slots=3, budget=64, glitches=glitches, **sizes)
        for i in range(2):
            engine.say(generate(i, [i] * num_prompt, max_new[i]))
        engine.say(generate(2, [2] * 6, max_new[2]))
        return engine

    engine = begin(frozenset())
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    engine = begin(frozenset([engine.gpu.steps - 1]))
    engine.finish_all()
    assert engine.gpu.struck == [[2] * 6]
    assert engine.finish == {0: LENGTH, 1: LENGTH, 2: ERROR}
    told = engine.text[2]
    assert 0 < len(told) < 14 and told == text([2] * 6, 14)[: len(told)]
    engine.say(generate(3, [2] * 6, 14))
    engine.finish_all()
    assert (engine.cached[3], engine.text[3]) == (0, text([2] * 6, 14))


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("drafts", [1, 3])
def test_with_drafts_a_line_is_wrong_if_its_first_token_is(drafts, recurrent) -> None:
    """A glitch in a draft ends the request only if the draft's page also has accepted tokens."""
    reasons = set()
    sizes = {"num_pages": 40, "num_slots": 4, "budget": 64, "checkpoints": 3 if recurrent else None}
    for glitch, token in product(range(2, 12), range(1, 4)):
        engine = PaperEngine(drafts=drafts, glitches=frozenset([glitch]), **sizes)
        engine.say(generate(0, [token] * 6, 30))
        engine.finish_all()
        told, whole = engine.text.get(0, []), text([token] * 6, 30, recurrent=recurrent)
        assert told == whole if engine.finish[0] == LENGTH else told == whole[: len(told)]
        assert engine.gpu.struck == [[token] * 6] and engine.memory.pool.num_free == 40
        reasons.add(engine.finish[0])
    assert reasons == {LENGTH, ERROR}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nan_of_refused_drafts_of_a_finished_request_reaches_nobody(depth) -> None:
    """These drafts are after the stop token, and no output confirms that they are valid."""
    found = 0
    for num_prompt, token in product((5, 6, 7, 8), range(5, 8)):
        prompt = [token] * num_prompt
        free = text(prompt, 12)
        at = next(i for i in range(3, 12) if free[i] not in free[:i])
        for glitch in range(2, at + 3):
            sizes = {"num_pages": 5, "num_slots": 2, "budget": 64, "depth": depth}
            engine = PaperEngine(drafts=3, glitches=frozenset([glitch]), wrong_every=2, **sizes)
            engine.say(generate(0, prompt, 12, [free[at]]))
            for i in range(1, 4):
                engine.say(generate(i, [i + 1] * 10, 6))  # gets no pages before request 0 ends
            engine.finish_all()
            if engine.gpu.struck != [prompt] or engine.finish[0] != STOP:
                continue
            assert [engine.finish[i] for i in (1, 2, 3)] == [LENGTH] * 3
            assert [engine.text[i] for i in (1, 2, 3)] == [text([i] * 10, 6) for i in (2, 3, 4)]
            found += bool(cleaned(engine))
    assert found >= 2


def test_nan_in_logits_alone_costs_a_request_its_pages_all_the_same() -> None:
    prompts = [[i, i + 1] * 5 for i in range(12)]
    engine = PaperEngine(num_pages=80, num_slots=4, budget=64, unlucky=15)
    for i, prompt in enumerate(prompts):
        engine.say(generate(i, prompt, 9))
    engine.finish_all()
    alone = [solo_run(p, 9, [], recurrent=False, unlucky=15) for p in prompts]
    wrong = [i for i in range(12) if alone[i][-1] < 0]
    assert 2 <= len(wrong) <= 10
    assert [i for i in range(12) if engine.finish[i] == ERROR] == wrong
    for i in range(12):
        assert engine.text.get(i, []) == [token for token in alone[i] if token >= 0]


def test_whatever_a_draft_may_have_written_is_cleaned_behind_a_finished_text() -> None:
    """This includes drafts of earlier steps that wrote farther than later ones."""
    memory = KVMemory(4, PAGE)
    scheduler = Scheduler(
        memory, num_slots=1, step_tokens=64, max_model_tokens=64, drafts=Drafts(most=3)
    )

    def step(line: list[int], found: int) -> StepPlan:
        plan = scheduler.plan()
        drafts = np.array([[found, 7, 7, 7]], np.int32)
        scheduler.complete(StepResult(plan.step, np.array([line], np.int32), drafts=drafts))
        return plan

    scheduler.add(generate(0, [1] * 5, 9, [STOP_ID]), 0.0)
    scheduler.add(generate(1, [2] * 13, 3), 1.0)
    (admit,) = step([3], found=3).admits
    plans = [step([3, -1, -1, -1], found=1), step([STOP_ID, -1, -1, -1], found=3)]
    assert [ids(plan.drafts) for plan in plans] == [[3], [1]]  # positions 5 to 8, then 6 and 7
    pages = admit.pages + [page for plan in plans for grant in plan.grants for page in grant.pages]
    assert len(pages) == 3 and step([3], found=3).clean == sorted(pages[1:])
