"""Every sampling feature against a numpy reference for one request, alone and in mixed batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm.parallel.mesh import Mesh
from nanovllm.plan import Admit
from nanovllm.sampling.base import Sampled, SampleRows
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.shards import Shard
from nanovllm.wire import Sampling

VOCAB, BLOCK, NUM_SLOTS, MAX_TOKENS = 5003, 2048, 11, 40
WORD = 1 << 64


# ---- the reference: one request in plain Python ----


@dataclass
class Asked:
    """A request with its tokens so far, its sampling parameters and its logits."""

    prompt: list[int]
    output: list[int]
    sampling: Sampling
    logits: np.ndarray  # float32 [VOCAB]
    stop_ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def changed_logits(asked: Asked) -> np.ndarray:
    x, wish = asked.logits.astype(np.float64), asked.sampling
    if wish.allowed_tokens:
        x[[token for token in range(VOCAB) if token not in wish.allowed_tokens]] = -math.inf
    for token, bias in wish.logit_bias.items():
        if 0 <= token < VOCAB:
            x[token] += bias
    for word in wish.bad_words:
        *before, last = word
        if max(word) < VOCAB and asked.output[len(asked.output) - len(before) :] == before:
            x[last] = -math.inf
    if len(asked.output) < wish.min_tokens:
        for token in asked.stop_ids:
            if 0 <= token < VOCAB:
                x[token] = -math.inf
    for token in set(asked.tokens):
        penalty = wish.repetition_penalty
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, count in Counter(asked.output).items():
        x[token] -= wish.frequency_penalty * count
        x[token] -= wish.presence_penalty
    return x


def kept_tokens(x: np.ndarray, wish: Sampling, top_p: float) -> set[int]:
    """Return the tokens that min-p, top-k and top-p keep, with ties."""
    heat = wish.temperature
    best = x.max()
    kept = [v for v in range(len(x)) if x[v] > -math.inf]
    if wish.min_p > 0:
        kept = [v for v in kept if math.exp((x[v] - best) / heat) >= wish.min_p]
    if wish.top_k > 0:
        worst = sorted((x[v] for v in kept), reverse=True)[: wish.top_k][-1]
        kept = [v for v in kept if x[v] >= worst]
    if top_p < 1:
        weight = {v: math.exp((x[v] - best) / heat) for v in kept}
        by_value: dict[float, float] = {}
        for v in kept:
            by_value[x[v]] = by_value.get(x[v], 0.0) + weight[v]
        needed, mass, worst = top_p * sum(weight.values()), 0.0, best
        for worst in sorted(by_value, reverse=True):
            mass += by_value[worst]
            if mass >= needed:
                break
        kept = [v for v in kept if x[v] >= worst]
    return set(kept)


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def gumbel(key: int, index: int) -> float:
    bits = mix((key + (index + 1) * 0x9E3779B97F4A7C15) % WORD) >> 32
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24)))


def drawn(x: np.ndarray, kept: set[int], asked: Asked) -> tuple[int, float]:
    """Return the token and its margin. Within float32's rounding, the runner-up may win."""
    wish = asked.sampling
    if wish.temperature == 0:
        order = np.sort(x)[::-1]
        return int(x.argmax()), float(order[0] - order[1])
    key = mix((mix(wish.seed % WORD) + len(asked.tokens)) % WORD)
    scaled = {v: x[v] / wish.temperature for v in kept}
    best = max(scaled.values())
    mass: dict[int, float] = {}
    for v in kept:
        mass[v // BLOCK] = mass.get(v // BLOCK, 0.0) + math.exp(scaled[v] - best)
    scores = {b: math.log(m) + gumbel(key, 2**32 + b * BLOCK) for b, m in mass.items() if m > 0}
    block, block_margin = winner(scores)
    token, margin = winner({v: scaled[v] + gumbel(key, v) for v in kept if v // BLOCK == block})
    return token, min(margin, block_margin)


def winner(scores: dict[int, float]) -> tuple[int, float]:
    order = sorted(scores.items(), key=lambda item: -item[1])
    return order[0][0], order[0][1] - order[1][1] if len(order) > 1 else math.inf


# ---- the sampler under test, and its slots ----


class Bench:
    """A sampler with the two tensors of a runner."""

    def __init__(self, kernel: str = "torch", mesh: Mesh = Mesh()) -> None:
        self.tokens_NL = torch.zeros(NUM_SLOTS + 1, MAX_TOKENS + 1, dtype=torch.int32)
        self.prompts_N = torch.zeros(NUM_SLOTS + 1, dtype=torch.int32)
        self.sampler = Sampler(
            num_slots=NUM_SLOTS,
            shard=Shard(mesh, VOCAB),
            device=torch.device("cpu"),
            tokens_NL=self.tokens_NL,
            prompt_lengths_N=self.prompts_N,
            kernel=kernel,
        )

    def admit(self, requests: dict[int, Asked]) -> None:
        admits = []
        for slot, asked in requests.items():
            known = np.array(asked.tokens, np.int32)
            # Tokens of an earlier request must not count.
            self.tokens_NL[slot] = torch.randint(0, VOCAB, (MAX_TOKENS + 1,))
            self.tokens_NL[slot, : len(known)] = torch.from_numpy(known)
            self.prompts_N[slot] = len(asked.prompt)
            admits.append(
                Admit(
                    slot=slot,
                    tokens=known.tobytes(),
                    num_prompt=len(asked.prompt),
                    num_cached=0,
                    pages=[],
                    sampling=asked.sampling,
                    stop_ids=asked.stop_ids,
                )
            )
        self.sampler.admit(admits)

    def step(
        self, requests: dict[int, Asked], dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, SampleRows]:
        slots = np.array(list(requests), np.int32)
        lengths = [len(asked.tokens) for asked in requests.values()]
        logits_SV = torch.from_numpy(np.stack([asked.logits for asked in requests.values()]))
        rows = SampleRows(torch.from_numpy(slots).long(), torch.tensor(lengths), slots)
        return logits_SV.to(dtype), rows

    def sample(self, requests: dict[int, Asked]) -> Sampled:
        return self.sampler.sample(*self.step(requests))


@st.composite
def wishes(draw: st.DrawFn, rng: np.random.Generator) -> Sampling:
    def maybe(strategy: st.SearchStrategy, off: object) -> object:
        return draw(strategy) if draw(st.booleans()) else off

    tokens = [int(t) for t in rng.integers(0, VOCAB, draw(st.integers(0, 5)))]
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9])),
        top_p=maybe(st.floats(0.05, 0.99), 1.0),
        top_k=maybe(st.sampled_from([1, 2, 3, 20, 4000, VOCAB, 10**6]), 0),
        min_p=maybe(st.sampled_from([1e-4, 0.05, 0.4, 1.0]), 0.0),
        repetition_penalty=maybe(st.sampled_from([0.7, 1.3, 2.0]), 1.0),
        presence_penalty=maybe(st.sampled_from([-1.5, 0.8, 2.0]), 0.0),
        frequency_penalty=maybe(st.sampled_from([-0.5, 0.4, 1.7]), 0.0),
        seed=draw(st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]) | st.integers(0, 2**31)),
        logit_bias={t: draw(st.floats(-100, 100)) for t in tokens},
        min_tokens=maybe(st.integers(1, 6), 0),
        logprobs=maybe(st.integers(0, 20), -1),
    )


