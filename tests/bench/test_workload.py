"""Loads equal those published for other engines, and depend only on the seed."""

from __future__ import annotations

import itertools
import random
import statistics

import msgspec
import pytest
from hypothesis import given, strategies as st

from nanovllm.bench.workload import (
    WORDS,
    Wording,
    Workload,
    chat_bodies,
    lengths,
    token_load,
)

VOCAB = 151_936
WORDING = Wording(9, dict.fromkeys(WORDS, 1))


def test_w1_is_the_published_workload() -> None:
    load = token_load("w1", seed=0, vocab_size=VOCAB)
    random.seed(0)
    prompts = []
    for _ in range(256):
        num_tokens = random.randint(100, 1024)
        prompts.append([random.randint(0, 10000) for _ in range(num_tokens)])
    outputs = [random.randint(100, 1024) for _ in range(256)]
    assert load.prompts == prompts
    assert load.outputs == outputs
    assert sum(load.outputs) == 133_966  # the published number of output tokens
    assert load.sampling.temperature == 0.6


def test_w1_top_is_w1_with_a_models_own_cuts() -> None:
    load, plain = (token_load(name, seed=0, vocab_size=VOCAB) for name in ("w1-top", "w1"))
    assert (load.prompts, load.outputs) == (plain.prompts, plain.outputs)
    assert (load.sampling.top_k, load.sampling.top_p) == (20, 0.95)
    assert (plain.sampling.top_k, plain.sampling.top_p) == (0, 1.0)
    assert load.sampling.temperature == 0.6


@pytest.mark.parametrize(
    ("name", "count", "prompt_tokens", "output_tokens"),
    [
        ("bs1", 1, 128, 512),
        ("bs64", 64, 1024, 256),
        ("bs256", 256, 128, 256),
        ("prefill", 16, 4000, 1),
        ("bs1-256", 1, 128, 256),
        ("bs256-128", 256, 128, 128),
    ],
)
def test_batch_workloads(name: str, count: int, prompt_tokens: int, output_tokens: int) -> None:
    load = token_load(name, seed=0, vocab_size=VOCAB)
    random.seed(0)
    assert load.prompts == [
        [random.randint(0, 10000) for _ in range(prompt_tokens)] for _ in range(count)
    ]
    assert load.outputs == [output_tokens] * count
    assert load.sampling.temperature == 0.0


def test_small_vocabularies_wrap_the_same_ids() -> None:
    large = token_load("bs1", seed=3, vocab_size=10_001).prompts[0]
    small = token_load("bs1", seed=3, vocab_size=512).prompts[0]
    assert max(large) > 512
    assert small == [token % 512 for token in large]


def test_warm_up_has_the_shapes_but_not_the_prompts() -> None:
    load = token_load("w1", seed=0, vocab_size=VOCAB)
    warm = load.warm_up(1, VOCAB)
    assert len(warm.prompts) == 256
    assert not {tuple(p[:50]) for p in load.prompts} & {tuple(p[:50]) for p in warm.prompts}
    assert 1 <= min(warm.outputs) < max(warm.outputs) <= 33
    assert token_load("bs64", seed=0, vocab_size=VOCAB).warm_up(1, VOCAB).outputs == [9] * 64


