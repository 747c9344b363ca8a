"""Random numbers, the distribution of drawn tokens, and truncation at ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from nanovllm_kernels.sampling import reference

WORD = 1 << 64


def signed(x: int) -> int:
    return (x + (WORD >> 1)) % WORD - (WORD >> 1)


def unmix(x: int) -> int:
    """Return the inverse of reference.mix for an unsigned number."""
    for factor, shift in ((0x94D049BB133111EB, 31), (0xBF58476D1CE4E5B9, 27), (1, 30)):
        y = x
        for _ in range(64 // shift):
            y = x ^ (y >> shift)
        x = y * pow(factor, -1, WORD) % WORD
    return x


def test_the_stream_is_splitmix64() -> None:
    # These are the published first outputs of the generator for the seed 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = 1234567 + (torch.arange(5) + 1) * reference.GOLDEN
    assert [x % WORD for x in reference.mix(states).tolist()] == expected


def test_uniform_and_gumbel_numbers_stay_finite_at_both_ends() -> None:
    bits = [0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    index = torch.tensor([3])
    keys = [signed(unmix(b << 32) - 4 * 0x9E3779B97F4A7C15) for b in bits]
    u = torch.cat([reference.uniforms(torch.tensor([key]), index) for key in keys])
    top = 1 - 2**-24
    assert u.tolist() == pytest.approx([2**-33, 1.5 * 2**-32, 0.5, top, top, top], rel=1e-7)
    g = torch.cat([reference.gumbel(torch.tensor([key]), index) for key in keys])
    exact = [-math.log(-math.log1p(-x)) for x in u.tolist()]
    assert g.tolist() == pytest.approx(exact, rel=1e-5)
    assert g[0].item() == pytest.approx(33 * math.log(2))


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("along", ["seed", "position", "index"])
def test_uniforms_are_flat_and_neighbours_independent(along) -> None:
    n = torch.arange(1 << 16)
    zero = torch.zeros_like(n)
    seeds, positions, index = {
        "seed": (n, zero + 7, zero + 11),
        "position": (zero + 7, n, zero + 11),
        "index": (zero + 7, zero + 7, n),
    }[along]
    u = reference.uniforms(reference.stream_keys(seeds, positions), index).numpy()
    cells = 16
    pairs = (u[:-1] * cells).astype(int) * cells + (u[1:] * cells).astype(int)
    for values, bins in ((u * 1024, 1024), (pairs, cells * cells)):
        counts = np.bincount(values.astype(int), minlength=bins)
        found = chi_square(counts, np.full(bins, len(values) / bins))
        assert abs(found - bins) < 5 * math.sqrt(2 * bins)


VOCAB = 150  # three of the blocks below, the last one short
SKEWED = {0: 0.45, 1: 0.2, 63: 0.1, 64: 0.1, 100: 0.08, 128: 0.04, 149: 0.03}


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(reference, "BLOCK", 64)


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_20k_draws_follow_the_distribution(small_blocks, vary, temperature) -> None:
    p = np.full(VOCAB, 1e-9)
    p[list(SKEWED)] = list(SKEWED.values())
    size = 20_000
    n, fixed = torch.arange(size), torch.full((size,), 5)
    seeds_N, positions_S = (n, fixed) if vary == "seed" else (fixed, n)
    logits_SV = torch.from_numpy(np.log(p)).float().expand(size, -1)
    inverse_N = torch.full((size,), 1 / temperature)
    tokens = reference.draw(logits_SV, n, positions_S, inverse_N, seeds_N)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    p = p ** (1 / temperature)
    expected = size * p / p.sum()
    likely = list(SKEWED)
    assert counts[likely].sum() >= size - 2
    # 99.99 % of chi-square with 6 degrees of freedom lie below 27.9.
    assert chi_square(counts[likely], expected[likely]) < 27.9


def test_a_flat_distribution_uses_the_whole_vocabulary(small_blocks) -> None:
    size = 30_000
    n = torch.arange(size)
    args = n, torch.zeros_like(n), torch.ones(size), n
    tokens = reference.draw(torch.zeros(1, VOCAB).expand(size, -1), *args).numpy()
    # 99.99 % of chi-square with 149 degrees of freedom lie below 219.
    assert chi_square(np.bincount(tokens, minlength=VOCAB), np.full(VOCAB, size / VOCAB)) < 219


def thresholds(
    x: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """Return the tokens of one row that stay possible at temperature 1."""
    logits_SV = torch.tensor([x])
    gap = math.log(min_p) if min_p > 0 else -math.inf
    numbers = (torch.tensor([v]) for v in (1.0, top_k, top_p, gap))
    floor_S = reference.thresholds(logits_SV, torch.tensor([0]), *numbers)
    return (logits_SV[0] >= floor_S[0]).nonzero()[:, 0].tolist()


def test_equal_logits_at_the_boundary_share_one_fate() -> None:
    x = [2.0, 5.0, 2.0, 5.0, 2.0, 1.0]
    assert thresholds(x, top_k=1) == [1, 3]
    assert thresholds(x, top_k=2) == [1, 3]
    assert thresholds(x, top_k=3) == [0, 1, 2, 3, 4]
    assert thresholds(x, top_p=0.1) == [1, 3]
    assert thresholds(x, top_p=0.94) == [0, 1, 2, 3, 4]
    assert thresholds(x, min_p=1.0) == [1, 3]
    assert thresholds(x) == [0, 1, 2, 3, 4, 5]


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    x = [math.log(v) for v in p]
    assert thresholds(x, top_p=0.65) == [0, 1]
    assert thresholds(x, top_p=0.65, top_k=2) == [0, 1]  # 0.4 of 0.7 is less than 0.65
    assert thresholds(x, top_p=0.55, top_k=2) == [0]  # 0.4 of 0.7 suffices; 0.4 of 1 would not
    assert thresholds(x, top_p=0.55) == [0, 1]
    assert thresholds(x, top_p=0.85, min_p=0.45) == [0, 1, 2]
    assert thresholds(x, top_p=0.75, min_p=0.45) == [0, 1]  # 0.7 of 0.9


def test_impossible_tokens_stay_impossible() -> None:
    x = [-math.inf, 1.0, -math.inf, 0.0]
    assert thresholds(x, top_k=3) == [1, 3]
    assert thresholds(x) == [1, 3]
    logits_SV, n = torch.tensor([x]).expand(500, -1), torch.arange(500)
    tokens = reference.draw(logits_SV, n, n, torch.full((500,), 0.01), n)
    assert set(tokens.tolist()) == {1, 3}


def test_the_largest_key_wins_the_first_of_equals_and_nan_corrupts() -> None:
    keys_IS = torch.tensor(
        [[1.0, 2.0, -3.0, math.nan, -math.inf], [2.0, 2.0, -math.inf, 9, -math.inf]]
    )
    tokens_IS = torch.arange(10, dtype=torch.int32).view(2, 5)
    winners_IS2 = torch.stack((keys_IS.view(torch.int32), tokens_IS), 2)
    corrupted = reference.CORRUPTED
    assert reference.best(winners_IS2).tolist() == [5, 1, 2, corrupted, corrupted]


def test_a_winner_carries_the_key_of_its_block_and_its_token_of_the_whole_vocabulary() -> None:
    logits_SV = torch.full((3, 3 * reference.BLOCK), -math.inf)
    logits_SV[0, 4099], logits_SV[1, 4099], logits_SV[2, 5] = 2.5, 4.0, 1.0
    n = torch.arange(3)
    share = logits_SV[:, 2 * reference.BLOCK :]
    inverse_N = torch.tensor([0.0, 0.5, 1.0])
    won = reference.winners(share, n, n, inverse_N, n, None, 2 * reference.BLOCK)
    noise = reference.gumbel(
        reference.stream_keys(n, n), torch.tensor([reference.BLOCK_INDEX + 4096])
    )
    assert won[:, 0].view(torch.float32).tolist() == [2.5, 2.0 + noise[1].item(), -math.inf]
    assert won[:2, 1].tolist() == [4099, 4099]


@pytest.mark.parametrize("heat", [1e-6, 1e6])
@pytest.mark.parametrize("size", [1e-30, 1e4, 1e34, 3e38])
def test_logits_of_any_size_draw_a_possible_token(size, heat) -> None:
    """Huge logits draw a possible token. Keys are clamped to the range of float32."""
    n = torch.arange(4)
    logits_SV = torch.full((4, 3 * reference.BLOCK), -math.inf)
    logits_SV[:2, 100], logits_SV[2:, 5000] = size, -size
    tokens = reference.draw(logits_SV, n, n, torch.full((4,), 1 / heat), n)
    assert tokens.tolist() == [100, 100, 5000, 5000]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_rows_without_any_number_are_corrupted(value) -> None:
    n = torch.arange(2)
    tokens = reference.draw(torch.full((2, 2100), value), n, n, torch.tensor([0.0, 1.0]), n)
    assert tokens.tolist() == [reference.CORRUPTED] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("threshold", [None, -math.inf, 1.5, math.nan])
def test_one_bad_number_anywhere_corrupts_its_row_alone(value, threshold) -> None:
    size = 64
    n = torch.arange(size)
    logits_SV = torch.randn(size, 2100, generator=torch.Generator().manual_seed(4))
    logits_SV[:, 7] = -math.inf  # impossible, but not corrupted
    inverse_N = torch.tensor([0.0, 1.0, 50.0, 0.1]).repeat(size // 4)
    thresholds_S = None if threshold is None else torch.full((size,), threshold)
    fine = reference.draw(logits_SV, n, n, inverse_N, n, thresholds_S)
    assert (fine >= 0).all()
    logits_SV[n[::3], n[::3] * 33 % 2100] = value
    found = reference.draw(logits_SV, n, n, inverse_N, n, thresholds_S)
    assert (found[::3] == reference.CORRUPTED).all()
    others = n % 3 > 0
    assert torch.equal(found[others], fine[others])