def word_about(rng: np.random.Generator, asked: Asked) -> list[int]:
    """Return a bad word. Often the latest tokens are its beginning."""
    likely = np.argsort(-asked.logits)[:8]
    known = asked.tokens if rng.random() < 0.3 else asked.output
    before = known[len(known) - int(rng.integers(0, 4)) :] if rng.random() < 0.7 else known[:2]
    return [*before, int(rng.choice([*likely, VOCAB]))]


@st.composite
def batches(draw: st.DrawFn) -> dict[int, Asked]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=5, unique=True))
    asked = {slot: asking(rng, draw(wishes(rng))) for slot in slots}
    for one in asked.values():
        words = [word_about(rng, one) for _ in range(rng.choice([0, 0, 1, 4]))]
        allowed = allowed_about(rng, one) if rng.random() < 0.3 else []
        one.sampling = msgspec.structs.replace(
            one.sampling, bad_words=words, allowed_tokens=allowed
        )
    return asked


def allowed_about(rng: np.random.Generator, asked: Asked) -> list[int]:
    """Return more tokens than bad words and stop ids can forbid. Some are likely."""
    likely = rng.choice(np.argsort(-asked.logits)[:8], 4).tolist()
    return [VOCAB + 3, *likely, *rng.integers(0, VOCAB, rng.integers(16, 30)).tolist()]


