"""The complete engine on a CPU: greedy tokens equal transformers' generate, in any batching.

Float32, large random weights; scheduler, runner and sampler without processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from nanovllm.config import Config
from nanovllm.kv.hybrid import HybridMemory
from nanovllm.wire import Abort, FinishReason, Sampling
from tests.models.tiny import CASES, TOLD, config_of, make_tiny
from tests.whole_engine import WholeEngine, prompts_of, references


@pytest.mark.parametrize("case", CASES)
def test_single_requests_and_a_mixed_batch(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    model = make_tiny(tmp_path, family, **overrides)
    prompts = prompts_of(4)
    expected = dict(enumerate(references(model, prompts, 12)))
    alone = WholeEngine(config_of(tmp_path), prefix=False)
    for i in (0, 1):
        alone.submit(i, prompts[i], 12)
        alone.run()
        assert alone.text[i] == expected[i]
    batched = WholeEngine(config_of(tmp_path))
    for i, prompt in enumerate(prompts):
        batched.submit(i, prompt, 12)
        batched.loop.step()
    batched.run()
    assert batched.text == expected


@pytest.fixture(scope="module", params=TOLD)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, list[list[int]], list]:
    folder = tmp_path_factory.mktemp("tiny")
    family, overrides = CASES[request.param]
    model = make_tiny(folder, family, **overrides)
    prompts = prompts_of(10, seed=1)
    prompts[3] = [*prompts[2][:20], 5]
    prompts[4] = [*prompts[2][:20], 6, 7]
    return config_of(folder), prompts, references(model, prompts, 20)


def reusable(engine: WholeEngine, num_tokens: int) -> int:
    """Return the reusable part of cached tokens.

    Recurrent states are saved at the ends of pages, so models with such layers reuse fewer.
    """
    page_tokens = engine.memory.page_tokens
    is_hybrid = isinstance(engine.memory, HybridMemory)
    return num_tokens // page_tokens * page_tokens if is_hybrid else num_tokens


ONE = pytest.mark.parametrize("tiny", TOLD[:1], indirect=True)  # the model does not matter
FEW = 8  # tokens of a text that starts with a wrong one after a wrong prompt


@pytest.mark.parametrize(
    ("tiny", "step_tokens", "depth"),
    [(case, *sizes) for case in TOLD for sizes in ((16, 1), (33, 2))]
    + [(TOLD[0], 128, 0), (TOLD[0], 512, 1)],
    indirect=["tiny"],
)
def test_chunking_and_depth_never_change_the_text(tiny, step_tokens: int, depth: int) -> None:
    config, prompts, expected = tiny
    engine = WholeEngine(config, step_tokens=step_tokens, depth=depth, slots=5)
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, 20)
    engine.run()
    assert [engine.text[i] for i in range(10)] == expected


def test_a_prefix_hit_gives_the_same_text(tiny) -> None:
    config, prompts, expected = tiny
    engine = WholeEngine(config)
    for turn in range(3):
        for i, prompt in enumerate(prompts[:5]):
            engine.submit(100 * turn + i, prompt, FEW)
            engine.run()
    for first in (0, 200):
        assert [engine.text[first + i] for i in range(5)] == [text[:FEW] for text in expected[:5]]
    is_hybrid = isinstance(engine.memory, HybridMemory)  # saves a state where texts fork
    assert engine.cached[4 if is_hybrid else 3] >= 20 // 4 * 4  # shares a prefix with others
    # Full pages and a copy of the last one; states only at the end of a page.
    assert engine.cached[200] == reusable(engine, len(prompts[0]) - 1)


@pytest.mark.parametrize("step_tokens", [16, 512])
def test_choices_of_a_prompt_share_its_pages_and_give_the_same_text(tiny, step_tokens: int) -> None:
    config, prompts, expected = tiny
    engine = WholeEngine(config, page_tokens=16, slots=5, step_tokens=step_tokens)
    for i, prompt in enumerate(prompts):
        for choice in range(3):
            engine.submit(100 * choice + i, prompt, FEW)
    engine.run()
    for choice in range(3):
        found = [engine.text[100 * choice + i] for i in range(10)]
        assert found == [text[:FEW] for text in expected]
    if step_tokens > sum(map(len, prompts)):  # whole prompts in one step
        long = [i for i, prompt in enumerate(prompts) if len(prompt) > 33]  # worth waiting for
        assert len(long) > 2
        for i in long:
            all_but_one = reusable(engine, len(prompts[i]) - 1)
            assert engine.cached[100 + i] == engine.cached[200 + i] == all_but_one


def test_preemption_gives_the_same_text(tiny) -> None:
    config, prompts, expected = tiny
    engine = WholeEngine(config, pages=30, slots=6, step_tokens=32)
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, 20)
    engine.run()
    assert engine.scheduler.stats().num_preemptions >= 3
    assert [engine.text[i] for i in range(10)] == expected
    assert engine.memory.pool.num_free == 30


@ONE
def test_aborts_in_between_leave_the_others_alone(tiny) -> None:
    config, prompts, expected = tiny
    engine = WholeEngine(config, pages=60, slots=4, step_tokens=32)
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, 20)
        engine.loop.step()
        if i % 3 == 2:
            engine.loop.handle(Abort(i - 1))
    engine.run()
    aborted = [i for i, reason in engine.finish.items() if reason == FinishReason.ABORT]
    assert sorted(aborted) == [1, 4, 7]
    for i, text in enumerate(expected):
        assert engine.text.get(i, []) == text[: len(engine.text.get(i, []))]
        assert i in aborted or engine.text[i] == text
    assert engine.memory.pool.num_free == 60


@ONE
def test_stop_tokens_and_min_tokens(tiny) -> None:
    config, prompts, expected = tiny
    engine = WholeEngine(config)
    stop = expected[0][5]
    engine.submit(0, prompts[0], 20, stops=[stop])
    at = expected[0].index(stop)
    engine.submit(1, prompts[0], 20, Sampling(temperature=0.0, min_tokens=15), stops=[stop])
    engine.run()
    assert engine.text[0] == expected[0][: at + 1]
    assert engine.finish[0] == FinishReason.STOP
    assert stop not in engine.text[1][:15] and len(engine.text[1]) >= 15


@ONE
def test_a_seed_gives_the_same_text_whatever_else_runs(tiny) -> None:
    config, prompts, _ = tiny
    drawn = Sampling(temperature=0.9, top_p=0.95, seed=1234, presence_penalty=0.3)
    alone = WholeEngine(config)
    alone.submit(0, prompts[0], 20, drawn)
    alone.run()
    crowd = WholeEngine(config, pages=40, step_tokens=16, slots=5)
    for i, prompt in enumerate(prompts[1:], start=1):
        crowd.submit(i, prompt, 20, Sampling(temperature=1.5, seed=i))
    crowd.submit(0, prompts[0], 20, drawn)
    crowd.run()
    assert crowd.text[0] == alone.text[0]
    other = WholeEngine(config)
    other.submit(0, prompts[0], 20, replace(drawn, seed=4321))
    other.run()
    assert other.text[0] != alone.text[0]


@ONE
def test_a_mask_forbids_and_leaves_the_others_alone(tiny) -> None:
    config, prompts, expected = tiny
    engine = WholeEngine(config, step_tokens=32, slots=6)
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, 20, grammar="even" if i % 2 else "")
    engine.run()
    assert engine.num_masked == 5 * 20
    for i, text in enumerate(expected):
        if i % 2:
            assert engine.text[i] != text and all(token % 2 == 0 for token in engine.text[i])
        else:
            assert engine.text[i] == text
