"""Adapters of a base in block fp8: the deltas of the rows before they are quantised."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from nanovllm_kernels.fp8_reference import Scaled, quantise_weight
from nanovllm_kernels.norms.reference import silu_mul
from nanovllm_kernels.products import quantise_cases
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.attention.base import AdaptedRows
from nanovllm.layers.linear import Linear, NormLinear
from nanovllm.layers.residual import Added
from nanovllm.models.adapter_layout import AdapterLayout
from tests.adapters.peft_adapters import config_with, save_adapter, texts_of
from tests.adapters.test_families import FAMILIES, MAX_NEW, PROMPTS, mixed
from tests.layers.test_fp8 import Stand, fill, model_of, with_fp8
from tests.models.tiny import CASES, make_tiny
from tests.whole_engine import WholeEngine

KEPT = "embed_tokens", "lm_head", "norm", "gate.", "e_score_correction_bias"


def dequantised(folder: Path, target: Path) -> None:
    """Save the values that a checkpoint has after quantisation to fp8, as float32."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if not any(word in name for word in KEPT):
            tensors[name] = Scaled(*quantise_weight(tensor)).dequantised()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama gqa 3, head_dim 8", "qwen3_moe", "deepseek_v3"])
def test_texts_are_those_of_peft_on_the_dequantised_weights(family: str, tmp_path: Path) -> None:
    name, overrides = CASES[family]
    model, adapters, twin = tmp_path / "model", tmp_path / "adapters", tmp_path / "dequantised"
    make_tiny(model, name, **overrides)
    save_adapter(model, adapters / "a", 7, **FAMILIES[family])
    dequantised(model, twin)
    config = config_with(model, adapters)
    config = replace(config, recipe=replace(config.recipe, quantize="fp8"))
    base, adapted = mixed(WholeEngine(config))
    assert base == texts_of(twin, None, PROMPTS, MAX_NEW)
    assert adapted == texts_of(twin, adapters / "a", PROMPTS, MAX_NEW)
    assert adapted != base != mixed(WholeEngine(config_with(model, adapters)))[0]


@pytest.fixture
def bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def delta_of(linear: Linear, x_TD: Tensor) -> Tensor:
    """Return (x A^T) B in float32, with all ranks."""
    delta = linear.delta
    assert delta is not None
    columns = delta.b_RN.float().split(delta.widths, 1)
    parts = [x_TD.float() @ delta.a_RID[:, i].float().T @ b for i, b in enumerate(columns)]
    return torch.cat(parts, 1)


def results(linear: Linear, x_TD: Tensor, rows: AdaptedRows) -> Tensor:
    """Return a product of the stream x_TD, or of rows x_TD that is added to a stream of ones."""
    if isinstance(linear, NormLinear):
        y_TN, _ = linear(Added(x_TD.clone()), rows)
        return y_TN
    after = linear(x_TD, Added(torch.ones(len(x_TD), len(linear.weight))), rows)
    return after.stream_TD


@torch.inference_mode()
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 60])
def test_deltas_take_the_rows_before_they_are_quantised(num_rows: int) -> None:
    """The deltas exceed the product, so that an error of quantised rows would show.

    A single row is not quantised, as skinny products multiply it.
    """
    model = model_of(ops=with_fp8(Stand()))
    block, layout = model.layers[0], AdapterLayout(model)
    torch.manual_seed(num_rows)
    layout.bind(torch.randn(16, layout.width) * 0.5)
    adapter_T = 0 - (torch.arange(num_rows, dtype=torch.int32) % 3 == 1).int()
    rows, has_any_T = AdaptedRows(adapter_T, torch.zeros(1, dtype=torch.int32)), adapter_T == 0
    for linear in (block.attn.qkv, block.mlp.gate_up, block.mlp.down):
        fill(linear)
        linear.weight_scale.mul_(0.02)
        x_TD = torch.randn(num_rows, linear.weight.shape[1])
        own_TD = x_TD
        if isinstance(linear, NormLinear):
            linear.norm_weight.fill_(0.7)
            own_TD = linear.ops.rms_norm(x_TD, linear.norm_weight, linear.eps)
        found = results(linear, x_TD, rows)
        errors = []
        for source_TD in (own_TD, quantise_cases.reference(own_TD).dequantised()):
            sums_TN = linear._unfused(own_TD).float() + delta_of(linear, source_TD)
            expected = silu_mul(sums_TN) if linear is block.mlp.gate_up else sums_TN
            expected = expected + 1 if linear is block.mlp.down else expected
            error_TN = (found.float() - expected)[has_any_T]
            errors.append(float(error_TN.norm() / expected[has_any_T].norm()))
        assert errors[0] < 0.006 and errors[1] > 0.02
        linear.delta = None
        base = results(linear, x_TD, rows)
        assert torch.equal(found[~has_any_T], base[~has_any_T])
        assert not torch.equal(found[has_any_T], base[has_any_T])
