"""A runner with rows of 1 + d tokens, driven by hand: drafts never change the drawn tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.runner import results
from nanovllm.runner.batch import BatchPrep, Slots
from nanovllm.runner.runner import Runner
from nanovllm.sampling.sampler import Sampler
from nanovllm.spec.base import DraftStep
from nanovllm.wire import Sampling
from tests.runner.plans import Plans, admit
from tests.runner.tape import capture_on_tapes
from tests.whole_engine import small_demo

SLOTS, DRAFTS, COUNT = 4, 3, 24
PROMPTS = [[5, 9, 5, 9, 5], [7] * 11, [3, 1, 4, 1, 5, 9, 2, 6], [100, 200, 300]]
WISHES = {
    "greedy": Sampling(temperature=0.0),
    "seeded": Sampling(temperature=1.0, seed=5),
    "penalties": Sampling(
        temperature=0.8, seed=6, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "truncated": Sampling(temperature=1.3, seed=7, top_k=20, top_p=0.9, min_p=0.01),
    "biased": Sampling(temperature=1.0, seed=8, logit_bias={7: 5.0, 9: -5.0}),
    "bad words": Sampling(temperature=1.0, seed=9, bad_words=[[5, 9], [7]]),
    "logprobs": Sampling(temperature=1.0, seed=10, logprobs=3),
}


class Oracle:
    """Implementation of spec.base.Drafter. Its drafts are wrong at every `wrong`-th position."""

    num_drafts = DRAFTS
    accept = None

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong
        self.texts: dict[int, list[int]] = {}

    def propose(self, step: DraftStep) -> Tensor:
        drafts = []
        for slot in step.slots_R.tolist():
            at = int(step.lengths_N[slot]) + 1
            text = self.texts.get(slot, [])
            guess = [
                (text[i] if i < len(text) else 0) + (i % self.wrong == 0)
                for i in range(at, at + DRAFTS)
            ]
            if slot in self.texts:
                step.tokens_NL[slot, at : at + DRAFTS] = torch.tensor(guess, dtype=torch.int32)
            drafts.append([DRAFTS, *guess])
        return torch.tensor(drafts, dtype=torch.int32)


@pytest.fixture(scope="module")
def runner() -> Runner:
    """Return a runner with room for drafts. Each test replaces its drafter."""
    runner = small_demo(SLOTS).runner
    slots = Slots(SLOTS, runner.slots.max_tokens, 8, runner.device, DRAFTS)
    sampler = Sampler(
        num_slots=SLOTS,
        shard=runner.sampler.shard,
        device=runner.device,
        tokens_NL=slots.tokens_NL,
        prompt_lengths_N=slots.prompt_lengths_N,
        kernel="torch",
    )
    prep, caches = BatchPrep(slots, "torch"), runner.caches
    return Runner(runner.model, prep, sampler, caches, runner.backend, Oracle(1))


def pages_of(slot: int) -> list[int]:
    return list(range(1 + 10 * slot, 11 + 10 * slot))


def alone(runner: Runner, slot: int, sampling: Sampling) -> list[int]:
    plans = Plans(runner)
    first = admit(slot, PROMPTS[slot], pages_of(slot), sampling=sampling)
    tokens = [plans.step([first], (), {slot: len(PROMPTS[slot])})[slot]]
    while len(tokens) < COUNT:
        tokens.append(plans.step((), [slot])[slot])
    return tokens


@pytest.fixture(scope="module", params=WISHES)
def plain(request: pytest.FixtureRequest, runner: Runner) -> tuple[str, list[list[int]]]:
    """Return the name of a wish, and the texts without drafts of all slots."""
    wish = request.param
    return wish, [alone(runner, slot, WISHES[wish]) for slot in range(SLOTS)]


@pytest.mark.parametrize("wrong", [1, 2, 3, 1000])
def test_ragged_drafts_never_change_what_is_drawn(
    runner: Runner,
    plain: tuple[str, list[list[int]]],
    wrong: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wish, texts = plain
    oracle = Oracle(wrong)
    monkeypatch.setattr(runner, "drafter", oracle)
    oracle.texts = {s: PROMPTS[s] + texts[s] for s in range(SLOTS)}
    plans = Plans(runner)
    rng = np.random.default_rng(wrong)
    found: list[list[int]] = [[] for _ in range(SLOTS)]
    lengths = [[] for _ in range(SLOTS)]
    while min(map(len, found)) < COUNT - 1 - DRAFTS:
        going = [s for s in range(SLOTS) if len(found[s]) < COUNT - 1 - DRAFTS]
        begun = [s for s in going if found[s]]
        new = [s for s in going if not found[s]][:1]  # one per step, next to decode rows
        admits = [admit(s, PROMPTS[s], pages_of(s), sampling=WISHES[wish]) for s in new]
        drafts = rng.integers(0, 1 + DRAFTS, len(begun))
        plans.step(admits, begun, {s: len(PROMPTS[s]) for s in new}, drafts=drafts)
        for slot, line in plans.lines.items():
            found[slot] += line
            lengths[slot].append(len(line))
    for slot in range(SLOTS):
        assert found[slot] == texts[slot][: len(found[slot])]
    longest = max(map(max, lengths))
    assert longest == {1: 1, 2: 2, 3: 3, 1000: 1 + DRAFTS}[wrong]


def test_drafts_beside_a_chunk_are_replayed_piecewise(runner: Runner) -> None:
    """A step samples more tokens than it has slots."""
    capture_on_tapes(runner, [32])
    plans = Plans(runner)
    begun = [0, 1, 2]
    for slot in begun:
        plans.step([admit(slot, PROMPTS[slot], pages_of(slot))], (), {slot: len(PROMPTS[slot])})
    before = runner.steps_by_mode["PIECEWISE/mixed"]
    plans.step([admit(3, PROMPTS[3], pages_of(3))], begun, {3: 3}, drafts=[DRAFTS] * 3)
    assert runner.steps_by_mode["PIECEWISE/mixed"] == before + 1
    assert plans.result is not None and plans.result.drafts is not None
    assert plans.result.drafts.shape == (4, 1 + DRAFTS)
    runner.graphs.plain.mixed.captured.clear()
    for slot in begun:
        tokens = alone(runner, slot, WISHES["greedy"])
        assert plans.lines[slot] == tokens[1 : 1 + len(plans.lines[slot])] != []
    assert plans.lines[3] == alone(runner, 3, WISHES["greedy"])[:1]


def test_a_step_that_proposes_nothing_looks_nothing_up(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafter does not run, and one tensor is copied to the host instead of two."""
    oracle, counts = Oracle(1), Counter[str]()

    def counted(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: object) -> Tensor:
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(oracle, "propose", counted("lookups", oracle.propose))
    monkeypatch.setattr(runner, "drafter", oracle)
    monkeypatch.setattr(results, "to_host", counted("copies", results.to_host))
    plans, found = Plans(runner), []
    for number in range(COUNT):
        proposes = number % 8 == 0
        before = counts.copy()
        if number:
            plans.step((), [0], proposes=proposes)
        else:
            plans.step([admit(0, PROMPTS[0], pages_of(0))], (), {0: len(PROMPTS[0])})
        assert counts - before == Counter(copies=1 + proposes, lookups=int(proposes))
        assert plans.result is not None and (plans.result.drafts is not None) == proposes
        found += plans.lines[0]
    assert counts["lookups"] == 3
    assert found == alone(runner, 0, WISHES["greedy"])
