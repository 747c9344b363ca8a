"""The implementations that a recipe selects."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from nanovllm_kernels.norms import reference

from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.kernels import OPERATIONS, select_ops
from nanovllm.layers.ops import Ops

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


def close(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_products_in_cute_are_refused_where_they_cannot_run() -> None:
    for name in ("gated_linear", "skinny_linear", "fp8_linear"):
        with pytest.raises(ConfigError) as caught:
            select_ops(Kernels(**{name: "cute"}), CPU)
        reason = "it is used on Hopper GPUs only"
        assert str(caught.value) == f"kernels.{name} is cute, but {reason}; use torch"
