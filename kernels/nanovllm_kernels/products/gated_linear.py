"""GEMM of gate and up with SiLU-mul as epilogue, in one launch, for many tokens.

Uses the CuTe DSL GEMM of the package quack (a dependency of flash-attn-4). Its epilogue holds a
gate and its up value in one thread, so the two never pass through memory.

Decision: the library's GEMM, with the best of eight tiles measured on an H200. With 8192 tokens of
Qwen3-8B it takes 2.17 to 2.41 ms including the gate. The plain GEMM takes 2.36 ms, and its gate
0.13 ms more. Qwen3-0.6B takes 0.14 ms instead of 0.19, and 256 tokens of 8B 75 us instead of 80. It
is slower with less work, or if the last tile is mostly empty. It is compiled here and called
directly: the package's own entry point imports torch.compile, which takes seconds in every start.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.compile_cache import CachedCompile, Compiled
from nanovllm_kernels.device import is_hopper, processors
from nanovllm_kernels.norms.reference import silu_mul
from nanovllm_kernels.products.linear_cases import gated_sizes, linear_reference

TILE_ROWS, TILE_LINES = 128, 192
LEAST_WORK = 3 * 10**9  # multiply-adds


def obstacle(device: torch.device) -> str | None:
    """Return the reason why the kernel cannot run on a device, or None."""
    if not is_hopper(device):
        return "it is used on Hopper GPUs only"
    if find_spec("quack") is None:
        return "the package quack-kernels, a part of flash-attn-4, is not installed"
    return None


class GatedLinear:
    """Implementation of layers.products.FusedLinear. The first product compiles for seconds."""

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool:
        return (
            -num_rows % TILE_ROWS <= num_rows // 8
            and num_rows * weight_ND.numel() >= LEAST_WORK
            and weight_ND.shape[0] % 16 == 0
            and weight_ND.shape[1] % 8 == 0
            and weight_ND.dtype.itemsize == 2
        )

    def __call__(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        """Return y_TF. `weight_ND` has the features of the gate, then those of up."""
        num_rows, num_features = len(x_TD), len(weight_ND)
        y_TF = x_TD.new_empty(num_rows, num_features // 2)
        run = compile_gated(bits(x_TD.dtype), num_rows > TILE_ROWS)
        run(x_TD, weight_ND, y_TF, processors(x_TD.device) // 2)
        return y_TF


@CachedCompile
def compile_gated(dtype_name: str, is_tall: bool) -> Compiled:
    """Compile the product for any sizes.

    If `is_tall`, two tiles of rows share weights; otherwise two tiles of features share rows. The
    arguments of the result are x, the weights, y, and the number of clusters of two that run at
    once.
    """
    from nanovllm_kernels.products.gated_product import compile_product  # imports torch.compile

    return compile_product(dtype_name, TILE_ROWS, TILE_LINES, is_tall)


GATED_LINEAR = GatedLinear()


def reference(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    return silu_mul(linear_reference(x_TD.float(), weight_ND))


def inputs(T: int, N: int, D: int, device: torch.device) -> Args:
    x_TD = normal(device, T, D, dtype=torch.bfloat16)
    x_TD[T // 2, D // 3] = 1e3  # makes a wrong sum visible
    return x_TD, (normal(device, N, D, dtype=torch.float32, seed=1) * D**-0.5).bfloat16()


def scale(expected: Tensors, args: Args) -> Tensors:
    """Return the error scale. Errors of float32 sums are small compared to rounding the result."""
    x_TD, weight_ND = (tensor.float() for tensor in args)
    sizes_TN = linear_reference(x_TD.abs(), weight_ND.abs())
    of_sums_TF = gated_sizes(linear_reference(x_TD, weight_ND), sizes_TN)
    return (expected[0].abs() + of_sums_TF / 256,)


def cases() -> tuple[Case, ...]:
    checked = [
        Case(f"T={T} N={N} D={D}", partial(inputs, T, N, D))
        for T, N, D in ((1, 64, 64), (128, 24576, 4096), (513, 6144, 1024), (1000, 4112, 1032))
    ]
    timed = [
        Case(f"T={T} N={N} D={D}", partial(inputs, T, N, D), num_flops=2 * T * N * D)
        for N, D in ((6144, 1024), (24576, 4096))
        for T in (256, 2048, 8192)
    ]
    return (*checked, *timed)


# One ulp for rounding the result; float32 sums are nearly exact.
KERNEL = Kernel("gated_linear", GATED_LINEAR, reference, cases(), ulps_16=1, ulps_32=0, scale=scale)