def asking(rng: np.random.Generator, sampling: Sampling) -> Asked:
    """Return a request with likely tokens, so that penalties apply to tokens that may be drawn."""
    logits = (rng.standard_normal(VOCAB) * rng.choice([0.5, 3, 12])).astype(np.float32)
    likely = np.argsort(-logits)[:8]
    prompt = rng.choice(likely, rng.integers(1, 20)).tolist()
    output = rng.choice(likely, rng.integers(0, 20)).tolist()
    stops = [int(t) for t in rng.choice(likely, 3)] + [VOCAB, VOCAB + 7]
    return Asked(prompt, output, sampling, logits, stops)


# ---- properties ----


@settings(deadline=None, max_examples=60)
@given(first=batches(), requests=batches())
def test_a_batch_of_mixed_wishes_equals_the_oracle(first, requests) -> None:
    bench = Bench()
    bench.admit(first)  # slots are reused, and nothing of these requests may remain
    bench.admit(requests)
    logits_SV, rows = bench.step(requests)
    before = logits_SV.clone()
    sampled = bench.sampler.sample(logits_SV, rows)
    assert torch.equal(logits_SV, before)
    for processor in bench.sampler.processors:
        processor.apply(logits_SV, rows)
    thresholds_S = bench.sampler.truncation.thresholds(
        logits_SV, rows, np.ones(len(requests), bool)
    )
    for row, asked in enumerate(requests.values()):
        x, wish = changed_logits(asked), asked.sampling
        np.testing.assert_allclose(logits_SV[row].numpy(), x, rtol=1e-5, atol=2e-5)
        # Rounding of logits is not an error of truncation.
        x = logits_SV[row].numpy().astype(np.float64)
        found = set(np.flatnonzero(x >= thresholds_S[row].item()).tolist())
        if wish.temperature > 0:
            fewest, most = (kept_tokens(x, wish, wish.top_p + e) for e in (-1e-5, 1e-5))
            found -= {v for v in found if x[v] == -math.inf}
            assert fewest <= found <= most
        token, margin = drawn(x, found, asked)
        assert sampled.tokens_S[row].item() == token or margin < 1e-4


@settings(deadline=None, max_examples=30)
@given(requests=batches())
def test_a_row_is_the_same_alone_in_another_slot_and_after_preemption(requests) -> None:
    bench, tokens, logprobs = Bench(), {}, {}
    bench.admit(requests)
    sampled = bench.sample(requests)
    for row, slot in enumerate(requests):
        tokens[slot] = sampled.tokens_S[row].item()
    if sampled.logprobs is not None:
        logprobs = dict(zip(sampled.logprobs.at, sampled.logprobs.chosen_W, strict=True))
    for row, (slot, asked) in enumerate(requests.items()):
        elsewhere = {(slot + 1) % NUM_SLOTS: asked}
        bench.admit(elsewhere)
        alone = bench.sample(elsewhere)
        assert alone.tokens_S.tolist() == [tokens[slot]]
        assert (alone.logprobs is not None) == (asked.sampling.logprobs >= 0)
        if alone.logprobs is not None:
            assert alone.logprobs.chosen_W[0].item() == pytest.approx(logprobs[row].item())