def test_chat_bodies_aim_at_the_lengths() -> None:
    load = Workload(num_prompts=400, input_len=100, output_len=40, range_ratio=0.5, concurrency=1)
    asked: list[int] = []

    def text(rng: random.Random, num_tokens: int) -> str:
        asked.append(num_tokens)
        return " ".join(rng.choices(WORDS, k=num_tokens))

    bodies = [msgspec.json.decode(body) for body in chat_bodies(load, ["m"], text)]
    prompts = [body["messages"][0]["content"] for body in bodies]
    assert [len(prompt.split()) for prompt in prompts] == asked
    assert len(set(prompts)) == 400
    outputs = [body["max_tokens"] for body in bodies]
    for found, mean in ((asked, 100), (outputs, 40)):
        assert min(found) >= mean / 2 and max(found) <= mean * 3 / 2
        assert statistics.mean(found) == pytest.approx(mean, rel=0.05)
    first = bodies[0]
    del first["messages"], first["max_tokens"]
    assert first == {
        "model": "m",
        "temperature": 0.6,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_structured_bodies_ask_for_more_records_than_an_answer_can_hold() -> None:
    load = Workload(num_prompts=2, input_len=20, output_len=4000, concurrency=1, structured=True)
    body = msgspec.json.decode(chat_bodies(load, ["m"], WORDING.text)[1])
    asked = body["response_format"]["json_schema"]
    assert body["response_format"]["type"] == "json_schema" and asked["strict"] is True
    shortest = {"id": 0, "name": "", "kind": "pump", "values": [], "in_use": True}
    assert sorted(asked["schema"]["items"]["required"]) == sorted(shortest)
    # A token seldom has more than eight characters.
    assert asked["schema"]["minItems"] * len(msgspec.json.encode(shortest)) / 8 > load.output_len
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "ignore_eos" not in body
    assert load.name == "c1-structured" and load.warm_up(1).structured


def test_the_mixed_load_has_lengths_from_100_to_2000() -> None:
    load = Workload(
        num_prompts=256, input_len=1050, output_len=1050, range_ratio=0.905, concurrency=64
    )
    assert load.name == "c64-mixed" and load.warm_up(8).name == "c8-mixed"
    assert lengths(1050, 0.905) == range(100, 2001)
    bodies = [msgspec.json.decode(body) for body in chat_bodies(load, ["m"], WORDING.text)]
    inputs = [9 + len(body["messages"][0]["content"].split()) - 1 for body in bodies]
    outputs = [body["max_tokens"] for body in bodies]
    for found in (inputs, outputs):
        assert 100 <= min(found) < 150 and 1950 < max(found) <= 2000
    # The name does not matter: servers with equal token counts get equal prompts.
    renamed = [msgspec.json.decode(body) for body in chat_bodies(load, ["n"], WORDING.text)]
    assert [body | {"model": "m"} for body in renamed] == bodies


def test_chat_bodies_follow_the_seed() -> None:
    def made(seed: int) -> list[bytes]:
        load = Workload(num_prompts=3, input_len=20, output_len=4, concurrency=1, seed=seed)
        return chat_bodies(load, ["m"], WORDING.text)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_the_warm_up_of_an_online_load_repeats_none_of_its_prompts() -> None:
    load = Workload(num_prompts=8, input_len=50, output_len=256, request_rate=4.0)
    warm = load.warm_up(5)
    assert (warm.num_prompts, warm.concurrency, warm.request_rate) == (5, 5, None)
    assert (warm.input_len, warm.output_len) == (50, 16)
    prompts = set(chat_bodies(load, ["m"], WORDING.text))
    assert not prompts & set(chat_bodies(warm, ["m"], WORDING.text))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    load = Workload(
        num_prompts=20_000, input_len=1, output_len=1, request_rate=50.0, burstiness=burstiness
    )
    times = load.due_s()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0 and len(times) == 20_000
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # The squared coefficient of variation of a gamma distribution is 1 / shape.
    variation = statistics.variance(gaps) / statistics.mean(gaps) ** 2
    assert variation == pytest.approx(1 / burstiness, rel=0.1)


def test_a_closed_loop_has_no_arrivals() -> None:
    load = Workload(num_prompts=3, input_len=1, output_len=1, concurrency=2)
    assert load.due_s() == []
    assert load.name == "c2"
    assert msgspec.structs.replace(load, concurrency=None, request_rate=2.5).name == "rate2.5"


@given(
    overhead=st.integers(1, 30),
    costs=st.dictionaries(st.sampled_from(WORDS), st.integers(1, 5), min_size=1, max_size=8),
    num_tokens=st.integers(0, 120),
    seed=st.integers(0, 5),
)
def test_a_text_has_exactly_the_tokens(overhead, costs, num_tokens, seed) -> None:
    wording = Wording(overhead, costs)
    reached = {overhead}
    for _ in range(num_tokens):
        reached |= {n + c for n in reached for c in costs.values() if n + c <= num_tokens}
    assert wording.reaches(num_tokens) == (num_tokens > overhead and num_tokens in reached)
    if wording.reaches(num_tokens):
        first, *words = wording.text(random.Random(seed), num_tokens).split()
        assert first == "Words:"
        assert overhead + sum(costs[word] for word in words) == num_tokens


def test_words_are_words() -> None:
    words = WORDING.text(random.Random(0), 5_009).split()[1:]
    assert len(words) == 5_000
    assert 150 < len(set(words)) < 250
    assert all(word.isascii() and word.isalpha() for word in words)


def test_requests_name_adapters_in_turn_and_keep_their_texts() -> None:
    load = Workload(num_prompts=5, input_len=40, output_len=8, concurrency=2, adapters=2)
    named = chat_bodies(load, ["a", "b"], WORDING.text)
    bodies = [msgspec.json.decode(body) for body in named]
    assert [body["model"] for body in bodies] == ["a", "b", "a", "b", "a"]
    plain = [msgspec.json.decode(body) for body in chat_bodies(load, ["m"], WORDING.text)]
    assert [body["messages"] for body in bodies] == [body["messages"] for body in plain]
    assert load.name == "c2-lora2"
