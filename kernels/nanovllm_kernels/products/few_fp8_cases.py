"""Plain torch references and cases of the products of few rows with block-fp8 weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.case import Args, Case, Kernel, Tensors
from nanovllm_kernels.fp8_reference import BLOCK, Quantised, Scaled, quantise_weight
from nanovllm_kernels.products import few_fp8, quantise_cases
from nanovllm_kernels.products.few_fp8_cute import FEW_FP8
from nanovllm_kernels.products.library_linear import add_inputs
from nanovllm_kernels.products.linear_cases import gated_sizes, linear_inputs, norm_inputs

Layer = tuple[int, int]
SMALL: tuple[tuple[Layer, int, int], ...] = (  # N, D; rows of x; rows of W that share a scale
    ((48, 144), 1, BLOCK),
    ((100, 1200), 3, 32),
    ((192, 1152), 16, BLOCK),
)
EVEN: tuple[tuple[Layer, int, int], ...] = (  # for kernels that quantise x
    ((64, 128), 1, BLOCK),
    ((192, 2304), 2, BLOCK),
    ((192, 1152), 3, BLOCK),
    ((576, 2048), 16, BLOCK),
)
TIMED = (1, 2, 4, 8, 16)


def product_of(
    x: Tensor | Quantised, weight: Scaled, norm_weight_D: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return y in float32, and the sum of the absolute terms.

    The factor of the norm, common to a row, is applied last; x is quantised without it.
    """
    factor_T1 = weight.scale.new_ones(1, 1)
    if isinstance(x, Tensor):
        x_TD = x.float()
        if norm_weight_D is not None:
            factor_T1 = torch.rsqrt(x_TD.square().mean(1, keepdim=True) + eps)
            x_TD = x_TD * norm_weight_D.float()
        x = quantise_cases.reference(x_TD)
    x_TD, weight_ND = x.dequantised(), weight.dequantised()
    sizes_TN = functional.linear(x_TD.abs(), weight_ND.abs())
    return functional.linear(x_TD, weight_ND) * factor_T1, sizes_TN * factor_T1


def linear(x_TD: Tensor, weight: Scaled) -> Tensors:
    return product_of(x_TD, weight)


def linear_add(x_TD: Tensor, weight: Scaled, residual_TN: Tensor) -> Tensors:
    y_TN, sizes_TN = product_of(x_TD, weight)
    return y_TN + residual_TN.float(), sizes_TN


def norm_linear(x_TD: Tensor, norm_weight_D: Tensor, eps: float, weight: Scaled) -> Tensors:
    return product_of(x_TD, weight, norm_weight_D, eps)


def norm_gate_up(*args: Any) -> Tensors:  # noqa: ANN401
    y_TN, sizes_TN = norm_linear(*args)
    gate_TF, up_TF = y_TN.chunk(2, -1)
    return functional.silu(gate_TF) * up_TF, gated_sizes(y_TN, sizes_TN)


def quantised(
    x8_TD: Tensor,
    x_scale_BT: Tensor,
    weight: Scaled,
    residual_TN: Tensor,
) -> Tensors:
    y_TN, sizes_TN = product_of(Quantised(x8_TD, x_scale_BT), weight)
    return y_TN + residual_TN.float(), sizes_TN


def scaled(weight_ND: Tensor, block_rows: int) -> Scaled:
    """Quantise a weight so that no two neighbouring blocks have similar scales."""
    w8_ND, w_scale = quantise_weight(weight_ND)
    w_scale = w_scale.repeat_interleave(BLOCK // block_rows, 0)[: -(-len(w8_ND) // block_rows)]
    rows, blocks = (torch.arange(n, device=w8_ND.device) for n in w_scale.shape)
    return Scaled(w8_ND, w_scale * (1 + (rows[:, None] + 3 * blocks) % 5), block_rows)


def in_fp8(of: Callable[..., Args], T: int, N: int, D: int, device: torch.device, g: int = BLOCK,
           **odd: str) -> Args:  # fmt: skip
    args = of(T, N, D, device, **odd)
    return tuple(scaled(a, g) if getattr(a, "shape", ()) == (N, D) else a for a in args)


def quantised_inputs(T: int, N: int, D: int, device: torch.device) -> Args:
    x_TD, weight_ND, residual_TN = add_inputs(T, N, D, device)
    x8_TD, x_scale_BT = quantise_cases.reference(x_TD)
    return x8_TD, x_scale_BT.contiguous(), weight_ND, residual_TN


def kernel(
    run: Callable[..., Tensor],
    meaning: Callable[..., Tensors],
    of: Callable[..., Args],
    layers: tuple[Layer, ...],
    rows: tuple[int, ...] = TIMED,
) -> Kernel:
    """Return a Kernel with its cases. `layers` are N, D of Qwen3-8B, DeepSeek-R1 and MiniMax-M2.

    A tensor core truncates bits of its addends, so besides rounding there is an error of 2 ** -9
    times the sum of absolute terms.
    """

    is_quantised = of is quantised_inputs

    def reference(*args: Any) -> Tensor:  # noqa: ANN401
        return meaning(*args)[0].bfloat16()

    def scale(expected: Tensors, args: Args) -> Tensors:
        return (expected[0].abs() + meaning(*args)[1] / 4,)

    cases = [
        Case(f"T={T} {N=} {D=} {g=}", partial(in_fp8, of, T, N, D, g=g), small=is_quantised)
        for (N, D), T, g in (SMALL if is_quantised else EVEN)
    ]
    cases += [
        Case(f"{odd} {T=}", partial(in_fp8, of, T, 384, 1024, kind=odd))
        for odd, T in product(("spike", "faint") * (of is norm_inputs), (2, 9))
    ]
    cases += [
        Case(
            f"{T=} {N=} {D=}",
            partial(in_fp8, of, T, N, D),
            num_bytes=N * D + 2 * (T * D + T * N),
        )
        for (N, D), T in product(layers, rows)
    ]
    name = f"few_fp8_{meaning.__name__}"
    return Kernel(name, run, reference, tuple(cases), ulps_16=1, scale=scale)


ADDED = (4096, 4096), (4096, 12288), (7168, 16384), (7168, 18432), (3072, 6144)
NORMED = (6144, 4096), (2112, 7168), (24576, 1536), (8192, 3072)
GATED = (24576, 4096), (36864, 7168)

FEW_FP8_LINEAR = kernel(FEW_FP8.linear, linear, linear_inputs, ((6144, 4096),))
FEW_FP8_LINEAR_ADD = kernel(FEW_FP8.linear_add, linear_add, add_inputs, ADDED)
FEW_FP8_NORM_LINEAR = kernel(FEW_FP8.norm_linear, norm_linear, norm_inputs, NORMED)
FEW_FP8_NORM_GATE_UP = kernel(
    partial(FEW_FP8.norm_linear, gated=True), norm_gate_up, norm_inputs, GATED
)
FEW_FP8_QUANTISED = kernel(
    few_fp8.product, quantised, quantised_inputs, (*ADDED[:2], *GATED), rows=(17, 32, 63, 64)
)