@settings(deadline=None, max_examples=30)
@given(requests=batches())
def test_logprobs_are_of_the_raw_logits(requests) -> None:
    bench = Bench()
    bench.admit(requests)
    sampled = bench.sample(requests)
    wanted = [r for r, asked in enumerate(requests.values()) if asked.sampling.logprobs >= 0]
    if not wanted:
        assert sampled.logprobs is None
        return
    assert sampled.logprobs.at == wanted
    for line, row in enumerate(wanted):
        asked = list(requests.values())[row]
        x = asked.logits.astype(np.float64)
        expected = x - x.max() - math.log(np.exp(x - x.max()).sum())
        token, count = sampled.tokens_S[row].item(), sampled.logprobs.counts[line]
        assert count == asked.sampling.logprobs
        assert sampled.logprobs.chosen_W[line].item() == pytest.approx(expected[token], abs=1e-4)
        ids = sampled.logprobs.top_ids_WK[line, :count].tolist()
        values = sampled.logprobs.top_logprobs_WK[line, :count].tolist()
        assert ids == np.argsort(-x)[:count].tolist()
        assert values == pytest.approx(expected[ids].tolist(), abs=1e-4)


# ---- single features ----


def one(logits: dict[int, float], sampling: Sampling, **more: list[int]) -> Asked:
    x = np.full(VOCAB, -20.0, np.float32)
    x[list(logits)] = list(logits.values())
    return Asked(more.get("prompt", [1]), more.get("output", []), sampling, x, more.get("stop", []))


def token_of(asked: Asked) -> int:
    bench = Bench()
    bench.admit({4: asked})
    return bench.sample({4: asked}).tokens_S.item()


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert token_of(one({4999: 3.0, 2100: 3.0, 70: 1.0}, Sampling(temperature=0))) == 2100


@pytest.mark.parametrize("output, token", [([], 8), ([5], 8), ([5, 6], 7)])
def test_stop_tokens_wait_for_min_tokens(output, token) -> None:
    asked = one({7: 5.0, 8: 4.0}, Sampling(temperature=0, min_tokens=2), stop=[7, VOCAB + 1])
    asked.output = output
    assert token_of(asked) == token


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_no_token_is_drawn_that_is_not_allowed(more) -> None:
    """Penalties of allowed tokens and a bias of others do not change this."""
    wish = Sampling(temperature=0, allowed_tokens=[8, 9, 8], logit_bias={7: 100.0}, **more)
    asked = one({0: 50.0, 7: 60.0, 8: 4.0, 9: 3.0}, wish, prompt=[8] * 20, output=[8] * 20)
    assert token_of(asked) == (9 if more else 8)


def test_a_reused_slot_forgets_the_allowed_tokens_of_the_one_before() -> None:
    """Unused entries of lists that another request lengthened do not count as tokens."""
    bench, logits = Bench(), {0: 9.0, 4: 7.0, 7: 5.0}
    for tokens, token in ([7, 4, 3], 4), ([7], 7), ([], 0):
        wish = Sampling(temperature=0, allowed_tokens=tokens)
        bench.admit({3: one(logits, wish, output=[2])})
        assert bench.sample({3: one(logits, Sampling(), output=[2])}).tokens_S.tolist() == [token]


def test_presence_counts_once_and_frequency_every_time() -> None:
    logits = {7: 5.0, 8: 4.0}
    for output, presence, frequency, token in [
        ([7, 7, 7], 0.9, 0.0, 7),
        ([7, 7, 7], 1.1, 0.0, 8),
        ([7, 7, 7], 0.0, 0.3, 7),
        ([7, 7, 7], 0.0, 0.4, 8),
        ([], 3.0, 3.0, 7),  # prompt tokens have no penalty
    ]:
        wish = Sampling(temperature=0, presence_penalty=presence, frequency_penalty=frequency)
        assert token_of(one(logits, wish, prompt=[7, 7], output=output)) == token


def test_repetition_covers_the_prompt_and_pushes_negative_logits_down() -> None:
    wish = Sampling(temperature=0, repetition_penalty=2.0)
    assert token_of(one({7: 5.0, 8: 3.0}, wish, prompt=[7])) == 8
    assert token_of(one({7: 0.5, 8: 0.4}, wish, prompt=[7])) == 8
    assert token_of(one({7: -1.0, 8: -1.5}, wish, prompt=[7])) == 8
    assert token_of(one({7: 5.0, 8: 3.0}, wish, prompt=[7, 8])) == 7


