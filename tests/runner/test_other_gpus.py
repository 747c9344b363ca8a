"""`kernels.eager`, and the choices of "auto" on a GPU for which no kernel was measured.

The engine runs on a simulated GPU, where launches are recorded.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanovllm.layers.kernels import FUSED
from tests.kernels.compiled import forks

COMPILED = sorted(FUSED)


def on_gpu(major: int, *recipe: str) -> dict[str, Any]:
    """Return what tests.runner.other_gpus prints for a GPU of this compute capability."""
    done = forks().run("tests.runner.other_gpus:main", str(major), *recipe)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "recipe",
    [
        "qwen3-0.6b",
        "qwen3-30b-a3b parallel.tp=2",
        "deepseek-r1",
        "qwen3-next-80b-a3b model.num_layers=4",
        "qwen3-0.6b cache.dtype=fp8 quantize=fp8 speculate.method=ngram speculate.tokens=3",
    ],
)
def test_eager_launches_no_kernel_and_captures_no_graph(recipe: str) -> None:
    found = on_gpu(9, *recipe.split(), "kernels.eager=true")
    assert (found["launched"], found["compiled"]) == ([], [])
    assert found["modes"] == ["NONE/decode", "NONE/mixed", "NONE/prefill"]
    assert found["reason"] == "kernels.eager is true, so auto is plain torch, without CUDA graphs"


def test_eager_leaves_a_named_kernel() -> None:
    """So a fault can be bisected: one kernel at a time, with all others in torch."""
    found = on_gpu(9, "qwen3-0.6b", "kernels.eager=true", "kernels.rope_store=triton")
    assert found["launched"] == ["rope_store:rope_store_kernel"]


def test_a_gpu_without_measured_kernels_gets_compiled_and_portable_ones() -> None:
    found = on_gpu(8, "qwen3-0.6b")
    assert found["compiled"] == COMPILED
    kernels = found["kernels"]
    assert {kernels[name] for name in FUSED} == {"compile"}
    portable = ("attention", "decode", "experts", "delta", "sample", "batch_prep")
    assert {kernels[name] for name in portable} == {"triton"}
    assert kernels["skinny_linear"] == kernels["gated_linear"] == kernels["fp8_linear"] == "torch"
    files = {launched.partition(":")[0] for launched in found["launched"]}
    sampling = {"apply_mask", "batch_prep", "draw", "thresholds"}
    assert files == {"paged_decode", "paged_prefill", *sampling}
    assert found["reason"] == (
        "the GPU has compute capability 8.0, and kernels were measured on 9.0 only, so auto is "
        "torch.compile for rms_norm, add_rms_norm, silu_mul, sigmoid_mul, rope_store, and portable "
        "Triton or torch for the rest"
    )
    assert "FULL/decode" in found["modes"]


def test_hopper_gets_the_measured_kernels() -> None:
    found = on_gpu(9, "qwen3-0.6b")
    assert found["compiled"] == []
    assert {found["kernels"][name] for name in FUSED} == {"triton"}
    expected = "auto is the fastest kernel measured on GPUs of compute capability 9.0"
    assert found["reason"] == expected
