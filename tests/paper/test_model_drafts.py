"""Drafts of a model on the simulated GPU: layers in the target's pages never hold a wrong key."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import settings

from nanovllm.sched.drafting import PROBE_EVERY
from nanovllm.wire import FinishReason
from tests.paper.conversations import by_chance, conversations, held
from tests.paper.engine import PaperEngine, generate
from tests.paper.gpu import POISON, Row, solo_run
from tests.paper.test_random_batches import sizes_of_engines

LAGS = [0, 1]  # a model of its own, and a head
NEVER = 1000  # wrong_every: no draft is made wrong


def engine_of(lag: int, **sizes: object) -> PaperEngine:
    usual = dict(num_pages=60, num_slots=4, budget=64, drafts=3, wrong_every=NEVER, draft_lag=lag)
    return PaperEngine(**{**usual, **sizes})


@pytest.mark.parametrize("lag", LAGS)
def test_batching_changes_neither_text_nor_keys(lag: int) -> None:
    def converse(rng: Random) -> None:
        turns, sizes = conversations(rng), sizes_of_engines(rng)
        sizes |= {"drafts": rng.choice([1, 2, 3, 5]), "draft_lag": lag, "glitches": frozenset()}
        engine, unlucky = PaperEngine(**sizes), sizes["unlucky"]
        asked = held(
            engine, turns, abort_every=rng.choice([0, 3]), grammar_every=rng.choice([0, 0, 1, 2]),
            recurrent=sizes["checkpoints"] is not None, unlucky=unlucky,
        )  # fmt: skip
        for request_id, (*_, text) in enumerate(asked):
            got = engine.text.get(request_id, [])
            assert got == text[: len(got)]
        assert engine.gpu.layers is not None
        assert engine.gpu.layers.faults == []

    by_chance(converse, 3 * settings().max_examples)


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [5, 64])
def test_all_drafts_of_a_perfect_model_are_accepted(lag: int, depth: int, budget: int) -> None:
    engine = engine_of(lag, depth=depth, budget=budget, page=8)
    prompts = [[i, *range(7 + i)] for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.say(generate(i, prompt, 20))
    engine.finish_all()
    assert [engine.text[i] for i in range(4)] == [
        solo_run(prompt, 20, [], recurrent=False) for prompt in prompts
    ]
    assert engine.gpu.drafted and all(fed == right for fed, _, right in engine.gpu.drafted)


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("wrong_every", [2, 3])
def test_keys_of_rejected_drafts_are_replaced(lag: int, wrong_every: int) -> None:
    engine = engine_of(lag, wrong_every=wrong_every)
    for i in range(4):
        engine.say(generate(i, [i, 5, 6], 30))
    engine.finish_all()
    rejected = sum(fed - right for fed, _, right in engine.gpu.drafted)
    assert engine.gpu.layers is not None and rejected > 20
    assert engine.gpu.layers.faults == []


@pytest.mark.parametrize("lag", [None, *LAGS])
def test_drafts_of_token_0_are_accepted_and_rejected(lag: int | None) -> None:
    """Without a lag, drafts are found in the text. A wrong draft after token 49 is token 0."""
    engine = engine_of(0, num_pages=200, draft_lag=lag, wrong_every=3)
    found, sample = Counter[str](), engine.gpu._sample

    def counted(row: Row, allowed: list[int]) -> list[int]:
        fed = row.slot.tokens[row.lengths[0] : row.lengths[-1]]
        line = sample(row, allowed)
        for at, draft in enumerate(fed[: len(line)]):  # later drafts are not compared
            if draft == 0:
                found["accepted" if at < len(line) - 1 else "rejected"] += 1
        return line

    engine.gpu._sample = counted  # type: ignore[method-assign]
    prompts = [[i, 0, 0, 5] for i in range(8)]
    for i, prompt in enumerate(prompts):
        engine.say(generate(i, prompt, 60))
    engine.finish_all()
    assert [engine.text[i] for i in range(8)] == [
        solo_run(prompt, 60, [], recurrent=False) for prompt in prompts
    ]
    assert min(found["accepted"], found["rejected"]) >= 2


@pytest.mark.parametrize("lag", LAGS)
def test_a_prefix_brings_the_keys_of_the_draft_model(lag: int) -> None:
    """An equal prompt copies its last page, a longer one shares whole pages. All drafts count."""
    engine = engine_of(lag, drafts=2)
    prompt = [*range(1, 11)]
    for i, text in enumerate([prompt, prompt, [*prompt, 7, 8]]):
        engine.say(generate(i, text, 9))
        engine.finish_all()
    assert [engine.cached[i] for i in range(3)] == [0, 9, 8]
    assert engine.gpu.layers is not None and engine.gpu.layers.faults == []
    wrong = [fed - right for fed, _, right in engine.gpu.drafted if fed != right]
    # A head's pair at the end of the shared pages has another next token than in the longer prompt.
    assert wrong == [] or lag == 1


@pytest.mark.parametrize("lag", LAGS)
def test_nan_of_a_draft_model_goes_with_its_page(lag: int) -> None:
    """A poisoned prompt ends with an error. The next owner of its pages has correct drafts."""
    engine = engine_of(lag, num_pages=3, num_slots=1)
    engine.say(generate(0, [1, 2, POISON, 3, 4, 5, 6], 4))
    engine.finish_all()
    assert engine.finish[0] == FinishReason.ERROR
    engine.gpu.drafted.clear()
    engine.say(generate(1, [5, 6, 7], 8))
    engine.finish_all()
    assert engine.text[1] == solo_run([5, 6, 7], 8, [], recurrent=False)
    assert engine.gpu.drafted and all(fed == right for fed, _, right in engine.gpu.drafted)


@pytest.mark.parametrize("lag", LAGS)
def test_pages_are_granted_before_drafting_needs_them(lag: int) -> None:
    """A decode row never guesses without a page while pages are free.

    Only guesses right after a prompt may lack one. No row gets pages beyond its limit.
    """
    engine = engine_of(lag, num_slots=1, page=4)
    engine.say(generate(0, [3] * 6, 18))
    most = 0
    while not engine.loop.idle:
        engine.step()
        most = max(most, engine.memory.pool.num_pages - engine.memory.pool.num_free)
    assert engine.gpu.layers is not None
    assert [length for length in engine.gpu.layers.homeless if length <= 24] == [9][lag:]
    assert most == 6  # of 24 tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lag", LAGS)
def test_a_model_whose_drafts_fail_proposes_in_few_steps(lag: int, depth: int) -> None:
    """Its keys stay complete meanwhile: once drafts are right, all of them are accepted."""
    engine = engine_of(lag, depth=depth, page=8, num_pages=200)
    engine.gpu.wrong_every = 1
    for i in range(4):
        engine.say(generate(i, [i, 5, 6], 350))
    for _ in range(100):
        engine.step()
    usual = engine.plans[30:]
    assert 2 <= sum(plan.proposes for plan in usual) <= 2 + len(usual) // PROBE_EVERY
    assert all(bool(plan.drafts) <= before.proposes for before, plan in pairwise(engine.plans))
    assert sum(bool(plan.drafts) for plan in usual) >= 2
    engine.gpu.wrong_every = NEVER
    engine.gpu.drafted.clear()
    del engine.plans[:]
    engine.finish_all()
    right = [fed == right for fed, _, right in engine.gpu.drafted]
    assert len(right) > 10 and all(right[4:])  # the first were proposed before
    assert engine.gpu.layers is not None and engine.gpu.layers.faults == []
    later = engine.plans[3 * PROBE_EVERY : -4]  # after a few probes, all of them right
    assert len(later) > 10 and all(plan.proposes for plan in later)


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize(("dear", "feeds"), [(1.1, True), (3.5, False)])
def test_measured_steps_decide_whether_drafts_are_worth_it(
    lag: int, dear: float, feeds: bool
) -> None:
    """A third of the drafts is wrong. The first steps are those of prompts, which do not count."""
    engine = engine_of(lag, page=8, num_pages=200, wrong_every=3)
    launch = engine.launch

    def timed(plan):
        handle = launch(plan)
        handle.busy_s = 50.0 if plan.chunks else dear if plan.drafts else 1.0
        return handle

    engine.loop.executor.launch = timed
    for i in range(4):
        engine.say(generate(i, [i, 5, 6], 350))
    for _ in range(90):
        engine.step()
    share = sum(bool(plan.drafts) for plan in engine.plans[30:]) / len(engine.plans[30:])
    assert share > 0.9 if feeds else share < 0.1


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lag", LAGS)
def test_drafts_follow_their_acceptance_over_time(lag: int, depth: int) -> None:
    """The drafts of a row fall from 3 to 2 and to 0 with the acceptance, and rise to 3 again.

    24 rows decode together. A draft costs 0.1375 tokens, so that two are worth it if
    half of all drafts are right: 0.5 to the power of 2 is more, and to the power of 3 is less.
    """
    num_rows, most = 24, 3
    engine = engine_of(lag, depth=depth, page=8, num_pages=1600, num_slots=num_rows, budget=200)
    prompts = [[i, 5, 6] for i in range(num_rows)]
    for i, prompt in enumerate(prompts):
        engine.say(generate(i, prompt, 300))

    def shares(num_steps: int) -> list[float]:
        """Return the drafts of a row in each of the next steps, on average."""
        first = len(engine.plans)
        for _ in range(num_steps):
            engine.step()
        fed = [np.frombuffer(plan.drafts, np.int32) for plan in engine.plans[first:]]
        return [float(drafts.sum()) / num_rows for drafts in fed]

    good = shares(12)
    assert good[4:] == [most] * 8
    engine.gpu.wrong_every = 2
    half = shares(30)
    assert 1.4 < sum(half[12:]) / 18 < 2.6 and max(half[-6:]) < 2.7
    engine.gpu.wrong_every = 1
    none = shares(30)
    assert sum(none[:6]) > 3 and sum(none[14:]) <= 2 * 2  # at most two probes of two drafts
    engine.gpu.wrong_every = NEVER
    again = shares(64 + 16)
    (risen, *_) = (at for at, share in enumerate(again) if share > 2.5)
    assert risen < 64 and min(again[risen + 4 :][:6]) > 2.8
    engine.finish_all()
    assert [engine.text[i] for i in range(num_rows)] == [
        solo_run(prompt, 300, [], recurrent=False) for prompt in prompts
    ]
    assert engine.gpu.layers is not None and engine.gpu.layers.faults == []
