"""The text is the same with drafts and without, for every option, in any batching."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from nanovllm.config import Config, Speculate
from nanovllm.wire import Abort, FinishReason, Sampling, TokenLogprobs
from tests.models.tiny import CASES, TOLD, config_of, make_tiny
from tests.whole_engine import GREEDY, WholeEngine, references

NGRAM = Speculate(method="ngram", tokens=3, min_match=1, max_match=4)
STEM = [5, 6, 7, 8, 9, 5, 6, 7]
PROMPTS = [[*STEM * count, count] for count in (1, 2, 3, 4, 1)]
PROMPTS += [[11] * 9, [3], [*range(20, 40)], [40, 41] * 8]
WISHES = {
    "greedy": GREEDY,
    "seeded": Sampling(temperature=0.7, seed=5),
    "penalties": Sampling(
        temperature=0.7, seed=6, repetition_penalty=0.8, presence_penalty=-1.5, frequency_penalty=-1
    ),
    "truncated": Sampling(temperature=0.9, seed=7, top_k=3, top_p=0.9, min_p=0.1),
    "few": Sampling(temperature=0.8, seed=7, allowed_tokens=[9, 11, 12], repetition_penalty=1.2),
    "biased": Sampling(temperature=0.5, seed=8, logit_bias={9: 40.0, 11: 39.0}),
    "late": Sampling(temperature=0.0, min_tokens=12),
    "bad words": Sampling(temperature=0.3, seed=9, bad_words=[[5, 6], [11]]),
    "logprobs": Sampling(temperature=0.7, seed=10, logprobs=3),
}
MAX_NEW = 40
# Feeds every draft, so that texts that seldom repeat themselves are compared with drafts, too.
EAGER = replace(NGRAM, adapt=False)


@pytest.fixture(scope="module", params=TOLD)
def config(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, list[list[int]]]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    family, overrides = CASES[request.param]
    model = make_tiny(folder, family, **overrides)
    return config_of(folder), references(model, PROMPTS, MAX_NEW)


def told(
    config: Config, wish: str, speculate: Speculate | None, stops: list[int], **sizes: object
) -> tuple[dict[int, list[int]], dict[int, FinishReason], dict[int, list[TokenLogprobs]], int]:
    engine = WholeEngine(config, speculate=speculate, **sizes)
    for i, prompt in enumerate(PROMPTS):
        grammar = "even" if i % 4 == 3 else ""
        engine.submit(i, prompt, MAX_NEW - 5 * (i % 3), WISHES[wish], stops, grammar)
        engine.loop.step()
    engine.run()
    return engine.text, engine.finish, engine.logprobs, engine.scheduler.stats().accepted_tokens


def check_batched(
    config: Config, wish: str, speculate: Speculate, abort: int, **sizes: int
) -> None:
    """Assert that a batch of drafting requests, one of them aborted, has the plain texts."""
    plain = told(config, wish, None, [7], step_tokens=64)[0]
    engine = WholeEngine(config, speculate=speculate, max_tokens=100, **sizes)
    for i, prompt in enumerate(PROMPTS):
        grammar = "even" if i % 4 == 3 else ""
        engine.submit(i, prompt, MAX_NEW - 5 * (i % 3), WISHES[wish], [7], grammar)
    for _ in range(6):
        engine.loop.step()
        engine.scheduler.check()
    engine.loop.handle(Abort(abort))
    engine.run()
    for i, text in plain.items():
        found = engine.text.get(i, [])
        assert found == text[: len(found)] if i == abort else found == text, i


@pytest.mark.parametrize(
    ("config", "wish"),
    [(TOLD[0], wish) for wish in WISHES]
    + [(case, wish) for case in TOLD[1:] for wish in ("greedy", "truncated", "logprobs")],
    indirect=["config"],
)
def test_drafts_change_no_text(config: tuple[Config, list[list[int]]], wish: str) -> None:
    for stops in ([], [7, 19, 151]) if wish == "greedy" else ([7, 19, 151],):
        plain = told(config[0], wish, None, stops, step_tokens=64)
        drafted = told(config[0], wish, EAGER, stops, step_tokens=64)
        assert drafted[:2] == plain[:2]
        assert drafted[3] > 0 == plain[3], "nothing was drafted"
        for name, entries in plain[2].items():
            for found, wanted in zip(drafted[2][name], entries, strict=True):
                assert found.token_id == wanted.token_id and found.top_ids == wanted.top_ids
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_greedy_text_is_the_references(config: tuple[Config, list[list[int]]]) -> None:
    engine = WholeEngine(config[0], speculate=NGRAM, step_tokens=32, slots=4)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(i, prompt, MAX_NEW)
    engine.run()
    assert [engine.text[i] for i in range(len(PROMPTS))] == config[1]
    stats = engine.scheduler.stats()
    assert stats.accepted_tokens == sum(stats.accepted_by_position) > 40
    assert stats.draft_tokens >= stats.accepted_tokens


# Attention to pages, and recurrent states, which a rejected draft must not change.
@pytest.mark.parametrize("config", [TOLD[0], TOLD[-1]], indirect=True)
@settings(max_examples=3, deadline=None)
@given(
    wish=st.sampled_from(list(WISHES)),
    pages=st.integers(30, 60),
    page_tokens=st.sampled_from([4, 8]),
    slots=st.integers(1, 8),
    step_tokens=st.integers(8, 80),
    depth=st.integers(0, 2),
    prefix=st.booleans(),
    tokens=st.integers(1, 7),
    min_match=st.integers(1, 3),
    abort=st.integers(0, len(PROMPTS) - 1),
)
def test_however_it_is_batched(
    config: tuple[Config, list[list[int]]],
    wish: str,
    tokens: int,
    min_match: int,
    abort: int,
    **sizes: int,
) -> None:
    speculate = Speculate(method="ngram", tokens=tokens, min_match=min_match, max_match=5)
    check_batched(config[0], wish, speculate, abort, **sizes)
