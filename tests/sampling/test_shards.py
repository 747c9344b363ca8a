"""Ranks with shards of the logits' columns sample the same as one rank, bit for bit."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm.parallel.mesh import Mesh
from nanovllm.plan import CORRUPTED
from nanovllm.sampling import logprobs, truncate
from nanovllm.sampling.base import Sampled
from nanovllm.sampling.shards import Shard
from nanovllm.wire import Sampling
from tests.parallel.test_mesh import Meeting, ThreadMesh
from tests.sampling.test_sampler import VOCAB, Asked, Bench, asking, batches, one

SIZES = (2, 3, 4)  # 3 blocks over 2, 3 and 4 ranks: 2 and 1, one each, and a copy for each
WISHES = {
    "greedy": Sampling(temperature=0.0),
    "seeded": Sampling(seed=3),
    "cold": Sampling(temperature=1e-3, seed=3),
    "top_k": Sampling(top_k=20, seed=4),
    "top_p": Sampling(top_p=0.7, seed=4),
    "min_p": Sampling(min_p=0.05, seed=4),
    "repetition": Sampling(repetition_penalty=1.5, seed=5),
    "presence": Sampling(presence_penalty=1.5, seed=5),
    "frequency": Sampling(frequency_penalty=0.9, seed=5),
    "logit_bias": Sampling(logit_bias={7: 3.0, 4100: 9.0, VOCAB - 1: -5.0}, seed=5),
    "allowed": Sampling(allowed_tokens=[7, 4100, 4101, VOCAB - 1], seed=5),
    "allowed_by_one": Sampling(allowed_tokens=[7, 8], top_p=0.9, seed=5),
    "bad_words": Sampling(bad_words=[[5], [4099], [VOCAB - 1]], seed=5),
    "min_tokens": Sampling(min_tokens=30, seed=5),
    "logprobs": Sampling(logprobs=5, seed=6),
}


def together(
    requests: dict[int, Asked], size: int, masks: np.ndarray | None = None
) -> list[Sampled]:
    """Return the samples of each of `size` ranks."""
    meeting = Meeting(size)
    benches = [Bench(mesh=ThreadMesh(rank, size, meeting)) for rank in range(size)]
    for bench in benches:
        bench.admit(requests)

    def sample(bench: Bench) -> Sampled:
        logits_SV, rows = bench.step(requests)
        span = bench.sampler.shard.span
        mine_SV = logits_SV[:, span.start : span.start + span.count].clone()
        if masks is not None:
            bench.sampler.apply_mask(mine_SV, list(range(len(requests))), masks)
        before_SV = mine_SV.clone()
        sampled = bench.sampler.sample(mine_SV, rows)
        assert (
            torch.equal(
                mine_SV,
                before_SV,
            )
            or mine_SV.isnan().any()
        )
        return sampled

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(sample, benches))


def assert_equal(found: Sampled, expected: Sampled) -> None:
    assert found.tokens_S.tolist() == expected.tokens_S.tolist()
    if expected.logprobs is None:
        assert found.logprobs is None
        return
    assert found.logprobs is not None
    assert (found.logprobs.at, found.logprobs.counts) == (
        expected.logprobs.at,
        expected.logprobs.counts,
    )
    for name in ("chosen_W", "top_ids_WK", "top_logprobs_WK"):
        assert torch.equal(getattr(found.logprobs, name), getattr(expected.logprobs, name))


def asked_for(sampling: Sampling, seed: int, stop: int = 9) -> Asked:
    return asking(np.random.default_rng((seed, stop)), sampling)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wish", WISHES)
def test_each_feature_by_itself(wish: str, size: int) -> None:
    requests = {slot: asked_for(WISHES[wish], slot) for slot in range(5)}
    (expected,) = together(requests, 1)
    for found in together(requests, size):
        assert_equal(found, expected)


@settings(deadline=None, max_examples=25)
@given(requests=batches(), size=st.sampled_from(SIZES), masked=st.booleans(), data=st.data())
def test_all_features_together(requests, size, masked, data) -> None:
    masks = None
    if masked:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        shape = len(requests), -(-VOCAB // 32)
        masks = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    (expected,) = together(requests, 1, masks)
    for found in together(requests, size, masks):
        assert_equal(found, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("token", [3, 4095, 4096, VOCAB - 1])
def test_a_mask_leaves_one_token_of_any_rank(token: int, size: int) -> None:
    masks = np.zeros((2, -(-VOCAB // 32)), np.int32)
    masks.view(np.uint32)[:, token // 32] = 1 << token % 32
    requests = {0: asked_for(Sampling(seed=1), 0), 1: asked_for(Sampling(temperature=0.0), 1)}
    for found in together(requests, size, masks):
        assert found.tokens_S.tolist() == [token, token]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("token", [3, 4095, 4096, VOCAB - 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_number_of_any_rank_corrupts_its_row_alone(
    value: float, token: int, size: int
) -> None:
    wishes = (Sampling(seed=1), Sampling(temperature=0.0), Sampling(seed=2, top_p=0.9, logprobs=2))
    requests = {slot: asked_for(wish, slot) for slot, wish in enumerate(wishes * 2)}
    (fine,) = together(requests, 1)
    for slot in range(3):
        requests[slot].logits[token] = value
    for found in together(requests, size):
        assert found.tokens_S.tolist() == [CORRUPTED] * 3 + fine.tokens_S.tolist()[3:]


@pytest.mark.parametrize("size", SIZES)
def test_nothing_possible_is_corrupted_and_a_rank_without_anything_is_not(size: int) -> None:
    requests = {slot: asked_for(Sampling(seed=1), slot) for slot in range(3)}
    requests[0].logits[:] = -math.inf
    requests[1].logits[:4096] = -math.inf
    requests[2].logits[2048:] = -math.inf
    for found in together(requests, size):
        nothing, last, first = found.tokens_S.tolist()
        assert nothing == CORRUPTED and last >= 4096 and 0 <= first < 2048


@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_first_of_equal_logits_of_all_ranks(size: int) -> None:
    requests = {0: one({4999: 3.0, 2100: 3.0, 70: 1.0}, Sampling(temperature=0))}
    for found in together(requests, size):
        assert found.tokens_S.tolist() == [2100]


def test_plain_rows_exchange_eight_bytes_each_and_others_their_own_rows() -> None:
    """All ranks gather the same rows, with the same shapes."""
    met: list[tuple[int, tuple[int, ...], torch.dtype]] = []

    class Counting(ThreadMesh):
        __slots__ = ()

        def gather(self, x: torch.Tensor) -> torch.Tensor:
            met.append((self.tp_rank, tuple(x.shape), x.dtype))
            return super().gather(x)

    def shapes(wishes: list[Sampling]) -> list[tuple[int, ...]]:
        met.clear()
        meeting = Meeting(2)
        requests = {slot: asked_for(wish, slot) for slot, wish in enumerate(wishes)}
        benches = [Bench(mesh=Counting(rank, 2, meeting)) for rank in range(2)]
        for bench in benches:
            bench.admit(requests)

        def sample(bench: Bench) -> None:
            logits_SV, rows = bench.step(requests)
            span = bench.sampler.shard.span
            bench.sampler.sample(logits_SV[:, span.start : span.start + span.count], rows)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(sample, benches))
        first, second = ([entry[1:] for entry in met if entry[0] == rank] for rank in range(2))
        assert first == second
        return [shape for shape, _ in first]

    plain, biased = Sampling(seed=1), Sampling(seed=1, logit_bias={4999: 2.0})
    cut, told = Sampling(seed=1, top_k=5), Sampling(seed=1, logprobs=0)
    assert shapes([plain] * 5) == [(5, 2)]
    assert shapes([plain, biased, plain]) == [(3, 2)]
    assert shapes([plain, cut, plain, cut]) == [(2, 4096), (4, 2)]
    assert shapes([told, cut, biased]) == [(1, 4096), (3, 2), (1, 4096)]


@pytest.mark.parametrize("size", [1, 2])
def test_many_rows_are_gathered_a_few_at_a_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = (Sampling(seed=1, top_p=0.9, logprobs=2), Sampling(seed=2, top_k=9), Sampling(seed=3))
    requests = {slot: asked_for(wishes[slot % 3], slot) for slot in range(9)}
    (expected,) = together(requests, 1)
    for module in (truncate, logprobs):
        monkeypatch.setattr(module, "MOST_ROWS", 2)
    for found in together(requests, size):
        assert_equal(found, expected)


def test_warming_up_uses_what_requests_will() -> None:
    """Warm-up includes thresholds of gathered rows, on all ranks."""
    meeting = Meeting(2)
    benches = [Bench(mesh=ThreadMesh(rank, 2, meeting)) for rank in range(2)]
    found: list[tuple[int, ...]] = []
    find_thresholds = benches[0].sampler.truncation.find_thresholds

    def noting(logits_SV: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        found.append(tuple(logits_SV.shape))
        return find_thresholds(logits_SV, *others)

    def warm_up(bench: Bench) -> None:
        bench.sampler.truncation.find_thresholds = noting
        bench.sampler.warm_up(torch.zeros(1, bench.sampler.shard.span.count))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(warm_up, benches))
    assert found == [(1, VOCAB)] * 4


def test_masks_are_cut_at_words() -> None:
    assert [Shard(Mesh(rank, 2), VOCAB).words for rank in range(2)] == [
        slice(0, 128),
        slice(128, 157),
    ]
    assert Shard(Mesh(), VOCAB).words == slice(0, 157)
