"""Weights in block fp8: selection, sharding, and results of products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from nanovllm_kernels.fp8_reference import (
    Fp8Linear,
    Quantised,
    Scaled,
    quantise_weight,
    spread,
)
from nanovllm_kernels.norms import reference
from nanovllm_kernels.products import quantise_cases as kernels
from torch import Tensor
from transformers.quantizers.quantizers_utils import should_convert_module

from nanovllm.attention.base import ForwardContext
from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.describe import by_rows
from nanovllm.layers.fp8 import BlockFp8, block_rows_of, in_blocks
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.linear import Linear, Placement
from nanovllm.layers.ops import Ops
from nanovllm.layers.products import preference
from nanovllm.layers.residual import Added, Pending
from nanovllm.layers.rope import PlainRope
from nanovllm.models.qwen3 import Qwen3, Qwen3Config
from nanovllm.parallel.mesh import Mesh, Span

NO_ROWS = ForwardContext(None, None)  # type: ignore[arg-type]

CPU = torch.device("cpu")


def model_of(*kept: str, mesh: Mesh = Mesh(), ops: Ops | None = None, **fields: int) -> Qwen3:
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
    return Qwen3(config, mesh, ops or select_ops(Kernels(), CPU), 64)


def fill(linear: Linear, seed: int = 0) -> Tensor:
    """Fill weight and scales. Return the dequantised weight."""
    generator = torch.Generator().manual_seed(seed)
    weight, scale = linear.weight, linear.weight_scale
    weight.copy_(torch.randn(weight.shape, generator=generator).to(weight.dtype))
    scale.copy_(torch.rand(scale.shape, generator=generator) + 0.5)
    return linear.operand.dequantised()


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


ATTENTION = {"layers.0.attn.qkv", "layers.0.attn.out"}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (("model.layers.1.mlp.down_proj", "lm_head"), {"layers.1.mlp.down"}),
        (("mlp.down_proj",), {"layers.0.mlp.down", "layers.1.mlp.down"}),
        (("o_proj",), {"layers.0.attn.out", "layers.1.attn.out"}),
        (("model.layers.0",), {*ATTENTION, "layers.0.mlp.gate_up", "layers.0.mlp.down"}),
        (("model.layers.0.self_attn", "mlp.gate"), ATTENTION),
        # MiniMax lists `gate`, its router. Names in the middle and parts of a name cover nothing.
        (("gate", "mlp", "layers.0", "model.layer", "model.layers.10"), set()),
    ],
)
def test_entries_are_whole_names_from_either_end(
    entries: tuple[str, ...], expected: set[str]
) -> None:
    """An entry covers the modules that transformers does not convert."""
    model = model_of(*entries)
    kept = {name for name, module in model.named_modules() if isinstance(module, Linear)}
    kept = {name for name in kept if not isinstance(model.get_submodule(name).operand, Scaled)}
    assert kept == {"embed", "head", *expected}
    proj = {"qkv": "q_proj", "out": "o_proj", "gate_up": "gate_proj", "down": "down_proj"}
    for layer, room in product((0, 1), ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")):
        part, _, last = room.replace("attn", "self_attn").partition(".")
        converts = should_convert_module(f"model.layers.{layer}.{part}.{proj[last]}", list(entries))
        assert converts is (f"layers.{layer}.{room}" not in expected)


def test_a_norm_is_no_part_of_the_product_behind_it() -> None:
    """Qwen's fp8 checkpoints of experts list norms among their unquantised modules."""
    products = {"layers.0.attn.qkv", "layers.1.mlp.gate_up"}
    named = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    named += [f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up")]
    norms = [
        f"model.layers.{n}.{at}_layernorm" for n in (0, 1) for at in ("input", "post_attention")
    ]
    for names, kept in (((), set()), (named, products)):
        for more in ((), norms):
            model = model_of(*names, *more)
            found = {
                name
                for name, module in model.layers.named_modules(prefix="layers")
                if isinstance(module, Linear) and not isinstance(module.operand, Scaled)
            }
            assert found == kept


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
        ([Span(576, 0, 576)], 128),  # a partial last block starts no other
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
    assert (linear.operand.block_rows, tuple(linear.weight_scale.shape)) == (64, (4, 2))
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
    again, _ = quantise_weight(found)  # with other scales
    assert torch.equal(Scaled(again, scale).dequantised(), found)


class Skinny:
    """Exact stand-in for products of few rows. It supports one row."""

    def fits(self, num_rows: int, weight: Scaled, **kind: bool) -> bool:
        return num_rows == 1

    def linear(self, x_TD: Tensor, weight: Scaled) -> Tensor:
        return (x_TD.float() @ weight.dequantised().T).bfloat16()

    def linear_add(self, x_TD: Tensor, weight: Scaled, residual_TN: Tensor) -> Tensor:
        return residual_TN.add_(self.linear(x_TD, weight))

    def norm_linear(
        self, x_TD: Tensor, norm_weight_D: Tensor, eps: float, weight: Scaled, *, gated: bool
    ) -> Tensor:
        y_TN = self.linear(reference.rms_norm(x_TD, norm_weight_D, eps), weight)
        return reference.silu_mul(y_TN) if gated else y_TN


class Stand:
    """Stand-in for products of many rows that records its calls."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.gated: list[int] = []

    def product(self, x8_TD, x_scale_BT, w8_ND, w_scale, residual_TN, block_rows) -> Tensor:
        self.rows.append(len(x8_TD))
        x_TD = Quantised(x8_TD, x_scale_BT).dequantised()
        y_TN = x_TD @ Scaled(w8_ND, w_scale, block_rows).dequantised().T
        if residual_TN is None:
            return y_TN.bfloat16()
        return residual_TN.copy_(y_TN + residual_TN.float())

    def product_and_gate(self, x8: Quantised, weight: Scaled) -> Quantised:
        self.gated.append(len(x8.values_XD))
        return kernels.silu_mul_reference(x8.dequantised() @ weight.dequantised().T)

    def linear(self) -> Fp8Linear:
        def obstacle(num_features: int, width: int, block_rows: int) -> str | None:
            return "too narrow" if width < 64 else None

        makers = kernels.reference, kernels.norm_reference, self.product_and_gate
        return Fp8Linear(self.product, obstacle, Skinny(), *makers)


def with_fp8(stand: Stand) -> Ops:
    return replace(select_ops(Kernels(), CPU), products=preference({"fp8_linear": stand.linear()}))


@pytest.fixture
def bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@torch.inference_mode()
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("kept", [(), ("model.layers.0.mlp.down_proj",)], ids=["", "down kept"])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 60])
def test_an_mlp_by_rows(num_rows: int, kept: tuple[str, ...]) -> None:
    """A row uses skinny products; more rows are quantised.

    Products of more than 16 rows also apply the gate, and quantise their result.
    """
    stand = Stand()
    ops = with_fp8(stand)
    mlp = model_of(*kept, ops=ops).layers[0].mlp
    torch.manual_seed(0)
    gate_up = fill(mlp.gate_up) * 0.05
    mlp.gate_up.weight_scale.mul_(0.05)
    down = mlp.down.weight if kept else fill(mlp.down, 1) * 0.05
    (down.normal_(0, 0.05) if kept else mlp.down.weight_scale.mul_(0.05))
    mlp.gate_up.norm_weight.fill_(0.7)
    for is_added in (True, False):
        x_TD, update_TD = torch.randn(num_rows, 192), torch.randn(num_rows, 192)
        sum_TD = x_TD if is_added else x_TD + update_TD
        normed = reference.rms_norm(sum_TD, mlp.gate_up.norm_weight, 1e-6).float()
        y_TF = reference.silu_mul(normed @ gate_up.float().T)
        expected = sum_TD.float() + y_TF @ down.float().T
        after = mlp(Added(x_TD.clone()) if is_added else Pending(x_TD.clone(), update_TD), NO_ROWS)
        found, _ = ops.norm(after, torch.ones(192), 1e-6)
        expected = reference.rms_norm(expected, torch.ones(192), 1e-6).bfloat16()
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert float(error) < 0.05
    gated = [num_rows] * 2 if num_rows > 16 and not kept else []
    products = 2 * [num_rows] if kept or gated else 4 * [num_rows]
    assert stand.rows == ([] if num_rows == 1 else products)
    assert stand.gated == gated


@pytest.mark.usefixtures("bfloat16")
def test_tables_say_what_multiplies() -> None:
    ops = with_fp8(Stand())
    block = model_of(ops=ops, head_dim=8).layers[1]
    tables = [linear.by_rows for linear in (block.attn.qkv, block.attn.out, block.mlp.gate_up)]
    assert [by_rows(table, (1, 2, 16, 17, 64)) for table in tables] == [
        "norm+skinny 1, fp8 2-64",
        "skinny+residual 1, dequantised 2-64",
        "norm+skinny+gate 1, fp8 2-16, fp8+gate 17-64",
    ]


def test_kernels_are_of_bfloat16() -> None:
    ops = with_fp8(Stand())
    table = model_of(ops=ops).layers[1].attn.qkv.by_rows
    assert by_rows(table, (1, 64)) == "dequantised 1-64"


@torch.inference_mode()
@pytest.mark.usefixtures("bfloat16")
def test_quantised_rows_count_as_rows() -> None:
    """A shared expert on several ranks multiplies them without the residual stream."""
    stand = Stand()
    down = model_of(ops=with_fp8(stand), mesh=Mesh(1, 2)).layers[0].mlp.down
    weight_ND, x8 = fill(down), kernels.reference(torch.randn(20, 128))
    torch.testing.assert_close(
        down.product(x8), (x8.dequantised() @ weight_ND.T).bfloat16(), rtol=0.02, atol=0.1
    )
    assert stand.rows == [20]
