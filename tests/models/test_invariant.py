"""`kernels.invariant`: logits of a request are bit-equal whatever the engine does besides.

Each way of serving must give the bits of the request alone. So must a prefill of the request's own
text, which is what training on a server's logprobs needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.fp8_reference import FP8

from nanovllm.config import Config, ConfigError, Kernels, Speculate, load_config
from nanovllm.layers.kernels import select_ops
from nanovllm.runner.resolved import refuse_variant, resolve_config
from nanovllm.wire import Sampling, TokenLogprobs
from tests.engine.test_ranks import cut, ranked
from tests.models.steps import CPU
from tests.models.test_expert_fp8 import checkpoints
from tests.models.tiny import CASES, TOLD, config_of, make_tiny
from tests.whole_engine import WholeEngine

NUM_NEW = 12  # three pages
SAMPLINGS = (
    Sampling(temperature=0.0, logprobs=4),
    Sampling(temperature=0.9, seed=7, logprobs=4),
    Sampling(temperature=0.7, top_p=0.9, seed=11, repetition_penalty=1.3, logprobs=4),
)
NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {  # cache.dtype, and other keys of the recipe
    "float32": ("auto", dict(dtype="float32")),
    "bfloat16": ("auto", dict(dtype="bfloat16")),
    "fp8 weights and cache": ("fp8", dict(dtype="bfloat16", quantize="fp8")),
}
FAMILIES = (
    *TOLD,
    "qwen3_5_text that repeats itself",
    "qwen3_5_moe_text 13, top 8, shared as wide",
    "glm4_moe_lite 5, top 2, dense 2, tied",
)
Found = list[TokenLogprobs]
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 8 tokens": dict(step_tokens=8),
    "a cache that is too small": dict(pages=40, prefix=False),
    "drafts": dict(speculate=Speculate(method="ngram", tokens=3, min_match=1)),
}


def prompts() -> list[list[int]]:
    """Return prompts of several lengths. Two share 21 first tokens, and the last repeats itself."""
    draw = np.random.default_rng(5)
    found = [draw.integers(0, 200, length).tolist() for length in (1, 37, 16, 70, 33)]
    return [*found, found[3][:21] + found[2], [7, 9, 11, 13] * 6]


def invariant(config: Config, **given: Any) -> Config:
    """Return the config of an invariant engine. `given` are further keys of the recipe."""
    recipe = replace(config.recipe, kernels=Kernels(invariant=True), **given)
    return replace(config, recipe=recipe)


def served(
    config: Config,
    requests: list[list[int]],
    num_new: int = NUM_NEW,
    **how: Any,
) -> WholeEngine:
    """Return the engine after it has served the requests, which are submitted at once."""
    engine = WholeEngine(config, **how)
    for name, prompt in enumerate(requests):
        engine.submit(name, prompt, num_new, SAMPLINGS[name % len(SAMPLINGS)])
    engine.run()
    return engine


def found_of(engine: WholeEngine) -> list[Found]:
    """Return the logprobs of each request, in the order of submission."""
    return [bits(engine.logprobs[name]) for name in sorted(engine.logprobs)]


def bits(found: Found) -> Found:
    """Return the logprobs without the request's number."""
    return [replace(one, request_id=0) for one in found]


def check_prefills(engine: WholeEngine, requests: list[list[int]], sent: list[Found]) -> None:
    """Assert that prefills of every request's own text give the logprobs that were sent."""
    expected = [one for found in sent for one in found]
    texts = [
        prompt + [one.token_id for one in found[:count]]
        for prompt, found in zip(requests, sent, strict=True)
        for count in range(len(found))
    ]
    assert len(texts) == len(expected) == NUM_NEW * len(requests)
    for name, text in enumerate(texts):
        engine.submit(name, text, 1, SAMPLINGS[0])
    engine.run()
    for name, one in enumerate(expected):
        (found,) = engine.logprobs[name]
        assert (found.top_ids, found.top_logprobs) == (one.top_ids, one.top_logprobs)


@pytest.mark.parametrize("numbers", ["bfloat16", "fp8 weights and cache"])
@pytest.mark.parametrize("case", FAMILIES)
def test_every_way_of_serving_gives_the_bits_of_a_request_alone(
    case: str, numbers: str, tmp_path: Path
) -> None:
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    kept, given = NUMBERS[numbers]
    config = invariant(config_of(tmp_path), **given)
    requests = prompts()
    alone = []
    for name, prompt in enumerate(requests):
        engine = WholeEngine(config, cache_dtype=kept)
        engine.submit(0, prompt, NUM_NEW, SAMPLINGS[name % len(SAMPLINGS)])
        engine.run()
        alone.append(bits(engine.logprobs[0]))
    engines = {way: served(config, requests, cache_dtype=kept, **how) for way, how in WAYS.items()}
    for way, engine in engines.items():
        assert found_of(engine) == alone, way
    assert engines["a cache that is too small"].scheduler.snapshot().num_preemptions > 0
    assert engines["drafts"].scheduler.stats().draft_tokens > 0
    assert engines["chunks of 8 tokens"].cached[5] > 0


