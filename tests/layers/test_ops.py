"""References of the fused operations, and products with the operations around them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nanovllm_kernels.fp8_reference import FP8, Scaled
from nanovllm_kernels.norms import reference
from nanovllm_kernels.products import library_linear
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nanovllm.config import Kernels
from nanovllm.layers.describe import by_rows
from nanovllm.layers.kernels import select_ops
from nanovllm.layers.linear import AddLinear, NormLinear
from nanovllm.layers.ops import Ops
from nanovllm.layers.products import Fusion, preference
from nanovllm.layers.residual import Added, Pending
from nanovllm.parallel.mesh import Mesh, Span

CPU = torch.device("cpu")
REFERENCE = Ops(
    reference.rms_norm,
    reference.add_rms_norm,
    reference.silu_mul,
    reference.sigmoid_mul,
    reference.rope_store,
)


def test_slices_of_a_gate_are_summed_up() -> None:
    gate_ITF, x_TF = torch.tensor([[[3.0, -200.0]], [[-3.0, 0.0]]]), torch.tensor([[8.0, 8.0]])
    assert reference.sigmoid_mul(gate_ITF, x_TF).tolist() == [[4.0, 0.0]]


class Doubled:
    """Stand-in for products of few rows, with doubled results. It supports one or two rows."""

    def fits(self, num_rows: int, weight_ND: Tensor, **kind: bool) -> bool:
        return num_rows <= 2

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        return 2 * x_TD @ weight_ND.T

    def linear_add(self, x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor) -> Tensor:
        return residual_TN.add_(self.linear(x_TD, weight_ND))

    def norm_linear(
        self, x_TD: Tensor, norm_weight_D: Tensor, eps: float, weight_ND: Tensor, *, gated: bool
    ) -> Tensor:
        normed = reference.rms_norm(x_TD, norm_weight_D, eps)
        y_TN = normed @ weight_ND.T
        return 2 * (reference.silu_mul(y_TN) if gated else y_TN)


FUSED = replace(REFERENCE, products=preference({"skinny_linear": Doubled()}))


def norm_linear(ops: Ops, *, gated: bool) -> NormLinear:
    torch.manual_seed(0)
    linear = NormLinear(8, 1e-6, {"": Span(12, 0, 12)}, ops, gated=gated)
    linear.weight.normal_()
    linear.norm_weight.normal_()
    return linear


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("num_rows", "factor"), [(2, 2.0), (3, 1.0)])
def test_the_first_product_that_fits_computes_norm_and_gate(
    num_rows: int, factor: float, gated: bool
) -> None:
    fused, apart = norm_linear(FUSED, gated=gated), norm_linear(REFERENCE, gated=gated)
    x = torch.randn(num_rows, 8)
    actual, after = fused(Added(x))
    expected, _ = apart(Added(x))
    torch.testing.assert_close(actual, factor * expected)
    assert torch.equal(after.stream_TD, x)
    # A product that the stream lacks is added by a norm of its own. A gate is then separate, too.
    stream, update = torch.randn(2, num_rows, 8)
    x_TD, total = REFERENCE.norm(Pending(stream.clone(), update), apart.norm_weight, 1e-6)
    y_TN = factor * x_TD @ apart.weight.T
    actual, after = fused(Pending(stream, update))
    torch.testing.assert_close(actual, reference.silu_mul(y_TN) if gated else y_TN)
    torch.testing.assert_close(after.stream_TD, total.stream_TD)


def test_a_table_has_the_implementation_of_each_number_of_rows() -> None:
    weight, gated = torch.empty(12, 8), Fusion(norm=True, gate=True)
    table = FUSED.by_rows(weight, gated)
    assert by_rows(table, range(1, 5)) == "norm+skinny+gate 1-2, library 3-4"
    assert FUSED.by_rows(torch.empty(12, 8), gated) is table
    assert FUSED.by_rows(torch.empty(12, 9), gated) is not table
    assert by_rows(FUSED.by_rows(weight, Fusion(gate=True)), [1]) == "skinny 1"
    assert by_rows(FUSED.by_rows(weight, Fusion()), [1, 3]) == "skinny 1, library 3"
    assert by_rows(REFERENCE.by_rows(weight, Fusion()), [1]) == "library 1"


class DoubledGate:
    """Stand-in for the fused gate, with doubled results. It supports three rows or more."""

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool:
        return num_rows >= 3

    def __call__(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        return 2 * reference.silu_mul(x_TD @ weight_ND.T)


@pytest.mark.parametrize(("num_rows", "factor"), [(2, 1.0), (3, 2.0)])
def test_the_fused_gate_takes_steps_of_many_rows(num_rows: int, factor: float) -> None:
    ops = replace(REFERENCE, products=preference({"gated_linear": DoubledGate()}))
    fused, apart = norm_linear(ops, gated=True), norm_linear(REFERENCE, gated=True)
    x = torch.randn(num_rows, 8)
    actual, after = fused(Added(x))
    torch.testing.assert_close(actual, factor * apart(Added(x))[0])
    assert torch.equal(after.stream_TD, x)
    # Products without a gate do not use it.
    plain, _ = norm_linear(ops, gated=False)(Added(x))
    assert torch.equal(plain, norm_linear(REFERENCE, gated=False)(Added(x))[0])
    table = ops.by_rows(torch.empty(12, 8), Fusion(gate=True))
    assert by_rows(table, range(1, 5)) == "library 1-2, quack+gate 3-4"


def test_a_product_without_other_operations_is_one_tensor() -> None:
    """Products in slices are for operations that sum them. `Fusion()` has none."""
    kernels = {"sliced_linear": library_linear.SLICED_LINEAR}
    ops, weight = replace(REFERENCE, products=preference(kernels)), torch.empty(48, 96)
    assert by_rows(ops.by_rows(weight, Fusion(sliced=True)), [64, 65]) == "library 64, sliced 65"
    assert by_rows(ops.by_rows(weight, Fusion()), [64, 65]) == "library 64-65"


def test_tables_are_of_one_type_of_weight() -> None:
    weight_ND, scale = torch.empty(128, 128).to(FP8), torch.ones(16, 1)
    whole, parts = Scaled(weight_ND, scale[:1]), Scaled(weight_ND, scale, 8)
    in_float32 = Scaled(weight_ND, scale[:1], 128, torch.float32)
    tables = [REFERENCE.by_rows(one, Fusion()) for one in (whole, parts, in_float32)]
    assert len({id(table) for table in tables}) == 3


@pytest.mark.parametrize(
    ("num_rows", "num_features", "num_inputs", "slices"),
    [
        (64, 1024, 2048, 1),  # served by other kernels
        (65, 1024, 2048, 4),
        (256, 1024, 3072, 4),
        (256, 4096, 12288, 2),
        (384, 4096, 12288, 2),
        (385, 4096, 12288, 1),  # fills a GPU without slices
        (192, 6144, 4096, 2),
        (160, 4096, 1024, 1),  # too many rows of x
        (160, 1024, 1032, 1),  # width not divisible
    ],
)
def test_products_of_some_hundred_rows_are_sliced(
    num_rows, num_features, num_inputs, slices
) -> None:
    assert library_linear.num_slices(num_rows, num_features, num_inputs) == slices


def add_linear(ops: Ops, weight_ND: Tensor) -> AddLinear:
    num_features, num_inputs = weight_ND.shape
    linear = AddLinear(Span(num_inputs, 0, num_inputs), num_features, Mesh(), ops)
    linear.weight.copy_(weight_ND)
    return linear


@torch.inference_mode()
def test_slices_are_summed_up_by_what_follows() -> None:
    torch.manual_seed(0)
    x, weight, norm_weight = torch.randn(65, 96), torch.randn(48, 96), torch.randn(48)
    stream = torch.randn(65, 48)
    ops = select_ops(Kernels(sliced_linear="library"), CPU)
    pending = add_linear(ops, weight)(x, Added(stream))
    slices = pending.update.parts_ITN
    assert slices.shape == (4, 65, 48)
    torch.testing.assert_close(slices[1], x[:, 24:48] @ weight[:, 24:48].T)
    assert pending.stream_TD is stream
    found, summed = ops.norm(pending, norm_weight, 1e-6)
    expected, total = REFERENCE.norm(Pending(stream, x @ weight.T), norm_weight, 1e-6)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(summed.stream_TD, total.stream_TD, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "added"), [(1023, 8, False), (1024, 8, True), (1024, 16, False)]
)
def test_the_library_adds_the_stream_in_steps_of_many_rows(
    num_rows, num_inputs, added, monkeypatch
) -> None:
    monkeypatch.setattr(library_linear, "LEAST_ADDED_WORK", 1024 * 8 * 12)
    monkeypatch.setattr(library_linear, "MOST_ADDED_INPUTS", 8)
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, num_inputs), torch.randn(12, num_inputs)
    stream = torch.randn(num_rows, 12)
    expected = stream + x @ weight.T
    ops = select_ops(Kernels(added_linear="library"), CPU)
    found = add_linear(ops, weight)(x, Added(stream))
    assert found.stream_TD is stream
    assert isinstance(found, Added if added else Pending)
    total = stream if added else stream + found.update
    torch.testing.assert_close(total, expected)


def test_norms_round_where_transformers_does() -> None:
    """Results are equal bit for bit in bfloat16: normalised in float32, rounded, then scaled."""
    torch.manual_seed(0)
    theirs = Qwen3RMSNorm(128, eps=1e-6).bfloat16()
    theirs.weight.data.normal_(1, 0.3)
    x, residual = torch.randn(2, 7, 128).mul(3).bfloat16()
    with torch.inference_mode():
        assert torch.equal(reference.rms_norm(x, theirs.weight, 1e-6), theirs(x))
        normed, total = reference.add_rms_norm(x, residual, theirs.weight, 1e-6)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, theirs(total))


def test_rope_store_writes_its_cells_and_no_others() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 4 * 8)  # heads: 2 q, 1 k, 1 v, of width 8
    k_cache, v_cache = torch.full((2, 5, 4, 1, 8), torch.nan)
    quarter_turn = torch.cat([torch.zeros(6, 4), torch.ones(6, 4)], dim=1)
    cells = torch.tensor([17, 4, 6])
    q = reference.rope_store(
        qkv, None, None, 0.0, quarter_turn, torch.tensor([5, 0, 2]), cells, k_cache, v_cache
    )
    heads = qkv.view(3, 4, 8)
    turned = torch.cat([-heads[..., 4:], heads[..., :4]], dim=-1)
    assert torch.equal(q, turned[:, :2])
    assert torch.equal(k_cache.view(20, 8)[cells], turned[:, 2])
    assert torch.equal(v_cache.view(20, 8)[cells], heads[:, 3])
    assert int(k_cache.isnan().sum()) == int(v_cache.isnan().sum()) == 17 * 8
