"""Complete engines with recurrent states: long texts, cache hits, preemption, drafts, ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

from nanovllm.config import Config, Speculate
from nanovllm.kv.hybrid import HybridMemory
from nanovllm.runner.resolved import resolve_config
from tests.engine.test_ranks import cut, ranked
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import WholeEngine, greedy_texts, prompts_of

NGRAM = Speculate(method="ngram", tokens=3, min_match=1, max_match=4)
HYBRID = [case for case in CASES if case.startswith("qwen3_next") and "1 value" not in case]
HYBRID += ["qwen3_5_text that repeats itself"]
# Cases for the laws of batches and memory: periods that end early, and texts with accepted drafts.
# The other cases differ in the numbers that a layer computes, which a single batch shows.
PERIODS = "qwen3_next 3 values a key, 3 layers a period, top 1"
REPEATS = "qwen3_5_text that repeats itself"
MAX_NEW = 60
FEW = 32  # tokens of a text where its length proves nothing
SURE = 1e-3  # transformers' two forms of a recurrence differ by 8e-4 in logits here
PlanMessage = tuple[Config, list[list[int]], list[list[int]]]


def long_prompts(model: PreTrainedModel) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts of 60 to 130 tokens, and their texts.

    Three share a prefix, and two are equal. They come from the first seed for which the model's
    choices are unambiguous.
    """
    for seed in range(1, 30):
        parts = [prompts_of(6, seed + i) for i in range(3)]
        prompts = [[*a, *b, *c][:130] for a, b, c in zip(*parts, strict=True)]
        prompts[3] = [*prompts[2][:50], *prompts[3][:40]]
        prompts[4] = [*prompts[2][:50], *prompts[4][:20]]
        texts, margins = zip(*greedy_texts(model, prompts, MAX_NEW), strict=True)
        if min(margins) > SURE:
            return [*prompts, prompts[0]], [*texts, texts[0]]
    raise AssertionError("no sure prompts")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PlanMessage]:
    """Return the config, prompts and texts of a case, computed once."""

    @cache
    def made(case: str) -> PlanMessage:
        folder: Path = tmp_path_factory.mktemp("tiny")
        family, overrides = CASES[case]
        layers = min(4, int(str(overrides["num_hidden_layers"])))  # one has 3 + 1 of them
        model = make_tiny(folder, family, **{**overrides, "num_hidden_layers": layers})
        return config_of(folder), *long_prompts(model)

    return made


@pytest.fixture(scope="module", params=HYBRID)
def told(request: pytest.FixtureRequest, texts: Callable[[str], PlanMessage]) -> PlanMessage:
    return texts(request.param)


def test_long_texts_are_the_references(told: PlanMessage) -> None:
    """Texts of over 150 tokens, prompts included, equal the reference in prefill and decode."""
    config, prompts, expected = told
    assert max(map(len, prompts)) + MAX_NEW > 180
    for sizes in (
        dict(step_tokens=512),
        dict(step_tokens=37, slots=3),
        dict(step_tokens=64, depth=2, slots=4),
    ):
        engine = WholeEngine(config, **sizes)
        counts = [FEW - 4 * i for i in range(len(prompts))]
        if sizes["step_tokens"] == 512:
            counts = [MAX_NEW] * len(prompts)
        for i, prompt in enumerate(prompts):
            engine.submit(i, prompt, counts[i])
        engine.run()
        for i, text in enumerate(expected):
            assert engine.text[i] == text[: counts[i]], i


@pytest.mark.parametrize("told", [PERIODS, REPEATS], indirect=True)
@settings(max_examples=3, deadline=None)
@given(
    pages=st.integers(50, 90),
    page_tokens=st.sampled_from([4, 16]),
    slots=st.integers(2, 7),
    step_tokens=st.integers(9, 140),
    depth=st.integers(0, 2),
    checkpoints=st.integers(0, 12),
    checkpoint_fraction=st.sampled_from([0.25, 0.0]),
    host_gib=st.sampled_from([0.0, 0.01]),
    drafts=st.booleans(),
    order=st.permutations(range(7)),
)
def test_however_it_is_batched(
    told: PlanMessage, drafts: bool, pages: int, page_tokens: int, order: list[int], **sizes: int
) -> None:
    config, prompts, expected = told
    counts = range(20, 6, -2)
    engine = WholeEngine(
        config,
        pages=pages * 4 // page_tokens + 2,
        page_tokens=page_tokens,
        speculate=NGRAM if drafts else None,
        **sizes,
    )
    for turn in range(2):
        for i in order:
            engine.submit(10 * turn + i, prompts[i], counts[i])
            if turn:
                engine.loop.step()
                engine.scheduler.check()
        engine.run()
    for name, text in engine.text.items():
        assert text == expected[name % 10][: counts[name % 10]], name


