"""A small model that drafts: the text is the same without it, and its drafts are the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from nanovllm.config import DEMO, Config, Speculate, load_config
from nanovllm.wire import Sampling
from tests.end_to_end.test_speculation import PROMPTS, WISHES, check_batched, told
from tests.models.tiny import CASES, config_of, make_tiny
from tests.whole_engine import GREEDY, WholeEngine, greedy_texts, prompts_of, reference

HOT = Sampling(temperature=1.0, seed=3)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QUESTIONS = (
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "Write a poem about the sea.",
    "Explain how rain forms.",
    "Give me advice on learning to cook.",
    "List three animals that live in the forest.",
)


def drafting(model: Path | str, tokens: int = 3, **keys: object) -> Speculate:
    return Speculate(method="draft_model", model=str(model), tokens=tokens, **keys)


@pytest.fixture(scope="module")
def demo() -> Config:
    return load_config(None, ["device=cpu"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path, Path]:
    """Return a model, its folder, and that of a model which often agrees: a noisy copy."""
    own, noisy = (tmp_path_factory.mktemp(name) for name in ("own", "noisy"))
    model = make_tiny(own, CASES["qwen3"][0])
    for parameter in model.parameters():
        parameter.data *= 1 + 0.1 * torch.randn_like(parameter)
    model.save_pretrained(noisy)
    return config_of(own), own, noisy


def texts(
    config: Config, speculate: Speculate | None, sampling: Sampling, **sizes: object
) -> tuple[dict[int, list[int]], WholeEngine]:
    engine = WholeEngine(config, speculate=speculate, **sizes)
    for i, prompt in enumerate(prompts_of(6, 3)):
        engine.submit(i, prompt, 40, sampling)
    engine.run()
    return engine.text, engine


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("step_tokens", [16, 64])
def test_all_drafts_of_the_target_itself_are_accepted(demo, sampling, step_tokens) -> None:
    plain = texts(demo, None, sampling)[0]
    sizes = {"page_tokens": 64, "step_tokens": step_tokens}
    found, engine = texts(demo, drafting(DEMO), sampling, **sizes)
    stats = engine.scheduler.stats()
    assert found == plain
    assert stats.accepted_tokens == stats.draft_tokens > 150


def test_the_demo_s_own_draft_model_drafts(demo: Config) -> None:
    """It accepts most drafts of the first place, and fewer of each later one."""
    plain = texts(demo, None, GREEDY)[0]
    speculate = Speculate(method="draft_model", tokens=3)
    found, engine = texts(demo, speculate, GREEDY, page_tokens=64)
    stats = engine.scheduler.stats()
    assert found == plain
    first, second, third = stats.accepted_by_position
    assert stats.num_drafts > first > second > third > 0.4 * stats.num_drafts


def test_drafts_by_the_target_s_noise_are_accepted_more_often(demo: Config) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    prompts = [tokenizer.encode(CHAT.format(question)).ids for question in QUESTIONS]
    shares, found = {}, {}
    for by in ("shared", "argmax"):
        speculate = drafting(DEMO / "draft", 1, drafts_by=by, adapt=False)
        engine = WholeEngine(demo, speculate=speculate, page_tokens=64)
        for i, prompt in enumerate(2 * prompts):
            engine.submit(i, prompt, 60, Sampling(temperature=1.5, seed=i))
        engine.run()
        found[by], stats = engine.text, engine.scheduler.stats()
        shares[by] = stats.accepted_tokens / stats.draft_tokens
    assert found["shared"] == found["argmax"]
    assert shares["shared"] > shares["argmax"] + 0.02


@pytest.mark.parametrize("step_tokens", [7, 64])
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_keys_and_drafts_are_those_of_the_whole_text_at_once(
    tiny: tuple[Config, Path, Path], num_prompts: int, step_tokens: int
) -> None:
    """After accepted and rejected drafts, the draft model's keys equal those of a prefill.

    The last drafts are what transformers generates with the same model.
    """
    config, _, noisy = tiny
    model = AutoModelForCausalLM.from_pretrained(noisy).float().eval()
    sizes = {"page_tokens": 4, "step_tokens": step_tokens, "prefix": False}
    speculate = drafting(noisy, adapt=False)
    drafted = WholeEngine(config, speculate=speculate, **sizes)
    fresh = WholeEngine(config, speculate=speculate, page_tokens=4, prefix=False)
    for i, prompt in enumerate(PROMPTS[:num_prompts]):
        drafted.submit(i, prompt, 40)
    drafted.run()
    stats = drafted.scheduler.stats()
    assert 0 < stats.accepted_tokens < 0.9 * stats.draft_tokens
    for i, prompt in enumerate(PROMPTS[:num_prompts]):
        text = prompt + drafted.text[i]
        fresh.submit(i, text[:-1], 1)
        fresh.run()
        slots = drafted.runner.slots
        same_N = (slots.tokens_NL[:, : len(text)] == torch.tensor(text)).all(1)
        row = int(same_N.nonzero()[0])
        found = draft_keys(drafted, row, len(text) - 1)
        torch.testing.assert_close(found, draft_keys(fresh, 0, len(text) - 1))
        known = slots.tokens_NL[row, : int(slots.lengths_N[row]) + 1].tolist()
        ahead = slots.tokens_NL[row, len(known) : len(known) + 3].tolist()
        assert ahead == reference(model, known, 3)


@pytest.mark.parametrize("tokens", [1, 3])
def test_each_step_accepts_the_drafts_that_transformers_would_propose(
    tiny: tuple[Config, Path, Path], tokens: int
) -> None:
    config, _, noisy = tiny
    model = AutoModelForCausalLM.from_pretrained(noisy).float().eval()
    speculate = drafting(noisy, tokens, adapt=False)
    engine = WholeEngine(config, speculate=speculate, page_tokens=16, depth=0)
    prompt, count = PROMPTS[1], 40
    engine.submit(0, prompt, count)
    engine.run()
    text = prompt + engine.text[0]
    accepted, at = [0] * tokens, len(prompt)
    while at + 1 < len(text):
        room = min(tokens, len(text) - at - 2)
        drafts = greedy_texts(model, [text[: at + 1]], room)[0][0] if room else []
        while drafts and drafts[0] == text[at + 1]:
            accepted[room - len(drafts)] += 1
            at, drafts = at + 1, drafts[1:]
        at += 1
    assert engine.scheduler.stats().accepted_by_position == accepted
    assert 0 < sum(accepted) < count / 2


def draft_keys(engine: WholeEngine, row: int, count: int) -> torch.Tensor:
    """Return the keys of the draft model's layers for the first tokens of a slot."""
    keys_LPSGA = engine.runner.caches.tensors[2]
    pages_M = engine.runner.slots.pages_NM[row].long()
    return keys_LPSGA[:, pages_M].flatten(1, 2)[:, :count]


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("same", [False, True])
def test_drafts_change_no_text(tiny: tuple[Config, Path, Path], wish: str, same: bool) -> None:
    config, own, noisy = tiny
    plain = told(config, wish, None, [7, 19, 151], step_tokens=64)
    speculate = drafting(own if same else noisy)
    drafted = told(config, wish, speculate, [7, 19, 151], step_tokens=64)
    assert drafted[:2] == plain[:2]
    assert drafted[3] > 0 or wish == "few", "no draft was accepted"
    assert drafted[3] > 100 or not same or wish not in ("greedy", "seeded", "logprobs")
    for name, entries in plain[2].items():
        for found, wanted in zip(drafted[2][name], entries, strict=True):
            assert found.token_id == wanted.token_id and found.top_ids == wanted.top_ids
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)


@settings(max_examples=4, deadline=None)
@given(
    wish=st.sampled_from(list(WISHES)),
    same=st.booleans(),
    pages=st.integers(30, 60),
    page_tokens=st.sampled_from([4, 8]),
    slots=st.integers(1, 8),
    step_tokens=st.integers(8, 80),
    depth=st.integers(0, 2),
    prefix=st.booleans(),
    tokens=st.integers(1, 7),
    abort=st.integers(0, len(PROMPTS) - 1),
)
def test_however_it_is_batched(
    tiny: tuple[Config, Path, Path],
    wish: str,
    same: bool,
    tokens: int,
    abort: int,
    **sizes: int,
) -> None:
    config, own, noisy = tiny
    speculate = drafting(own if same else noisy, tokens)
    check_batched(config, wish, speculate, abort, **sizes)
