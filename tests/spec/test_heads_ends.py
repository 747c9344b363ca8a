"""Drafts of MTP at the ends of texts: first tokens, stop tokens, page borders, the longest context.

The text and the reason of its end are those without drafts, greedy and sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanovllm.config import Config, Speculate
from nanovllm.sched.scheduler import Scheduler
from nanovllm.wire import FinishReason, Sampling, TokenLogprobs
from tests.models.repeating import make_repeating
from tests.models.tiny import HYBRID, NEXT, V3, config_of
from tests.whole_engine import GREEDY, WholeEngine, prompts_of

PAGE_TOKENS, DRAFTS, MAX_NEW = 4, 3, 24
TWO_LAYERS = dict(num_hidden_layers=2, full_attention_interval=2)  # one of each kind
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": V3,
    "qwen3_next": {**NEXT, **TWO_LAYERS},
    "qwen3_5_text": {**HYBRID, **TWO_LAYERS},
}
SAMPLINGS = {"greedy": GREEDY, "seeded": Sampling(temperature=0.7, seed=4)}


class Ask(NamedTuple):
    prompt: list[int]
    max_new: int = MAX_NEW
    stops: tuple[int, ...] = ()


class Served(NamedTuple):
    text: dict[int, list[int]]
    finish: dict[int, FinishReason]
    accepted: int
    logprobs: dict[int, list[TokenLogprobs]]


@pytest.fixture(scope="module", params=FAMILIES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_repeating(folder, request.param, **FAMILIES[request.param])
    return config_of(folder)


def served(
    config: Config, asks: list[Ask], sampling: Sampling, tokens: int = DRAFTS, **sizes: Any
) -> Served:
    """Serve requests with up to `tokens` drafts of each row."""
    speculate = Speculate(method="mtp", tokens=tokens, adapt=False) if tokens else None
    engine = WholeEngine(config, speculate=speculate, page_tokens=PAGE_TOKENS, **sizes)
    for i, (prompt, max_new, stops) in enumerate(asks):
        engine.submit(i, prompt, max_new, sampling, stops)
        engine.loop.step()
    engine.run()
    accepted = engine.scheduler.stats().accepted_tokens
    return Served(engine.text, engine.finish, accepted, engine.logprobs)


def check(config: Config, asks: list[Ask], sampling: Sampling, **sizes: Any) -> Served:
    """Return what was served with drafts, which must be the same without drafts."""
    plain = served(config, asks, sampling, tokens=0, **sizes)
    found = served(config, asks, sampling, **sizes)
    assert (found.text, found.finish) == (plain.text, plain.finish)
    assert found.accepted > 0 == plain.accepted
    for name, entries in plain.logprobs.items():
        for one, other in zip(found.logprobs[name], entries, strict=True):
            assert (one.token_id, one.top_ids) == (other.token_id, other.top_ids)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    return found


class Cuts:
    """Rows of which a step accepted more tokens than the text kept: (accepted, kept)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[int, int]] = []
        append = Scheduler._append

        def recorded(scheduler: Scheduler, flight: Any, result: Any) -> Any:
            kept_R = append(scheduler, flight, result)
            counts_R = (result.tokens >= 0).sum(1)
            pairs = zip(counts_R.tolist(), kept_R.tolist(), strict=True)
            self.rows += [(count, kept) for count, kept in pairs if 0 < kept < count]
            return kept_R

        monkeypatch.setattr(Scheduler, "_append", recorded)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_prompts_of_a_few_tokens(config: Config, sampling: str) -> None:
    """The first pair of a head needs the first drawn token if the prompt has one token."""
    asks = [Ask([token] * count) for token in (3, 50, 199) for count in (1, 2, DRAFTS, DRAFTS + 1)]
    found = check(config, asks, SAMPLINGS[sampling])
    assert {len(text) for text in found.text.values()} == {MAX_NEW}
    assert found.accepted > 40


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("max_tokens", [36, 37])
def test_texts_that_end_at_the_longest_context(
    config: Config, max_tokens: int, sampling: str
) -> None:
    """Pages of 4 tokens end at 36, and drafts would be beyond the context.

    Prompts leave room for 1 to 12 tokens.
    """
    texts = prompts_of(2, 8)
    prompts = [(text * 9)[: max_tokens - room] for text in texts for room in (1, 2, 3, 4, 5, 12)]
    prompts += [[token] * (max_tokens - 6) for token in (8, 11)]
    asks = [Ask(prompt, max_tokens - len(prompt)) for prompt in prompts]
    found = check(config, asks, SAMPLINGS[sampling], max_tokens=max_tokens)
    assert {len(p) + len(found.text[i]) for i, p in enumerate(prompts)} == {max_tokens}
    assert set(found.finish.values()) == {FinishReason.LENGTH}


