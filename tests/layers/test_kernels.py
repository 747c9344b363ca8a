"""The implementations that a recipe selects."""

from __future__ import annotations

from inspect import signature
from typing import get_args, get_type_hints

import pytest
import torch
from nanovllm_kernels.attention.latent_store import latent_store
from nanovllm_kernels.fp8_reference import FP8
from nanovllm_kernels.norms import reference
from torch import Tensor, _dynamo

from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.kernels import CHOSEN_ELSEWHERE, FUSED, OPERATIONS, fastest, reason, select_ops
from nanovllm.layers.ops import Ops

CPU, GPU = torch.device("cpu"), torch.device("cuda")
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
    assert select_ops(kernels, GPU) == REFERENCE


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 1)])
def test_a_gpu_runs_triton_if_it_was_measured_there_and_else_compiles(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen = select_ops(Kernels(rms_norm="torch", experts="torch", fp8_linear="torch"), GPU)
    assert chosen.rms_norm is reference.rms_norm
    for name in FUSED[1:]:
        kernel, meaning = getattr(chosen, name), getattr(reference, name)
        assert kernel.__name__ == name and kernel is not meaning
        assert len(signature(kernel).parameters) == len(signature(meaning).parameters)
        assert hasattr(kernel, "get_compiler_config") is (capability != (9, 0))
    assert chosen.latent_store is latent_store  # in Triton
    kinds = {name: fastest(name, GPU) for name in (*OPERATIONS, *CHOSEN_ELSEWHERE)}
    expected = "triton" if capability == (9, 0) else "compile"
    assert {kinds[name] for name in FUSED} == {expected}
    assert {kinds[name] for name in ("delta", *CHOSEN_ELSEWHERE)} == {"triton"}
    told = reason(Kernels(), GPU)
    assert ("9.0 only" in told, f"capability {capability[0]}." in told) == (
        capability != (9, 0),
        True,
    )


def test_operations_that_may_be_compiled_are_those_of_the_recipe() -> None:
    types = get_type_hints(Kernels)
    compilable = [name for name in types if "compile" in get_args(types[name])]
    assert compilable == [*FUSED]


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


class Ranks:
    """Two tensor-parallel ranks whose sums are twice this rank's."""

    tp_size = 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return 2 * x


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_references_mean_the_same_for_any_number_of_tokens(dtype: torch.dtype) -> None:
    """They also write to the cache itself, not to a copy.

    In bfloat16 results differ by an ulp of their terms, since the compiler does not round between
    operations. Slices are compiled in both types, rows and a cache of their type in float32
    only, and a cache in fp8 in bfloat16 only.
    """
    is_wide = dtype == torch.float32
    ops = select_ops(Kernels(**dict.fromkeys(FUSED, "compile")), CPU)
    torch.manual_seed(0)
    norm_weight, table = torch.randn(16, dtype=dtype), torch.randn(32, 16)

    def same(name: str, *args: object, **options: object) -> None:
        found = getattr(ops, name)(*args, **options)
        close(found, getattr(reference, name)(*args, **options), dtype)

    for tokens in (5, 9):
        x, residual = torch.randn(2, tokens, 16).to(dtype)
        x_ITD = torch.randn(3, tokens, 16, dtype=dtype)  # partial products
        for each in (x, residual):
            _dynamo.mark_dynamic(each, 0)
        _dynamo.mark_dynamic(x_ITD, 1)
        same("rms_norm", x, norm_weight, 1e-6)
        same("silu_mul", x)
        for each in (x, x_ITD) if is_wide else (x_ITD,):
            same("add_rms_norm", each, residual, norm_weight, 1e-6)
            same("sigmoid_mul", each, residual)
        qkv, cells = torch.randn(tokens, 8 * 16, dtype=dtype), torch.randperm(40)[:tokens].clone()
        positions = torch.arange(tokens)
        for each in (qkv, cells, positions):
            _dynamo.mark_dynamic(each, 0)
        arguments = norm_weight, norm_weight, 1e-6, table, positions, cells
        scales_2G = None if is_wide else torch.tensor([[0.1, 0.2], [0.3, 0.4]])
        cached = dtype if scales_2G is None else FP8
        caches = [torch.zeros(2, 10, 4, 2, 16).to(cached) for _ in range(2)]
        found = ops.rope_store(qkv, *arguments, *caches[0], scales_2G)
        close(found, reference.rope_store(qkv, *arguments, *caches[1], scales_2G), dtype)
        close(caches[0].float(), caches[1].float(), cached)
        assert int((caches[0].float() != 0).any(-1).any(-1).sum()) == 2 * tokens


@torch.inference_mode()
def test_a_sum_over_ranks_is_not_compiled() -> None:
    """It is a call of a library, which torch.compile cannot trace."""
    ops = select_ops(Kernels(rope_store="compile"), CPU)
    qkv, norms, table = torch.randn(3, 128), (torch.randn(64), torch.randn(32)), torch.randn(32, 16)
    arguments = *norms, 1e-6, table, torch.arange(3), torch.arange(3)
    caches = [torch.zeros(2, 10, 4, 2, 16) for _ in range(2)]
    found = ops.rope_store(qkv, *arguments, *caches[0], ranks=Ranks())
    assert found.equal(reference.rope_store(qkv, *arguments, *caches[1], ranks=Ranks()))
    assert caches[0].equal(caches[1])


def close(actual: object, expected: object, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6, FP8: 2**-3}[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_products_in_cute_are_refused_where_they_cannot_run() -> None:
    for name in ("gated_linear", "skinny_linear", "fp8_linear"):
        with pytest.raises(ConfigError) as caught:
            select_ops(Kernels(**{name: "cute"}), CPU)
        reason = "it is used on Hopper GPUs only"
        assert str(caught.value) == f"kernels.{name} is cute, but {reason}; use torch"