@pytest.mark.parametrize("family", ["minimax_m2", "deepseek_v3"])
def test_block_fp8_of_files_gives_the_bits_of_a_request_alone(family: str, tmp_path: Path) -> None:
    """Experts and projections have several blocks of scales, and the cache is in fp8, too."""
    _, folder = checkpoints(tmp_path, family, 256)
    config, requests = invariant(config_of(folder), dtype="bfloat16"), prompts()[3::-1]
    sizes = dict(cache_dtype="fp8", max_tokens=128)
    engine = served(config, requests[:1], 8, **sizes)
    model, pages = engine.runner.model, engine.runner.caches.tensors[0]
    weights = [model.layers[0].attn.out.weight, model.layers[1].mlp.experts.gate_up]
    assert {weight.dtype for weight in weights} == {FP8} and pages.itemsize == 1
    alone = found_of(engine)[0]
    for way, how in WAYS.items():
        assert found_of(served(config, requests, 8, **sizes, **how))[0] == alone, way


@pytest.mark.parametrize("numbers", ["float32", "fp8 weights and cache"])
@pytest.mark.parametrize("case", FAMILIES)
def test_logprobs_equal_those_of_a_prefill_over_the_same_text(
    case: str, numbers: str, tmp_path: Path
) -> None:
    """A trainer computes the whole text at once, and must get the bits that the server sent."""
    family, overrides = CASES[case]
    make_tiny(tmp_path, family, **overrides)
    kept, given = NUMBERS[numbers]
    config = invariant(config_of(tmp_path), **given)
    requests = prompts()[1:4]
    sent = found_of(served(config, requests, cache_dtype=kept))
    engine = WholeEngine(config, pages=2000, step_tokens=512, prefix=False, cache_dtype=kept)
    check_prefills(engine, requests, sent)


@pytest.mark.parametrize(
    ("case", "tp", "ep"),
    [
        ("qwen3 gqa 1, head_dim 24", 2, 1),
        ("qwen3 gqa 1, head_dim 24", 4, 1),
        ("minimax_m2 5, top 1", 4, 1),
        ("deepseek_v3 tied", 2, 2),
        ("block fp8, minimax_m2", 2, 1),
        ("block fp8, deepseek_v3", 2, 2),
    ],
)
def test_ranks_give_the_bits_of_a_request_alone(
    case: str, tp: int, ep: int, tmp_path: Path
) -> None:
    """Sums over ranks are in the order of ranks, wherever a request's rows are in a step."""
    folder, sizes = tmp_path, dict[str, Any]()
    if case.startswith("block fp8"):
        _, folder = checkpoints(tmp_path, case.split()[2], 256)
        sizes = dict(cache_dtype="fp8", max_tokens=128)
    else:
        make_tiny(tmp_path, CASES[case][0], **CASES[case][1])
    config = cut(invariant(config_of(folder)), tp, ep)
    requests = prompts()[:4]

    def found(some: list[int], folder: str) -> list[Found]:
        (tmp_path / folder).mkdir()
        with ranked(config, tp, tmp_path / folder, step_tokens=16, **sizes) as engine:
            for name in some:
                engine.submit(name, requests[name], 8, SAMPLINGS[name % len(SAMPLINGS)])
            engine.run()
            return [bits(engine.logprobs[name]) for name in some]

    alone = [found([name], f"alone {name}")[0] for name in range(len(requests))]
    assert found([*range(len(requests))], "together") == alone


def test_what_cannot_be_invariant_is_refused_by_name() -> None:
    gpu = torch.device("cuda")
    for name, kind in (("silu_mul", "compile"), ("attention", "triton"), ("experts", "cute")):
        asked = Kernels(**{name: kind}, invariant=True)
        expected = f"kernels.{name} is {kind}, but kernels.invariant needs torch"
        with pytest.raises(ConfigError, match=f"^{expected}$"):
            select_ops(asked, CPU)
    for name, kind, needed in (
        ("silu_mul", "torch", "triton"),
        ("gated_linear", "cute", "torch"),
        ("sliced_linear", "library", "torch"),
    ):
        asked = Kernels(**{name: kind}, invariant=True)
        expected = f"kernels.{name} is {kind}, but kernels.invariant needs {needed}"
        with pytest.raises(ConfigError, match=f"^{expected}$"):
            select_ops(asked, gpu)


@pytest.mark.parametrize(
    ("key", "cause"),
    [
        ("cache.state_dtype=bfloat16", "ends of steps round the states"),
        ("experts.routing=uniform", "slots choose experts"),
        ("experts.placement=x", "pages choose among copies of an expert"),
        (
            "speculate={method: synthetic, tokens: 1, accept: [0.5]}",
            "drafts are accepted at random",
        ),
    ],
)
def test_a_recipe_that_cannot_be_invariant_is_refused_by_name(key: str, cause: str) -> None:
    changes = ["load.format=dummy", "device=cpu", "parallel.tp=2", "parallel.ep=2", key]
    config = load_config("qwen3-30b-a3b", [*changes, "kernels.invariant=true"])
    with pytest.raises(ConfigError) as caught:
        resolve_config(config)
    name, _, value = key.partition("=")
    name, value = ("speculate.accept", "[0.5]") if name == "speculate" else (name, value)
    assert str(caught.value) == f"{name} is {value}, but {cause}; drop it or kernels.invariant"


def test_eager_cannot_be_invariant_on_a_gpu() -> None:
    recipe = load_config(None, ["kernels.eager=true", "kernels.invariant=true"]).recipe
    refuse_variant(recipe, CPU)
    with pytest.raises(ConfigError) as caught:
        refuse_variant(recipe, torch.device("cuda"))
    expected = "kernels.eager is true, but kernels.invariant needs a GPU's kernels"
    assert str(caught.value) == expected
