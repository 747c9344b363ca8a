"""Weights in block fp8: which they are, how they are cut, and what products with them give."""

from __future__ import annotations

import pytest
import torch
from nanovllm_kernels.fp8_reference import Scaled, quantise_weight, spread
from torch import Tensor

from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.fp8 import BlockFp8, block_rows_of, in_blocks
from nanovllm.layers.linear import Linear, Placement
from nanovllm.layers.ops import select_ops
from nanovllm.layers.residual import Added
from nanovllm.layers.rope import PlainRope
from nanovllm.models.qwen3 import Qwen3, Qwen3Config
from nanovllm.parallel.mesh import Mesh, Span

CPU = torch.device("cpu")


def model_of(*kept: str, mesh: Mesh = Mesh(), **fields: int) -> Qwen3:
    sizes = dict(
        vocab_size=200, hidden_size=192, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=64,
    )  # fmt: skip
    config = Qwen3Config(
        **{**sizes, **fields},
        rms_norm_eps=1e-6,
        rope_parameters=PlainRope(rope_theta=1e4),
        quantization_config=BlockFp8("fp8", (128, 128), modules_to_not_convert=frozenset(kept)),
    )
    return Qwen3(config, mesh, select_ops(Kernels(), CPU), 64)


def fill(linear: Linear, seed: int = 0) -> Tensor:
    """Fills weight and scales; returns the weight that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    weight, scale = linear.weight, linear.weight_scale
    weight.copy_(torch.randn(weight.shape, generator=generator).to(weight.dtype))
    scale.copy_(torch.rand(scale.shape, generator=generator) + 0.5)
    return Scaled(weight, scale, linear.block_rows).dequantised()


def test_products_of_blocks_are_fp8_and_nothing_else_is() -> None:
    model = model_of()
    for name, parameter in model.named_parameters():
        is_product = name.startswith("layers.") and name.endswith(".weight")
        expected = torch.float8_e4m3fn if is_product else torch.float32
        assert (parameter.dtype, parameter.device) == (expected, CPU), name
    shapes = [
        tuple(getattr(model.layers[1].mlp, n).weight_scale.shape) for n in ("gate_up", "down")
    ]
    assert shapes == [(4, 2), (2, 2)]


def test_modules_are_kept_by_whole_names() -> None:
    model = model_of(
        "model.layers.1.mlp.down_proj", "mlp.down_proj", "lm_head", "model.layers.0.mlp"
    )
    kept = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    kept = [name for name in kept if not model.get_submodule(name).block_rows]
    assert kept == ["embed", "layers.1.mlp.down", "head"]


def test_half_of_a_fused_product_cannot_be_kept() -> None:
    with pytest.raises(ConfigError) as caught:
        model_of("model.layers.1.mlp.up_proj")
    assert str(caught.value) == (
        "quantization_config.modules_to_not_convert has model.layers.1.mlp.up_proj without "
        "model.layers.1.mlp.gate_proj, which is multiplied together with it"
    )


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([Span(512, 0, 512)], 128),
        ([Span(576, 0, 576)], 128),  # a ragged end is no start
        ([Span(576, 0, 576), Span(128, 0, 128)], 64),
        ([Span(768, 192, 192)], 64),
        ([Span(96, 0, 96), Span(96, 0, 96)], 32),
        ([Span(256, 128, 128), Span(96, 48, 48), Span(96, 48, 48)], 16),
    ],
)
def test_rows_that_share_a_scale(spans: list[Span], expected: int) -> None:
    parts = tuple((str(nth), span) for nth, span in enumerate(spans))
    assert block_rows_of(Placement(0, parts)) == expected


def test_shares_are_cut_in_blocks() -> None:
    linear = model_of(mesh=Mesh(1, 2)).layers[0].attn.qkv
    assert (linear.block_rows, tuple(linear.weight_scale.shape)) == (64, (4, 2))
    assert linear.placements["weight_scale"].parts == (
        ("q", Span(4, 2, 2)),
        ("k", Span(2, 1, 1)),
        ("v", Span(2, 1, 1)),
    )
    assert in_blocks(Span(300, 128, 172), 128) == Span(3, 1, 2)


def test_shares_of_inputs_start_with_a_block() -> None:
    with pytest.raises(ConfigError) as caught:
        model_of(mesh=Mesh(1, 2), intermediate_size=384)
    expected = "parallel.tp cuts 384 inputs of block fp8 at 192, not at a multiple of 128"
    assert str(caught.value) == expected


@torch.inference_mode()
@pytest.mark.parametrize("fields", [{}, dict(head_dim=24, intermediate_size=200)])
def test_products_are_those_of_the_dequantised_weight(fields: dict[str, int]) -> None:
    block = model_of(**fields).layers[0]
    x_TD, ops = torch.randn(3, 192, generator=torch.Generator().manual_seed(1)), block.attn.ops
    for linear in (block.attn.qkv, block.mlp.gate_up):
        weight_ND = fill(linear)
        linear.norm_weight.fill_(0.7)
        y, stream = linear(Added(x_TD.clone()))
        expected = ops.rms_norm(x_TD, linear.norm_weight, 1e-6) @ weight_ND.T
        expected = ops.silu_mul(expected) if linear.gated else expected
        torch.testing.assert_close(y, expected)
        assert torch.equal(stream.stream_TD, x_TD)
    weight_ND, y_TF = fill(block.mlp.down), torch.randn(3, block.mlp.down.weight.shape[1])
    after, _ = ops.norm(block.mlp.down(y_TF, Added(x_TD.clone())), torch.ones(192), 1e-6)
    expected = ops.rms_norm(x_TD + y_TF @ weight_ND.T, torch.ones(192), 1e-6)
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize(("rows", "width"), [(128, 128), (300, 130), (1, 500)])
def test_quantising_a_weight_is_exact_to_three_bits(rows: int, width: int) -> None:
    weight_ND = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    weight_ND[:128, :128] = 0
    quantised, scale = quantise_weight(weight_ND)
    assert scale.shape == (-(-rows // 128), -(-width // 128)) and scale[0, 0] == 1
    found = Scaled(quantised, scale).dequantised()
    largest = spread(scale, rows, width) * 448
    assert bool((found - weight_ND).abs().le(weight_ND.abs() / 16 + largest * 2.0**-18).all())
    again, _ = quantise_weight(found)  # in steps of its own
    assert torch.equal(Scaled(again, scale).dequantised(), found)
