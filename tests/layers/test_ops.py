"""References of the fused operations, and the implementations that a recipe selects."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import pytest
import torch
from nanovllm_kernels.norms import reference
from nanovllm_kernels.products import library_linear
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.describe import by_rows
from nanovllm.layers.ops import OPERATIONS, Ops, select_ops
from nanovllm.layers.residual import Added, Pending, Residual

CPU = torch.device("cpu")
REFERENCE = Ops(
    reference.rms_norm,
    reference.add_rms_norm,
    reference.silu_mul,
    reference.sigmoid_mul,
    reference.rope_store,
)


def test_a_cpu_runs_the_references() -> None:
    assert select_ops(Kernels(), CPU) == REFERENCE


def test_a_gpu_can_run_the_references() -> None:
    kernels = Kernels(**dict.fromkeys(OPERATIONS, "torch"))
    assert select_ops(kernels, torch.device("cuda")) == REFERENCE


def test_a_gpu_runs_triton_by_default() -> None:
    chosen = select_ops(Kernels(rms_norm="torch"), torch.device("cuda"))
    assert chosen.rms_norm is reference.rms_norm
    for name in ("add_rms_norm", "silu_mul", "sigmoid_mul", "rope_store"):
        kernel, meaning = getattr(chosen, name), getattr(reference, name)
        assert kernel.__name__ == name
        assert kernel is not meaning
        assert len(signature(kernel).parameters) == len(signature(meaning).parameters)


def test_triton_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        select_ops(Kernels(silu_mul="triton"), CPU)
    assert str(caught.value) == "kernels.silu_mul is triton, which needs a GPU; use torch"


def test_compiling_on_a_cpu_takes_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        select_ops(Kernels(rope_store="compile"), CPU)
    expected = "kernels.rope_store is compile, which needs g++ on a CPU; use torch"
    assert str(caught.value) == expected


@torch.inference_mode()
def test_compiled_references_mean_the_same_for_any_number_of_tokens() -> None:
    """They also write to the cache itself, not to a copy."""
    names = ("rms_norm", "add_rms_norm", "silu_mul", "sigmoid_mul", "rope_store")
    ops = select_ops(Kernels(**dict.fromkeys(names, "compile")), CPU)
    torch.manual_seed(0)
    norm_weight, table = torch.randn(16), torch.randn(32, 16)
    for tokens in (5, 9):
        x, residual = torch.randn(tokens, 16), torch.randn(tokens, 16)
        close(ops.rms_norm(x, norm_weight, 1e-6), reference.rms_norm(x, norm_weight, 1e-6))
        expected = reference.add_rms_norm(x, residual, norm_weight, 1e-6)
        close(ops.add_rms_norm(x, residual, norm_weight, 1e-6), expected)
        close(ops.silu_mul(x), reference.silu_mul(x))
        close(ops.sigmoid_mul(x, residual), reference.sigmoid_mul(x, residual))
        qkv, cells = torch.randn(tokens, 8 * 16), torch.randperm(40)[:tokens]
        arguments = qkv, norm_weight, norm_weight, 1e-6, table, torch.arange(tokens), cells
        caches = [torch.zeros(2, 10, 4, 2, 16) for _ in range(2)]
        found = ops.rope_store(*arguments, *caches[0])
        close(found, reference.rope_store(*arguments, *caches[1]))
        close(caches[0], caches[1])
        assert int((caches[0] != 0).any(-1).any(-1).sum()) == 2 * tokens


def test_slices_of_a_gate_are_summed_up() -> None:
    gate_ITF, x_TF = torch.tensor([[[3.0, -200.0]], [[-3.0, 0.0]]]), torch.tensor([[8.0, 8.0]])
    assert reference.sigmoid_mul(gate_ITF, x_TF).tolist() == [[4.0, 0.0]]


def close(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_fused_gate_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError) as caught:
        select_ops(Kernels(gated_linear="cute"), CPU)
    reason = "it is used on Hopper GPUs only"
    assert str(caught.value) == f"kernels.gated_linear is cute, but {reason}; use torch"


class Doubled:
    """Stand-in for the fused gate with doubled results. It supports three rows or more."""

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool:
        return num_rows >= 3

    def __call__(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        return 2 * reference.silu_mul(x_TD @ weight_ND.T)


@pytest.mark.parametrize(("num_rows", "factor"), [(2, 1.0), (3, 2.0)])
def test_the_fused_gate_takes_steps_of_many_rows(num_rows: int, factor: float) -> None:
    torch.manual_seed(0)
    x, weight, norm_weight = torch.randn(num_rows, 8), torch.randn(12, 8), torch.randn(8)
    fused = replace(REFERENCE, gated_linear=Doubled())
    actual, after = normed(fused, Added(x), norm_weight, weight, gated=True)
    expected, _ = normed(REFERENCE, Added(x), norm_weight, weight, gated=True)
    torch.testing.assert_close(actual, factor * expected)
    assert torch.equal(after.stream_TD, x)
    # Products without a gate do not use it.
    plain, _ = normed(fused, Added(x), norm_weight, weight)
    assert torch.equal(plain, normed(REFERENCE, Added(x), norm_weight, weight)[0])


def normed(
    ops: Ops, residual: Residual, norm_weight, weight, *, gated=False
) -> tuple[Tensor, Added]:
    table = ops.normed(weight, gated=gated, is_added=isinstance(residual, Added))
    return table[len(residual.stream_TD)].run(residual, norm_weight, 1e-6, weight)


def test_a_table_says_which_implementation_serves_how_many_rows() -> None:
    fused = replace(REFERENCE, gated_linear=Doubled())
    table = fused.normed(torch.empty(12, 8), gated=True, is_added=False)
    assert by_rows(table, range(1, 5)) == "library 1-2, quack+gate 3-4"
    assert fused.normed(torch.empty(12, 8), gated=True, is_added=False) is table
    assert fused.normed(torch.empty(12, 9), gated=True, is_added=False) is not table
    assert by_rows(fused.plain(torch.empty(12, 8)), [1]) == "library 1"


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


@torch.inference_mode()
def test_slices_are_summed_up_by_what_follows() -> None:
    torch.manual_seed(0)
    x, weight, norm_weight = torch.randn(65, 96), torch.randn(48, 96), torch.randn(48)
    stream = torch.randn(65, 48)
    ops = select_ops(Kernels(sliced_linear="library"), CPU)
    pending = ops.added(weight)[65].run(x, weight, Added(stream))
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
    found = ops.added(weight)[num_rows].run(x, weight, Added(stream))
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
