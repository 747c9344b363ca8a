"""The gate and up products and SiLU of the one times the other, in one launch, for many tokens.

A CuTe DSL matrix product of the package quack (which flash-attn-4 brings along) whose epilogue
holds a gate and its up value in one thread, so that the two never travel through memory.

Decision: the library's product, with a tile found by measuring eight on an H200: at 8192 tokens of
Qwen3-8B it takes 2.17 to 2.41 ms with the gate, where the other one takes 2.36 ms without and the
gate 0.13 ms more; of Qwen3-0.6B 0.14 ms instead of 0.19; at 256 tokens of 8B 75 instead of 80 us.
With less work, or a last tile that is mostly empty, it loses. It is compiled here and called
directly: the package's own entry point imports torch.compile, for seconds, in every start.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.compile_cache import CachedCompile, Compiled
from nanovllm_kernels.device import is_hopper, processors
from nanovllm_kernels.linear_cases import gated_sizes, linear_reference
from nanovllm_kernels.reference import silu_mul

TILE_ROWS, TILE_LINES = 128, 192
LEAST_WORK = 3 * 10**9  # multiply-adds


def obstacle(device: torch.device) -> str | None:
    """Why it cannot run here, or None."""
    if not is_hopper(device):
        return "it is used on Hopper GPUs only"
    if find_spec("quack") is None:
        return "the package quack-kernels, a part of flash-attn-4, is not installed"
    return None


class GatedLinear:
    """One of layers.ops.GatedLinear. Compiles with the first product, for seconds."""

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool:
        return (
            -num_rows % TILE_ROWS <= num_rows // 8
            and num_rows * weight_ND.numel() >= LEAST_WORK
            and weight_ND.shape[0] % 16 == 0
            and weight_ND.shape[1] % 8 == 0
            and weight_ND.dtype.itemsize == 2
        )

    def __call__(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        """y_TF. `weight_ND`: the features of the gate, then those of up."""
        num_rows, num_features = len(x_TD), len(weight_ND)
        y_TF = x_TD.new_empty(num_rows, num_features // 2)
        run = compile_gated(bits(x_TD.dtype), num_rows > TILE_ROWS)
        run(x_TD, weight_ND, y_TF, processors(x_TD.device) // 2)
        return y_TF


@CachedCompile
def compile_gated(dtype_name: str, is_tall: bool) -> Compiled:
    """Compiles the product for any sizes.

    `is_tall`: two tiles of rows share weights, else two tiles of features share rows.

    Its arguments: x, the weights, y, how many clusters of two run at once.
    """
    from nanovllm_kernels.gated_product import compile_product  # imports torch.compile

    return compile_product(dtype_name, TILE_ROWS, TILE_LINES, is_tall)


GATED_LINEAR = GatedLinear()


def reference(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    return silu_mul(linear_reference(x_TD.float(), weight_ND))


def inputs(T: int, N: int, D: int, device: torch.device) -> Args:
    x_TD = normal(device, T, D, dtype=torch.bfloat16)
    x_TD[T // 2, D // 3] = 1e3  # a wrong sum shows
    return x_TD, (normal(device, N, D, dtype=torch.float32, seed=1) * D**-0.5).bfloat16()


def scale(expected: Tensors, args: Args) -> Tensors:
    """What float32 sums may err by is little beside the rounding of the result."""
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


# An ulp for the result; sums of float32 are exact beside it.
KERNEL = Kernel("gated_linear", GATED_LINEAR, reference, cases(), ulps_16=1, ulps_32=0, scale=scale)
