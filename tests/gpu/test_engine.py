"""The whole engine on a GPU in bf16 against transformers in float32, teacher-forced.

Small errors would change the text at near-ties. Therefore the reference scores the engine's tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from nanovllm.config import Config, Kernels, without_eager
from nanovllm.layers.kernels import FUSED
from nanovllm.wire import Sampling
from tests.models.tiny import config_of, make_tiny
from tests.whole_engine import WholeEngine, prompts_of

SHAPE = dict(
    vocab_size=2000,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
)
MODES = {
    "flash, graphs": Kernels(attention="flash"),
    "flash, eager": Kernels(attention="flash", cuda_graphs=False),
    "flash, graphs of decode only": Kernels(attention="flash", mixed_graph_tokens=0),
    "triton, graphs": Kernels(attention="triton"),
    "compile, graphs": Kernels(**dict.fromkeys(FUSED, "compile")),
    "as on GPUs without measured kernels": Kernels(
        attention="triton", decode="triton", skinny_linear="torch", gated_linear="torch",
        **dict.fromkeys(FUSED, "compile"),
    ),
    "torch, eager": without_eager(Kernels(eager=True)),
}  # fmt: skip
# Maximum error of a log-probability. In bf16, 4 layers of large weights have 0.05 to 0.15.
TOLERANCE = 0.25


WIDE = {  # widths of Qwen3-0.6B, whose products of few rows use the CuTe DSL kernel
    **SHAPE,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
Made = tuple[Config, PreTrainedModel]


def made(folder: Path, shape: dict[str, int]) -> Made:
    model = make_tiny(folder, "qwen3", **shape).bfloat16()
    model.save_pretrained(folder)
    return config_of(folder), model.float()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("tiny"), SHAPE)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("wide"), WIDE)


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, prompt: list[int], text: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page_tokens", [16, 128])
def test_greedy_choices_agree_with_the_reference(tiny, mode: str, page_tokens: int) -> None:
    engine = agreeing(tiny, MODES[mode], page_tokens)
    if "graphs" in mode:
        modes = engine.runner.steps_by_mode
        assert modes["FULL/decode"] > 20
        piecewise = modes["PIECEWISE/mixed"] + modes["PIECEWISE/prefill"]
        assert (piecewise == 0) == ("only" in mode)
        assert piecewise == 0 or modes["NONE/mixed"] + modes["NONE/prefill"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("skinny", ["cute", "torch"])
@pytest.mark.parametrize("graphs", [True, False])
def test_products_of_few_rows_agree_with_the_reference(wide, skinny: str, graphs: bool) -> None:
    kernels = Kernels(attention="flash", skinny_linear=skinny, cuda_graphs=graphs)
    products = agreeing(wide, kernels, 128).runner.model.layers[1].mlp.down
    assert (products.by_rows[12].name == "skinny+residual") == (skinny == "cute")


def agreeing(made: Made, kernels: Kernels, page_tokens: int) -> WholeEngine:
    """Submit a request per step. Return the engine if each token is nearly the best."""
    config, model = made
    recipe = replace(config.recipe, device="cuda", kernels=kernels)
    engine = WholeEngine(
        replace(config, recipe=recipe), page_tokens=page_tokens, slots=12, step_tokens=64
    )
    prompts = prompts_of(12)
    asked = Sampling(temperature=0.0, logprobs=1)
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, 30, asked)
        engine.loop.step()
    engine.run()
    worst = 0.0
    for i, prompt in enumerate(prompts):
        expected = reference_logprobs(model, prompt, engine.text[i])
        for at, entry in enumerate(engine.logprobs[i]):
            best = expected[at].max().item()
            assert best - expected[at, entry.token_id].item() < TOLERANCE, "not a near-tie"
            worst = max(worst, abs(expected[at, entry.token_id].item() - entry.logprob))
    assert 0 < worst < TOLERANCE
    return engine


@pytest.mark.gpu
def test_a_page_hit_and_a_preemption_stay_near_the_reference(tiny) -> None:
    config, model = tiny
    recipe = replace(config.recipe, device="cuda")
    engine = WholeEngine(
        replace(config, recipe=recipe), pages=40, page_tokens=16, slots=12, step_tokens=64
    )
    prompts = prompts_of(14, seed=3)
    prompts += prompts[::-1]  # pages of the last ones are still cached
    for i, prompt in enumerate(prompts[:14]):
        engine.submit(i, prompt, 40)
    engine.run()
    for i, prompt in enumerate(prompts[14:], start=14):
        engine.submit(i, prompt, 40)
        engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    assert sum(engine.cached.values()) > 0
    for i, prompt in enumerate(prompts):
        expected = reference_logprobs(model, prompt, engine.text[i])
        chosen = expected.gather(1, torch.tensor(engine.text[i])[:, None])[:, 0]
        assert (expected.max(1).values - chosen).max().item() < TOLERANCE