@pytest.mark.parametrize(
    ("prompt", "output", "token"),
    [
        ([1], [5, 6], 8),
        ([1], [6], 7),
        ([1], [6, 5], 7),
        ([1, 5, 6], [], 7),  # a word that begins in the prompt may be completed
        ([1, 5], [6], 7),
        ([1], [9], 7),
    ],
)
def test_a_bad_word_is_never_completed(prompt, output, token) -> None:
    words = [[5, 6, 7], [4], [9, 8]]
    wish = Sampling(temperature=0, bad_words=words)
    assert token_of(one({4: 9.0, 7: 5.0, 8: 4.0}, wish, prompt=prompt, output=output)) == token


def test_a_reused_slot_forgets_the_bad_words_of_the_one_before() -> None:
    bench, logits = Bench(), {4: 9.0, 7: 5.0}
    for words, token in ([[4], [7, 4]], 7), ([[7, 8, 4]], 4), ([], 4):
        bench.admit({3: one(logits, Sampling(temperature=0, bad_words=words), output=[2])})
        assert bench.sample({3: one(logits, Sampling(), output=[2])}).tokens_S.tolist() == [token]


def test_only_rows_that_ask_for_nothing_are_plain() -> None:
    bench = Bench()
    wished = {
        0: Sampling(temperature=0, top_k=5, top_p=0.5, min_p=0.1),  # truncation has no effect
        1: Sampling(seed=3, min_tokens=4),  # no stop ids, so min_tokens has no effect
        2: Sampling(top_k=5),
        3: Sampling(top_p=0.9),
        4: Sampling(min_p=0.1),
        5: Sampling(logprobs=0),
        6: Sampling(presence_penalty=0.1),
        7: Sampling(logit_bias={3: 1.0}),
        9: Sampling(bad_words=[[3, VOCAB]]),  # no such token
        10: Sampling(bad_words=[[3, 4]]),
    }
    requests = {slot: one({}, sampling) for slot, sampling in wished.items()}
    requests[8] = one({}, Sampling(), stop=[7])  # may stop immediately
    bench.admit(requests)
    plain = {s for s in requests if bench.sampler.plain(np.array([s], np.int32))}
    assert plain == {0, 1, 8, 9}
    assert not bench.sampler.plain(np.array([0, 1, 6], np.int32))


def test_plain_rows_ask_no_feature() -> None:
    bench, asked = Bench(), one({9: 30.0}, Sampling())
    bench.admit({2: asked})
    bench.sampler.processors = bench.sampler.truncation = bench.sampler.logprobs = None
    assert bench.sample({2: asked}).tokens_S.tolist() == [9]


def test_half_precision_logits_draw_the_same_beside_rows_that_need_float32() -> None:
    rng = np.random.default_rng(5)
    bench, requests = Bench(), {s: asking(rng, Sampling(seed=s, top_p=0.9)) for s in range(6)}
    requests[6] = asking(rng, Sampling(repetition_penalty=1.5))
    bench.admit(requests)
    alone = bench.sampler.sample(*bench.step({s: requests[s] for s in range(6)}, torch.bfloat16))
    mixed = bench.sampler.sample(*bench.step(requests, torch.bfloat16))
    assert alone.tokens_S.tolist() == mixed.tokens_S.tolist()[:6]


def test_padded_widths_of_the_token_table_do_not_matter() -> None:
    rng = np.random.default_rng(6)
    wish = Sampling(repetition_penalty=1.2, frequency_penalty=0.5, temperature=0)
    bench, requests = Bench(), {s: asking(rng, wish) for s in range(5)}
    bench.admit(requests)
    logits_SV, rows = bench.step(requests)
    tight = SampleRows(rows.slots_S, rows.positions_S, rows.host_slots, int(rows.positions_S.max()))
    assert torch.equal(
        bench.sampler.sample(logits_SV, rows).tokens_S,
        bench.sampler.sample(logits_SV, tight).tokens_S,
    )
