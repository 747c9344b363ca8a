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
    skinny_cases,
)
from nanovllm_kernels.case import Args, Case, Kernel, Tensors
from nanovllm_kernels.fp8_reference import BLOCK, Scaled, quantise_weight
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
