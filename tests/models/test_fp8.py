"""Checkpoints in block fp8 against transformers with dequantised weights, on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from nanovllm_kernels.fp8_reference import Scaled, quantise_weight
from torch import Tensor, nn

from nanovllm.config import ConfigError
from nanovllm.models.config import read_model_config
from nanovllm.parallel.cut import check_cut
from nanovllm.parallel.mesh import Mesh
from tests.engine.test_ranks import ranked
from tests.models.steps import Steps, load
from tests.models.test_parity import (
    SCHEDULES,
    assert_equal_logits,
    expected_logits,
    our_logits,
    prompts,
)
from tests.models.test_quantised import is_product, quantise_files
from tests.models.tiny import config_of, make_tiny
from tests.whole_engine import GREEDY, WholeEngine

SIZES = {
    "whole blocks": dict(
        hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64,
    ),
    "ragged": dict(
        hidden_size=192, intermediate_size=328, num_attention_heads=6, num_key_value_heads=2,
        head_dim=24,
    ),
    "shares within blocks": dict(
        hidden_size=200, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, tie_word_embeddings=True,
    ),
    "gate": dict(hidden_size=128, intermediate_size=320, num_attention_heads=4, head_dim=64),
}  # fmt: skip
KEPT = "model.layers.1.mlp.down_proj"
NUM_TOKENS = 24


def make_fp8(folder: Path, family: str, sizes: str) -> nn.Module:
    """Save a checkpoint in block fp8. Return the model with its dequantised weights."""
    model = make_tiny(folder, family, **SIZES[sizes])
    quantise_files(folder, torch.float32, (KEPT,))
    for name, parameter in model.named_parameters():
        if is_product(name) and name != f"{KEPT}.weight":
            parameter.data = Scaled(*quantise_weight(parameter.data)).dequantised()
    return model


@pytest.mark.parametrize("sizes", list(SIZES)[:3])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_logits_match_transformers(family: str, sizes: str, tmp_path: Path) -> None:
    expected = expected_logits(make_fp8(tmp_path, family, sizes))
    model = load(tmp_path)
    assert model.layers[0].mlp.down.weight.dtype == torch.float8_e4m3fn
    for name in ("whole", "chunks", "decode"):
        steps = Steps(tmp_path, model, prompts(), Mesh())
        assert_equal_logits(our_logits(steps, SCHEDULES[name]), expected)


@torch.inference_mode()
def generated(model: nn.Module, prompt: Tensor) -> list[int]:
    tokens = prompt.tolist()
    for _ in range(NUM_TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sizes", ["whole blocks", "shares within blocks"])
def test_text_is_that_of_transformers(sizes: str, tp: int, tmp_path: Path) -> None:
    reference = make_fp8(tmp_path, "qwen3", sizes)
    expected = [generated(reference, prompt) for prompt in prompts()]
    limits = dict(pages=24, slots=4, step_tokens=24, max_tokens=90)
    config = config_of(tmp_path)
    alone = nullcontext(WholeEngine(config, **limits))
    with alone if tp == 1 else ranked(config, tp, tmp_path, **limits) as engine:
        for at, prompt in enumerate(prompts()):
            engine.submit(at, prompt.tolist(), NUM_TOKENS, GREEDY)
        engine.run()
    assert [engine.text[at] for at in range(len(expected))] == expected
    block_rows = 128 if sizes == "whole blocks" else 64 // tp
    assert engine.runner.model.layers[0].attn.qkv.operand.block_rows == block_rows


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            "whole blocks",
            "num_attention_heads 8 into shares of 64 inputs of weights in fp8, and 64",
        ),
        ("ragged", "num_attention_heads 6 into shares of 72 inputs of weights in fp8, and 72"),
        ("gate", "intermediate_size 320 into shares of 160 inputs of weights in fp8, and 160"),
    ],
)
def test_a_cut_within_a_block_of_inputs_is_refused(sizes: str, said: str, tmp_path: Path) -> None:
    tp, works = (8, "1, 2, 4") if sizes == "whole blocks" else (2, "1")
    make_fp8(tmp_path, "qwen3", sizes)
    _, model_config = read_model_config(config_of(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_cut(Mesh(0, tp), model_config)
    expected = f"parallel.tp is {tp}; it would cut the model's {said} is not a multiple of 128"
    assert str(caught.value) == f"{expected}; it can be {works}"
