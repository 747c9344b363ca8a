"""`kernels.invariant` on a GPU: the bits of a request's log-probabilities, however it is served.

The same ways as in tests/models/test_invariant.py, with CUDA graphs and up to 64 rows in a step.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from nanovllm.config import Config, Kernels, Speculate
from tests.gpu.test_engine import SHAPE
from tests.models.test_invariant import NUM_NEW, SAMPLINGS, Found, bits, check_prefills
from tests.models.tiny import config_of, make_tiny
from tests.whole_engine import WholeEngine

NUM_COMPARED, NUM_BESIDE = 6, 58
DENSE = dict(SHAPE, max_position_embeddings=1024)
MOE = dict(DENSE, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": DENSE,
    "llama": DENSE,
    "qwen3_moe": MOE,
    "minimax_m2": dict(
        DENSE, num_local_experts=16, num_experts_per_tok=4, intermediate_size=256, rotary_dim=64
    ),
    "deepseek_v3": dict(
        vocab_size=2000, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=256,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        head_dim=64, n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=1, n_group=2,
        topk_group=1, first_k_dense_replace=1, max_position_embeddings=1024,
    ),
    "qwen3_next": dict(
        # So few tokens that drafts by earlier text are found in random texts.
        MOE, vocab_size=256, num_hidden_layers=4, shared_expert_intermediate_size=256,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "half of the requests": dict(slots=32),
    "chunks of 80 tokens": dict(step_tokens=80),
    "a cache that is too small": dict(pages=160, prefix=False),
    "drafts": dict(speculate=Speculate(method="ngram", tokens=3, min_match=1, adapt=False)),
    "without graphs": dict(cuda_graphs=False),
}


def prompts() -> list[list[int]]:
    """Return prompts of 1 to 300 tokens. Of the first six, two share 40 tokens, one repeats."""
    draw = np.random.default_rng(5)
    found = [draw.integers(0, 200, length).tolist() for length in (1, 137, 300, 64)]
    found = [*found, found[2][:40] + found[1], [7, 9, 11, 13] * 6]
    return found + [draw.integers(0, 200, n).tolist() for n in draw.integers(1, 120, NUM_BESIDE)]


def made(family: str, folder: Path, **recipe: Any) -> Config:
    make_tiny(folder, family, **FAMILIES[family]).bfloat16().save_pretrained(folder)
    config = config_of(folder)
    return replace(config, recipe=replace(config.recipe, device="cuda", **recipe))


def found_by(
    config: Config, requests: list[list[int]], num_new: int = NUM_NEW, **how: Any
) -> tuple[list[Found], WholeEngine]:
    """Return the logprobs of the first requests, and the engine after it served all of them."""
    kernels = Kernels(invariant=True, cuda_graphs=how.pop("cuda_graphs", True))
    config = replace(config, recipe=replace(config.recipe, kernels=kernels))
    sizes = dict(pages=1500, page_tokens=16, slots=64, step_tokens=512, max_tokens=512)
    engine = WholeEngine(config, **(sizes | how))
    for name, prompt in enumerate(requests):
        engine.submit(name, prompt, num_new, SAMPLINGS[name % len(SAMPLINGS)])
    engine.run()
    return [bits(engine.logprobs[name]) for name in range(min(NUM_COMPARED, len(requests)))], engine


@pytest.fixture(autouse=True)
def free() -> Any:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_serving_gives_the_bits_of_a_request_alone(
    family: str, tmp_path: Path
) -> None:
    config, requests = made(family, tmp_path), prompts()
    together, _ = found_by(config, requests)
    for name in range(0, NUM_COMPARED, len(SAMPLINGS)):  # these have the first sampling
        assert found_by(config, [requests[name]])[0] == [together[name]]
    engines = {}
    for way, how in WAYS.items():
        found, engines[way] = found_by(config, requests, **how)
        assert found == together, way
    assert engines["a cache that is too small"].scheduler.snapshot().num_preemptions > 0
    assert engines["drafts"].scheduler.stats().draft_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_a_prefill_over_the_same_text(family: str, tmp_path: Path) -> None:
    """A trainer computes the whole text at once, and must get the bits that the server sent."""
    config, requests = made(family, tmp_path), prompts()[:3]
    sent, _ = found_by(config, requests)
    kernels = Kernels(invariant=True)
    config = replace(config, recipe=replace(config.recipe, kernels=kernels))
    engine = WholeEngine(
        config, pages=3000, page_tokens=16, slots=64, step_tokens=4096, max_tokens=512, prefix=False
    )
    check_prefills(engine, requests, sent)


@pytest.mark.gpu
def test_an_fp8_cache_gives_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    config, requests = made("qwen3", tmp_path), prompts()
    together, _ = found_by(config, requests, cache_dtype="fp8")
    assert found_by(config, requests[:1], cache_dtype="fp8")[0] == together[:1]
    assert found_by(config, requests, cache_dtype="fp8", step_tokens=80)[0] == together
    assert found_by(config, requests)[0] != together  # a cache of 16 bits


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_fp8_weights_give_the_same_bits_in_any_batch(family: str, tmp_path: Path) -> None:
    """Products of few rows and of many have other kernels, which must add in one order."""
    config, requests = made(family, tmp_path, quantize="fp8"), prompts()
    together, _ = found_by(config, requests)
    assert found_by(config, requests[:1])[0] == together[:1]
    assert found_by(config, requests, step_tokens=80)[0] == together
    engine = WholeEngine(
        replace(config, recipe=replace(config.recipe, kernels=Kernels(invariant=True))),
        pages=3000, page_tokens=16, slots=64, step_tokens=4096, max_tokens=512, prefix=False,
    )  # fmt: skip
    check_prefills(engine, requests[:3], together[:3])
