"""What products of few rows with weights in block fp8 mean, in plain torch, and their cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanovllm_kernels import skinny_cases
from nanovllm_kernels.case import Args, Case, Kernel, Tensors
from nanovllm_kernels.fp8_reference import BLOCK, Scaled, quantise_weight
from nanovllm_kernels.library_linear import add_inputs
from nanovllm_kernels.linear_cases import linear_inputs
from nanovllm_kernels.skinny_cases import norm_inputs
from nanovllm_kernels.skinny_fp8_cute import SKINNY_FP8, Kind, shape_of

ROWS = (1, 7, 8, 16, 17, 32)  # of which even ones are timed, and 1
Layer = tuple[int, int]


def scaled(weight_ND: Tensor, block_rows: int) -> Scaled:
    """In fp8, of which no two neighbouring blocks have a similar scale."""
    w8_ND, w_scale = quantise_weight(weight_ND)
    w_scale = w_scale.repeat_interleave(BLOCK // block_rows, 0)[: -(-len(w8_ND) // block_rows)]
    rows, blocks = (torch.arange(n, device=w8_ND.device) for n in w_scale.shape)
    return Scaled(w8_ND, w_scale * (1 + (rows[:, None] + 3 * blocks) % 5), block_rows)


def of_fp8(
    bf16: Kernel, kind: Kind, run: Callable[..., Tensor], of: Callable[..., Args], *layers: Layer
) -> Kernel:
    """The same meaning and tolerance as of a weight in bfloat16: x is not quantised.

    `layers`: N, D of Qwen3-8B, MiniMax-M2 and odd ones; the first also with other scales.
    """

    def inputs(T: int, N: int, D: int, device: torch.device, g: int = BLOCK, **odd: str) -> Args:
        args = of(T, N, D, device, **odd)
        return tuple(scaled(a, g) if getattr(a, "shape", ()) == (N, D) else a for a in args)

    def plain(args: Args) -> Args:
        return tuple(a.dequantised() if isinstance(a, Scaled) else a for a in args)

    def reference(*args: Any) -> Any:  # noqa: ANN401
        return bf16.reference(*plain(args))

    def scale(expected: Tensors, args: Args) -> Tensors:
        return bf16.scale(expected, plain(args))

    cases = [Case("32 rows share a scale, T=5", partial(inputs, 5, *layers[0], g=32))]
    cases += [
        Case(f"{odd} T=9", partial(inputs, 9, *layers[0], kind=odd))
        for odd in ("spike", "faint") * kind.normed
    ]
    for (N, D), T in product(layers, ROWS):
        assert shape_of(N, D, kind, T) is not None
        num_bytes = N * D + 2 * (T * D + T * N) if T not in (7, 17) else 0
        cases.append(Case(f"T={T} N={N} D={D}", partial(inputs, T, N, D), num_bytes=num_bytes))
    name = bf16.name.replace("skinny", "skinny_fp8")
    return replace(bf16, name=name, run=run, reference=reference, scale=scale, cases=tuple(cases))


linear, linear_add, norm_linear = SKINNY_FP8.linear, SKINNY_FP8.linear_add, SKINNY_FP8.norm_linear
norm_gate_up = partial(norm_linear, gated=True)
ADDED = (4096, 4096), (4096, 12288), (3072, 6144), (1024, 3072)
NORMED = (6144, 4096), (8192, 3072), (4096, 1024)
GATED = (24576, 4096), (6144, 1024)
NORM, GATE = Kind(normed=True), Kind(normed=True, gated=True)

LINEAR = of_fp8(skinny_cases.LINEAR, Kind(), linear, linear_inputs, (6144, 4096), (1024, 1536))
LINEAR_ADD = of_fp8(skinny_cases.LINEAR_ADD, Kind(added=True), linear_add, add_inputs, *ADDED)
NORM_LINEAR = of_fp8(skinny_cases.NORM_LINEAR, NORM, norm_linear, norm_inputs, *NORMED)
NORM_GATE_UP = of_fp8(skinny_cases.NORM_GATE_UP, GATE, norm_gate_up, norm_inputs, *GATED)