@pytest.mark.parametrize("told", [PERIODS, REPEATS], indirect=True)
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_next_turn_goes_on_from_what_was_saved_while_text_grew(
    told: PlanMessage, drafts: bool, depth: int
) -> None:
    """A next turn reuses states saved during decoding.

    With drafts the states are older than the text, so none are saved.
    """
    config, prompts, expected = told
    engine = WholeEngine(config, checkpoints=40, depth=depth, speculate=NGRAM if drafts else None)
    assert isinstance(engine.memory, HybridMemory)
    engine.memory.every = 8
    saved, apply = [], engine.runner.states.apply

    def counted(plan) -> None:
        saved.extend(plan.saves)
        apply(plan)

    engine.runner.states.apply = counted
    for i, prompt in enumerate(prompts[:4]):
        engine.submit(i, prompt, FEW - 10)
    engine.run()
    for i, prompt in enumerate(prompts[:4]):
        engine.submit(10 + i, prompt + engine.text[i], 10)
    engine.run()
    for i in range(4):
        assert engine.text[i] + engine.text[10 + i] == expected[i][:FEW]
    assert not saved if drafts else len(saved) >= 4 and engine.cached[10] > len(prompts[0])


@pytest.mark.parametrize(
    ("told", "pages", "checkpoints", "drafts"),
    [(PERIODS, 75, 4, False), (REPEATS, 200, 2, True)],
    indirect=["told"],
)
def test_text_is_the_same_with_checkpoints_in_the_hosts_memory(
    told: PlanMessage, pages: int, checkpoints: int, drafts: bool
) -> None:
    """Checkpoints in host memory change neither text nor cache hits.

    There are few pages, so that requests are preempted, and few places, so that states are evicted.
    """
    config, prompts, expected = told
    count = MAX_NEW if drafts else FEW  # with drafts few states are saved
    found = []
    states = checkpoints * resolve_config(config).layout.bytes_per_state
    for gib in (0.0, states / 2**30):  # no pages in host memory
        engine = WholeEngine(
            config, pages=pages, slots=6, step_tokens=48, checkpoints=checkpoints,
            checkpoint_fraction=0.0, host_gib=gib, speculate=NGRAM if drafts else None,
        )  # fmt: skip
        for turn in range(2):
            for i, prompt in enumerate(prompts):
                engine.submit(10 * turn + i, prompt, count)
                engine.loop.step()
            engine.run()
        for name, text in engine.text.items():
            assert text == expected[name % 10][:count], name
        stats = engine.scheduler.stats()
        events = stats.checkpoint_events
        assert min(events["saved"], events["restored"], sum(engine.cached.values())) > 0
        assert stats.num_preemptions > 0 if pages < 100 else events["evicted"] > 0
        assert engine.scheduler.stats().tiers == {}
        assert engine.runner.states.saved_NX.abs().amax(1).min() > 0  # each place was used
        found.append((engine.cached, events))
    assert found[0] == found[1]


@pytest.mark.parametrize("told", [PERIODS, REPEATS], indirect=True)
def test_once_a_fork_is_known_a_prompt_computes_its_last_page(told: PlanMessage) -> None:
    config, prompts, expected = told
    engine = WholeEngine(config, page_tokens=4, checkpoints=8)
    for turn in range(3):
        engine.submit(turn, prompts[0], FEW)
        engine.run()
    assert engine.text[2] == engine.text[1] == engine.text[0] == expected[0][:FEW]
    assert engine.cached[2] >= len(prompts[0]) - 1 - 4


@pytest.mark.parametrize(("case", "tp", "ep"), [("qwen3_5_text", 2, 1), ("qwen3_next", 2, 2)])
def test_two_ranks_go_on_from_long_prompts_with_drafts(
    case: str, tp: int, ep: int, tmp_path: Path
) -> None:
    family, overrides = CASES[f"{case} that repeats itself"]
    model = make_tiny(tmp_path, family, **{**overrides, "num_experts": 6})
    prompts, expected = long_prompts(model)
    sizes = dict(pages=80, slots=5, step_tokens=64, checkpoints=8, speculate=NGRAM)
    sizes |= dict(checkpoint_fraction=0.0, host_gib=0.01)
    config = cut(config_of(tmp_path), tp, ep)
    with ranked(config, tp, tmp_path, **sizes) as engine:
        for i, prompt in enumerate(prompts):
            engine.submit(i, prompt, FEW)
        engine.run()
        states = engine.runner.states.rows_NX
        assert torch.isfinite(states).all() and states.abs().max() > 0
    assert [engine.text[i] for i in range(len(prompts))] == [text[:FEW] for text in expected]
