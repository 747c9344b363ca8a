"""What products of up to 128 rows mean, in plain torch, and the cases they are checked with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from nanovllm_kernels import linear_cases
from nanovllm_kernels.case import Args, Case, Kernel, Tensors
from nanovllm_kernels.library_linear import add_inputs, add_reference, add_scale
from nanovllm_kernels.skinny_linear import SKINNY_LINEAR, Kind, shape_of

ROWS = (1, 2, 8, 16, 17, 32, 63, 64, 65, 100, 128)
TIMED = (1, 8, 32, 64, 128)


def norm_inputs(T: int, N: int, D: int, device: torch.device, kind: str = "first") -> Args:
    """linear_cases', of a stream that has been added up."""
    x_TD, _, norm_weight_D, eps, weight_ND = linear_cases.norm_inputs(T, N, D, device, kind)
    return x_TD, norm_weight_D, eps, weight_ND


def norm_reference(
    x_TD: Tensor, norm_weight_D: Tensor, eps: float, weight_ND: Tensor, *, gated: bool = False
) -> Tensor:
    args = x_TD, None, norm_weight_D, eps, weight_ND
    return linear_cases.norm_linear_reference(*args, gated=gated)[0]


def norm_scale(of: Callable[[Tensors, Args], Tensors], expected: Tensors, args: Args) -> Tensors:
    x_TD, norm_weight_D, eps, weight_ND = args
    return of((*expected, x_TD), (x_TD, None, norm_weight_D, eps, weight_ND))[:1]


def cases(
    kind: Kind, inputs: Callable[..., Args], layers: list[tuple[int, int]]
) -> tuple[Case, ...]:
    """`layers`: N, D of Qwen3-0.6B and 8B."""
    N, D = layers[0]
    spiked = [
        Case(f"{odd} T=9 N={N} D={D}", partial(inputs, 9, N, D, kind=odd))
        for odd in ("spike", "faint")
        if kind.normed
    ]
    checked = [
        Case(
            f"T={T} N={N} D={D}",
            partial(inputs, T, N, D),
            num_bytes=2 * (N * D + T * D + T * N) if T in TIMED else 0,
        )
        for (N, D), T in product(layers, ROWS)
        if shape_of(N, D, kind, T) is not None
    ]
    return *spiked, *checked


LINEAR = Kernel(
    "skinny_linear",
    SKINNY_LINEAR.linear,
    linear_cases.linear_reference,
    cases(Kind(), linear_cases.linear_inputs, [(151936, 1024), (151936, 4096)]),
    ulps_16=1,
    scale=linear_cases.linear_scale,
)
LINEAR_ADD = Kernel(
    "skinny_linear_add",
    SKINNY_LINEAR.linear_add,
    add_reference,
    cases(Kind(added=True), add_inputs, [(1024, 2048), (1024, 3072), (4096, 4096), (4096, 12288)]),
    ulps_16=1,
    scale=add_scale,
)
NORM_LINEAR = Kernel(
    "skinny_norm_linear",
    SKINNY_LINEAR.norm_linear,
    norm_reference,
    cases(Kind(normed=True), norm_inputs, [(4096, 1024), (6144, 4096)]),
    ulps_16=2,
    scale=partial(norm_scale, linear_cases.norm_scale),
)
NORM_GATE_UP = Kernel(
    "skinny_norm_gate_up",
    partial(SKINNY_LINEAR.norm_linear, gated=True),
    partial(norm_reference, gated=True),
    cases(Kind(normed=True, gated=True), norm_inputs, [(6144, 1024), (24576, 4096)]),
    ulps_16=2,
    scale=partial(norm_scale, linear_cases.gate_up_scale),
)