def test_texts_that_end_around_a_page_border(config: Config) -> None:
    """Texts of every length up to two pages after prompts that end within and at a border."""
    prompts = [text[:length] for text in prompts_of(2, 9) for length in (7, 8)]
    asks = [Ask(prompt, new) for prompt in prompts for new in range(1, 2 * PAGE_TOKENS + 1)]
    found = check(config, asks, GREEDY, slots=4)
    ends = {(len(ask.prompt) + len(found.text[i])) % PAGE_TOKENS for i, ask in enumerate(asks)}
    assert ends == {0, 1, 2, 3}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_stop_token_amid_accepted_drafts(
    config: Config, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts after it were right, and none of them is in the text."""
    prompts = prompts_of(8, 5)
    plain = served(config, [Ask(p) for p in prompts], SAMPLINGS[sampling], tokens=0).text
    asks, expected = [], []
    for i, prompt in enumerate(prompts):
        for at, token in enumerate(plain[i]):
            if plain[i].index(token) == at and at % 3 == 2:
                asks.append(Ask(prompt, stops=(token,)))
                expected.append(plain[i][: at + 1])
    cuts = Cuts(monkeypatch)
    found = check(config, asks, SAMPLINGS[sampling])
    assert list(map(found.text.get, range(len(asks)))) == expected
    assert set(found.finish.values()) == {FinishReason.STOP}
    assert len(cuts.rows) >= 2 and any(kept > 1 for _, kept in cuts.rows), cuts.rows


def test_logprobs_are_those_of_the_target(config: Config) -> None:
    """Another engine returned 0.0 for all, and another those of the drafts."""
    sampling = Sampling(temperature=0.6, seed=2, logprobs=3)
    found = check(config, [Ask(prompt) for prompt in prompts_of(4, 5)], sampling)
    values = [one.logprob for entries in found.logprobs.values() for one in entries]
    assert len(values) == 4 * MAX_NEW and min(values) < -0.05 and len(set(values)) > MAX_NEW


def test_a_prefix_hit_before_the_first_draft(config: Config) -> None:
    """Hits are those without drafts, and acceptance stays as it is."""
    prompt = prompts_of(1, 5)[0][:22]
    asks = [Ask([*prompt, tail], 16) for tail in (4, 4, 9)] * 4
    cached, rates = [], []
    for tokens in (0, DRAFTS):
        speculate = Speculate(method="mtp", tokens=tokens, adapt=False) if tokens else None
        engine = WholeEngine(config, speculate=speculate, page_tokens=PAGE_TOKENS)
        for i, ask in enumerate(asks):
            engine.submit(i, ask.prompt, ask.max_new)
            engine.run()
            stats = engine.scheduler.stats()
            rates.append((stats.accepted_tokens, stats.draft_tokens))
        cached.append(engine.cached)
    assert cached[0] == cached[1] and cached[0][5] >= 20
    drafted = rates[len(asks) :]
    (first, fed), (half, fed_by_half), (last, fed_by_all) = drafted[2], drafted[8], drafted[-1]
    early = (half - first) / (fed_by_half - fed)
    late = (last - half) / (fed_by_all - fed_by_half)
    assert late >= early > 0
