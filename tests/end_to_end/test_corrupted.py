"""Requests with NaN logits, through the complete engine: scheduler, runner and sampler on a CPU.

Concurrent requests, and later ones that reuse their pages, have the same text as alone.
"""

from __future__ import annotations

import pytest

from nanovllm.config import Config
from nanovllm.plan import StepPlan
from nanovllm.runner.results import Handle
from nanovllm.wire import FinishReason, Sampling
from tests.models.corrupted import POISON, VALUES, poisoned
from tests.whole_engine import WholeEngine, prompts_of

PROMPTS = [[token if token != POISON else 8 for token in p] for p in prompts_of(9, seed=5)]
BAD = {  # by request: the poison at the beginning, in the middle, at the end, and as the only token
    20: [POISON, *PROMPTS[0]],
    21: [*PROMPTS[1][:17], POISON, *PROMPTS[2]],
    22: [*PROMPTS[3], POISON],
    23: [POISON],
}


@pytest.fixture(scope="module", params=VALUES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return poisoned(tmp_path_factory.mktemp(request.param), VALUES[request.param])


@pytest.fixture(scope="module")
def alone(config: Config) -> dict[int, list[int]]:
    engine = WholeEngine(config, prefix=False)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(i, prompt, 15)
        engine.run()
    assert set(engine.finish.values()) == {FinishReason.LENGTH}
    return engine.text


def watched(engine: WholeEngine) -> list[StepPlan]:
    """Return a list that collects the plans as they are launched."""
    plans: list[StepPlan] = []
    launch = engine.runner.launch

    def watching(plan: StepPlan) -> Handle:
        plans.append(plan)
        return launch(plan)

    engine.runner.launch = watching
    return plans


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("pages", [60, 200])
def test_they_end_with_an_error_and_nobody_else_does(
    config: Config, alone: dict[int, list[int]], depth: int, pages: int
) -> None:
    engine = WholeEngine(config, pages=pages, slots=5, step_tokens=32, depth=depth)
    plans = watched(engine)
    greedy, drawn = Sampling(temperature=0.0, logprobs=2), Sampling(temperature=1.0, seed=3)
    for turn in range(2):
        for i, prompt in enumerate(PROMPTS):
            if i % 2 == 0:
                bad = 20 + i // 2 % 4
                engine.submit(100 * turn + bad, BAD[bad], 15, drawn if i % 4 else greedy)
            engine.submit(100 * turn + i, prompt, 15, grammar="even" if i == 7 else "")
            engine.loop.step()
        engine.run()
    for turn in (0, 100):
        for bad in BAD:
            assert engine.finish[turn + bad] == FinishReason.ERROR
            assert engine.text.get(turn + bad, []) == []
            assert turn + bad not in engine.logprobs
            assert engine.cached.get(turn + bad, 0) <= BAD[bad].index(POISON)
        for i, text in alone.items():
            assert engine.finish[turn + i] == FinishReason.LENGTH
            assert i == 7 or engine.text[turn + i] == text
    cleaned = {page for plan in plans for page in plan.clean}
    assert pages == 200 or len(cleaned) >= 4  # with 200 pages, none is reused
    assert engine.memory.pool.num_free == pages
    assert engine.runner.slots.tokens_NL.min() == 0
    assert engine.scheduler.stats().num_running == 0


def test_pages_are_cleaned_in_the_step_that_hands_them_out_again(
    config: Config, alone: dict[int, list[int]]
) -> None:
    """With few pages, the next request gets the corrupted one's, cleaned in the same step."""
    engine = WholeEngine(config, pages=20, slots=2, step_tokens=64)
    plans = watched(engine)
    engine.submit(20, [POISON, *range(20, 86)], 1)  # 17 of the 20
    engine.run()
    assert engine.finish[20] == FinishReason.ERROR
    dirty = pages_with_nan(engine)
    assert dirty and dirty <= given_by(plans)
    for i in (2, 1, 3):  # the first of these writes one cell of its last page, which was dirty
        plans.clear()
        engine.submit(i, PROMPTS[i], 15)
        engine.run()
        assert engine.text[i] == alone[i]
        assert not given_by(plans) & pages_with_nan(engine)
        assert all(set(plan.clean) <= given_by([plan]) for plan in plans)


def given_by(plans: list[StepPlan]) -> set[int]:
    given = [a.pages for plan in plans for a in (*plan.admits, *plan.grants)]
    return {page for pages in given for page in pages}


def pages_with_nan(engine: WholeEngine) -> set[int]:
    bad = [~cells.isfinite().flatten(2).all(2).all(0) for cells in engine.runner.caches.tensors]
    return {page for pages in bad for page in pages.nonzero()[:, 0].tolist()} - {0}
