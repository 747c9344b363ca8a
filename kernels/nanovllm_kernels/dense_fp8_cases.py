"""What products with weights in block fp8 mean, of few rows and in Triton, and their cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanovllm_kernels import (
    library_linear,
    linear_cases,
    norm,
    quantise,
    skinny_cases,
)
from nanovllm_kernels.case import Args, Case, Kernel, Tensors
from nanovllm_kernels.fp8_reference import BLOCK, Scaled, quantise_weight
from nanovllm_kernels.reference import add_rms_norm, rms_norm
from nanovllm_kernels.skinny_fp8_cute import SKINNY_FP8, Kind, shape_of

ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32)
TIMED = (1, 8, 16, 32)


def scaled(weight_ND: Tensor, block_rows: int = BLOCK) -> Scaled:
    """In fp8, of which no two neighbouring blocks have a similar scale."""
    w8_ND, w_scale = quantise_weight(weight_ND)
    w_scale = w_scale.repeat_interleave(BLOCK // block_rows, 0)[: -(-len(w8_ND) // block_rows)]
    rows, blocks = (torch.arange(n, device=w8_ND.device) for n in w_scale.shape)
    return Scaled(w8_ND, w_scale * (1 + (rows[:, None] + 3 * blocks) % 5), block_rows)


def inputs(
    of: Callable[..., Args], T: int, N: int, D: int, device: torch.device, g: int = BLOCK,
    **kind: str,
) -> Args:  # fmt: skip
    """Those of a product in bfloat16, with the weight in fp8. `g`: rows that share a scale."""
    args = of(T, N, D, device, **kind)
    return tuple(scaled(a, g) if a.shape == (N, D) else a for a in map(as_tensor, args))


def as_tensor(argument: Any) -> Any:  # noqa: ANN401
    """With a shape, if it is a number."""
    return argument if isinstance(argument, Tensor) else Number(argument)


class Number(float):
    shape = ()


def dequantised(args: Args) -> Args:
    return tuple(a.dequantised() if isinstance(a, Scaled) else a for a in args)


def of_dequantised(bf16: Kernel, run: Callable[..., Tensor], cases: tuple[Case, ...]) -> Kernel:
    """The same meaning and tolerance as of a weight in bfloat16: x is not quantised."""

    def reference(*args: Any) -> Any:  # noqa: ANN401
        return bf16.reference(*dequantised(args))

    def scale(expected: Tensors, args: Args) -> Tensors:
        return bf16.scale(expected, dequantised(args))

    name = bf16.name.replace("skinny", "skinny_fp8")
    return replace(bf16, name=name, run=run, reference=reference, scale=scale, cases=cases)


def cases(kind: Kind, of: Callable[..., Args], layers: list[tuple[int, int]]) -> tuple[Case, ...]:
    """`layers`: N, D of Qwen3-8B and MiniMax-M2, or odd ones."""
    N, D = layers[0]
    odd = [Case(f"g=32 T=5 N={N} D={D}", partial(inputs, of, 5, N, D, g=32))]
    if kind.normed:
        odd += [
            Case(f"{of_x} T=9 N={N} D={D}", partial(inputs, of, 9, N, D, kind=of_x))
            for of_x in ("spike", "faint")
        ]
    checked = [
        Case(
            f"T={T} N={N} D={D}",
            partial(inputs, of, T, N, D),
            num_bytes=N * D + 2 * (T * D + T * N) if T in TIMED else 0,
        )
        for (N, D), T in product(layers, ROWS)
        if shape_of(N, D, kind, T) is not None
    ]
    return *odd, *checked


LINEAR = of_dequantised(
    skinny_cases.LINEAR,
    SKINNY_FP8.linear,
    cases(Kind(), linear_cases.linear_inputs, [(6144, 4096), (1024, 1152)]),
)
LINEAR_ADD = of_dequantised(
    skinny_cases.LINEAR_ADD,
    SKINNY_FP8.linear_add,
    cases(
        Kind(added=True),
        library_linear.add_inputs,
        [(4096, 4096), (4096, 12288), (3072, 6144), (1024, 3072)],
    ),
)
NORM_LINEAR = of_dequantised(
    skinny_cases.NORM_LINEAR,
    SKINNY_FP8.norm_linear,
    cases(Kind(normed=True), skinny_cases.norm_inputs, [(6144, 4096), (8192, 3072), (4096, 1024)]),
)
NORM_GATE_UP = of_dequantised(
    skinny_cases.NORM_GATE_UP,
    partial(SKINNY_FP8.norm_linear, gated=True),
    cases(Kind(True, True), skinny_cases.norm_inputs, [(24576, 4096), (6144, 1024)]),
)


def norm_reference(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float
) -> quantise.Quantised:
    if residual_TD is None:
        sum_TD = x_TD
    else:
        sum_TD = residual_TD.copy_(add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)[1])
    ones = torch.ones_like(norm_weight_D)
    return quantise.reference(rms_norm(sum_TD, ones, eps).float() * norm_weight_D.float())


def norm_inputs(kind: str, T: int, D: int, device: torch.device) -> Args:
    """`first`: no residual yet; others are norm.add_norm_inputs'."""
    x_TD, residual_TD, *rest = norm.add_norm_inputs(kind, T, D, torch.bfloat16, device)
    return x_TD, None if kind == "first" else residual_TD, *rest


def norm_outputs(result: quantise.Quantised, args: Args) -> Tensors:
    """And the stream that was written."""
    stream = () if args[1] is None else (args[1],)
    return *quantise.rows_written(result, args[:1]), *stream


def norm_scale(expected: Tensors, args: Args) -> Tensors:
    """Numbers of rows a rounding to bfloat16 apart may be a step of fp8 apart."""
    values_TD, scale_BT, *stream = expected
    steps_TD, of_scales = quantise.size_of_steps((values_TD, scale_BT), args)
    return steps_TD, of_scales * 2**14, *(each.abs() for each in stream)


NORM_QUANTISE = Kernel(
    "norm_quantise",
    quantise.norm_quantise,
    norm_reference,
    (
        *(
            Case(f"{kind} T={T} D={D}", partial(norm_inputs, kind, T, D), small=T < 9)
            for kind, T, D in (
                ("first", 1, 64),
                ("normal", 7, 1160),
                ("strided", 3, 384),
                ("slices", 5, 1024),
                ("spike", 2, 640),
                ("normal", 513, 4096),
            )
        ),
        *(
            Case(f"T={T} D=4096", partial(norm_inputs, "normal", T, 4096), num_bytes=T * 4096 * 7)
            for T in (64, 8192)
        ),
    ),
    ulps_16=2,
    ulps_32=2**20,
    outputs=norm_outputs,
    scale=norm_scale,
)
