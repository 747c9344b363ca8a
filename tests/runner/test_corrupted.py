"""NaN logits, and cleaning and copying of pages: the device side, without a scheduler.

tests/runner/plans.py sends the plans of a scheduler. tests/end_to_end/test_corrupted.py includes
the scheduler.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.sampling import reference as sampling_reference

from nanovllm.config import Config
from nanovllm.kv.layout import CacheLayout, PagedGroup
from nanovllm.plan import CORRUPTED, Chunk, StepPlan
from nanovllm.runner import caches
from nanovllm.runner.caches import make_caches
from nanovllm.runner.runner import Runner
from nanovllm.wire import Sampling
from tests.models.corrupted import POISON, VALUES, poisoned, runner_of
from tests.runner.plans import Plans, admit

A, B, C = [11, 3, 150, 42, 9, 77], [5, 20, POISON, 31, 2], [60, 61, 62]
EVERY_EVEN = np.full(-(-200 // 32), 0x55555555, np.int32)
WISHES = {
    "greedy": Sampling(temperature=0.0),
    "drawn": Sampling(temperature=1.0, seed=3),
    "truncated": Sampling(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01),
    "penalised": Sampling(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5),
    "biased": Sampling(temperature=0.0, logit_bias={1: 5.0, 2: -100.0}, bad_words=[[3], [4, 5]]),
    "logprobs": Sampling(temperature=0.0, logprobs=3),
}


@pytest.fixture(scope="module", params=VALUES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return poisoned(tmp_path_factory.mktemp(request.param), VALUES[request.param])


@pytest.fixture
def runner(config: Config) -> Runner:
    return runner_of(config)


def solo(config: Config, prompt: list[int], count: int) -> list[int]:
    pages = [1, 2, 3, 4, 5]
    text = Plans(runner_of(config)).text(0, prompt, pages, count)
    assert CORRUPTED not in text
    return text


def test_both_packages_mean_the_same() -> None:
    assert sampling_reference.CORRUPTED == CORRUPTED


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("wishes", WISHES)
def test_a_corrupted_row_is_told_and_its_neighbours_are_as_alone(
    config: Config, runner: Runner, wishes: str, masked: bool
) -> None:
    plans, asked = Plans(runner), Sampling(temperature=0.0, logprobs=1)
    masks = {1: EVERY_EVEN} if masked else {}
    admits = [
        admit(0, A, [1, 2, 3], 0, asked),
        admit(1, B, [4, 5, 6], 0, WISHES[wishes]),
        admit(2, C, [7, 8, 9], 0, asked),
    ]
    steps = [plans.step(admits, (), {0: len(A), 1: len(B), 2: len(C)}, masks=masks)]
    for _ in range(4):
        assert plans.result is not None
        assert sorted({entry.row for entry in plans.result.logprobs}) == [0, 2]
        # A step is in flight, so it still has the corrupted row.
        steps.append(plans.step((), [0, 1, 2], masks=masks))
    assert [step[1] for step in steps] == [CORRUPTED] * 5
    assert [step[0] for step in steps] == solo(config, A, 5)
    assert [step[2] for step in steps] == solo(config, C, 5)
    fed = runner.slots.tokens_NL[1, : len(B) + 5].tolist()
    assert fed == [*B, 0, 0, 0, 0, 0]
    assert runner.slots.tokens_NL.min() == 0


def test_nan_of_an_early_chunk_is_told_where_the_prompt_ends(runner: Runner) -> None:
    plans = Plans(runner)
    prompt = [POISON, *range(20, 31)]
    assert plans.step([admit(3, prompt, [1, 2, 3, 4])], (), {3: 5}, partial=[3]) == {}
    assert plans.step((), (), {3: 4}, partial=[3]) == {}
    assert plans.step((), (), {3: 3}) == {3: CORRUPTED}


def test_pages_that_were_cleaned_are_as_on_the_first_day(config: Config, runner: Runner) -> None:
    """`num_cached` makes attention read cells that were not written after cleaning."""
    pages, prompt = [4, 5, 6], [*range(30, 39)]
    expected = Plans(runner_of(config)).text(0, prompt, pages, 3, num_cached=6)
    plans = Plans(runner)
    assert plans.text(0, B, pages, 4) == [CORRUPTED] * 4
    assert plans.text(1, prompt, pages, 3, num_cached=6) == [CORRUPTED] * 3  # not cleaned
    others = [stored[:, [1, 7]].clone().fill_(2.0) for stored in runner.caches.tensors]
    for stored, other in zip(runner.caches.tensors, others, strict=True):
        stored[:, [1, 7]] = other
    assert plans.text(2, prompt, pages, 3, num_cached=6, clean=[6, 4, 5]) == expected
    for stored, other in zip(runner.caches.tensors, others, strict=True):
        assert torch.equal(stored[:, [1, 7]], other)
        assert stored.isfinite().all()


@pytest.mark.parametrize("shared", [1, 4, 5, 7, 8, 9])
def test_a_copied_page_carries_a_prompt_on_from_any_token(
    config: Config, runner: Runner, shared: int
) -> None:
    """Two prompts have a common start. The second continues inside the last page of the first."""
    plans = Plans(runner)
    first, second = [*range(100, 111)], [*range(100, 100 + shared), 50, 51, 52, 53, 54]
    tokens = {0: [plans.step([admit(0, first, [1, 2, 3, 4])], (), {0: 11})[0]], 1: []}
    whole, cut = divmod(shared, 4)
    pages = [*[1, 2, 3][:whole], 10, 11, 12, 13]
    copies = [([1, 2, 3][whole], 10)] if cut else []
    follower = admit(1, second, pages, num_cached=shared)
    # Chunks of the second prompt also end inside pages.
    step = plans.step([follower], [0], {1: 2}, partial=[1], copies=copies)
    tokens[0].append(step[0])
    for chunks in ({1: 3}, {}, {}):
        step = plans.step((), [0] if chunks else [0, 1], chunks)
        for slot, token in step.items():
            tokens[slot].append(token)
    assert tokens[0] == solo(config, first, 5)
    assert tokens[1] == solo(config, second, 3)


def test_what_is_copied_is_what_was_there_before_the_step_but_for_what_was_cleaned() -> None:
    layout = CacheLayout((PagedGroup((0, 2), 2, 4, 3, 4), PagedGroup((1,), 1, 8, 8, 4)))
    found = make_caches(layout, 5, 2, torch.float32, torch.device("cpu"))
    for stored in found.tensors:
        stored[:] = torch.arange(6.0)[:, None, None, None]
    plan = plan_with(clean=[1, 4], copies=[(2, 3), (3, 2), (4, 5)])
    found.apply(plan)
    for layer in found.by_layer.values():
        for pages_PSGA in (layer.k_PSGA, layer.v_PSGA):
            assert pages_PSGA.is_contiguous() and pages_PSGA.shape[:2] == (6, 2)
            assert pages_PSGA[:, 1, 0, -1].tolist() == [0, 0, 3, 2, 0, 0]
    assert {at: cache.v_PSGA.shape[2:] for at, cache in found.by_layer.items()} == {
        0: (2, 3),
        1: (1, 8),
        2: (2, 3),
    }
    assert len(found.tensors) == 4  # keys and values of two groups, not of each layer


def test_a_step_without_pages_to_clean_or_copy_does_nothing_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was sent")

    monkeypatch.setattr(caches, "upload_together", refuse)
    layout = CacheLayout((PagedGroup((0,), 1, 8, 8, 4),))
    found = make_caches(layout, 5, 2, torch.float32, torch.device("cpu"))
    found.apply(plan_with())
    with pytest.raises(AssertionError, match="something was sent"):
        found.apply(plan_with(clean=[1]))


def plan_with(**fields: object) -> StepPlan:
    chosen = {"admits": [], "chunks": [], **fields}
    return StepPlan(
        step=1, grants=[], num_decodes=0, decodes=b"", max_length=8, masked=[], **chosen
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"drafts": np.array([0, 2], np.int32).tobytes()}, "rows of 2 drafts, not 0"),
        ({"chunks": [Chunk(0, 1, True), Chunk(1, 1, True, save_to=0)]}, "recurrent states"),
        ({"admits": [replace(admit(0, A, [1, 2]), restore_from=2)]}, "recurrent states"),
    ],
)
def test_what_a_runner_cannot_do_is_refused(
    runner: Runner, asked: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"plan 1 has {reason}"):
        runner.launch(plan_with(**asked))
