"""Inputs that products of experts are checked and timed with, in bfloat16 and in block fp8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels import experts, experts_reference as reference
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal
from nanovllm_kernels.route_cases import sort_inputs
from nanovllm_kernels.route_reference import ExpertRows, sort_rows

BLOCK = reference.BLOCK


class Layer(NamedTuple):
    """E experts, of which `own` from `first` on are here, K of them for a token."""

    E: int
    K: int
    F: int
    D: int
    fp8: bool = False
    first: int = 0
    own: int = 0  # 0: all

    def __str__(self) -> str:
        more = f" {self.first}+{self.own}" if self.own else ""
        return f"E={self.E} K={self.K} F={self.F} D={self.D}{' fp8' * self.fp8}{more}"


def weight_of(
    E: int, N: int, D: int, num_parts: int, fp8: bool, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """A product of a normal row has a size of 1. In fp8 the scales of blocks differ by up to 4."""
    if not fp8:
        return normal(device, E, N, D, dtype=torch.bfloat16, seed=1).mul_(D**-0.5), None
    blocks = num_parts * -(-(N // num_parts) // BLOCK), -(-D // BLOCK)
    scale_EXX = normal(device, E, *blocks, dtype=torch.float32, seed=2).abs().clamp(0.5, 2)
    weight_END = torch.empty(E, N, D, dtype=torch.float8_e4m3fn, device=device)
    for expert in range(E):
        weight_END[expert] = normal(device, N, D, dtype=torch.float32, seed=3 + expert).mul_(16)
    return weight_END, scale_EXX * D**-0.5 / 16


def rows_of(T: int, layer: Layer, tile: int, kind: str, device: torch.device) -> ExpertRows:
    own = layer.own or layer.E
    return sort_rows(*sort_inputs(T, layer.E, layer.K, layer.first, own, tile, kind, device))


def gate_up_inputs(T: int, layer: Layer, tile: int, kind: str, device: torch.device) -> Args:
    own, F, D = layer.own or layer.E, layer.F, layer.D
    x_TD = normal(device, T, D + 64, dtype=torch.bfloat16)[:, :D]
    weight_and_scale = weight_of(own, 2 * F, D, 2, layer.fp8, device)
    return x_TD, *weight_and_scale, rows_of(T, layer, tile, kind, device), layer.K


def down_inputs(T: int, layer: Layer, tile: int, kind: str, device: torch.device) -> Args:
    own, F, D = layer.own or layer.E, layer.F, layer.D
    rows = rows_of(T, layer, tile, kind, device)
    y_XF = normal(device, T * layer.K, F, dtype=torch.bfloat16)
    y_XF[rows.pair_of_X < 0] = torch.nan
    return y_XF, *weight_of(own, D, F, 1, layer.fp8, device), rows, layer.K


def combine_inputs(T: int, layer: Layer, kind: str, device: torch.device) -> Args:
    """What other ranks' pairs have is NaN. `plain`: with a shared expert and a stream."""
    own = layer.own or layer.E
    experts_TK = sort_inputs(T, layer.E, layer.K, layer.first, own, 1, "plain", device)[0]
    is_ours_TK = (experts_TK >= layer.first) & (experts_TK < layer.first + own)
    y_TKD = normal(device, T, layer.K, layer.D, dtype=torch.bfloat16)
    y_TKD[~is_ours_TK] = torch.nan
    weights_TK = normal(device, T, layer.K, dtype=torch.float32, seed=1).softmax(-1)
    more: list[Tensor | None] = [None, None]
    if kind == "plain":
        more = [normal(device, T, layer.D, dtype=torch.bfloat16, seed=seed) for seed in (2, 3)]
    return y_TKD, weights_TK, experts_TK, layer.first, own, *more


def exact(product: Callable[..., Tensor], x: Tensor, weight: Tensor, *args: Any) -> Tensor:  # noqa: ANN401
    """The reference in float32, rounded once."""
    weight = weight.float() if args[0] is None else weight
    return product(x.float(), weight, *args).to(x.dtype)


def written_rows(result: Tensor, args: Args) -> Tensors:
    """0 in place of what is not written."""
    is_written_X1 = (args[3].pair_of_X >= 0)[:, None]
    return (result.where(is_written_X1, 0),)


def written_pairs(result: Tensor, args: Args) -> Tensors:
    pair_of_X = args[3].pair_of_X
    is_written_X = torch.zeros(len(pair_of_X), dtype=torch.bool, device=result.device)
    is_written_X[pair_of_X[pair_of_X >= 0].long()] = True
    return (result.flatten(0, 1).where(is_written_X[:, None], 0),)


def scale(expected: Tensors, args: Args) -> Tensors:
    """What float32 sums of size 1 may err by is little beside the rounding of the result."""
    return (expected[0].abs() + 1 / 64,)


def combine_scale(expected: Tensors, args: Args) -> Tensors:
    """Sums are float32 and rounded once."""
    return (expected[0].abs() + 1 / 1024,)


QWEN3, MINIMAX, NEXT = Layer(128, 8, 768, 2048), Layer(256, 8, 1536, 3072, True), Layer(512, 10, 512, 2048)
SMALL = [
    Layer(6, 2, 200, 96), Layer(6, 3, 96, 200, True), Layer(5, 1, 24, 144, True),
    Layer(24, 4, 96, 72, first=8, own=9), Layer(24, 4, 200, 136, True, 23, 1),
]  # fmt: skip
LARGE = [
    Layer(60, 4, 200, 2048), Layer(60, 4, 96, 2048, True), Layer(160, 6, 192, 1536, True, 80, 80),
    Layer(128, 8, 768, 2048, True), Layer(12, 12, 1408, 2048),
]  # fmt: skip


def cases(inputs: Callable[..., Args], num_parts: int) -> tuple[Case, ...]:
    """`num_parts`: of a weight, each of F rows."""

    def case(T: int, layer: Layer, tile: int, kind: str, *, timed: bool = False) -> Case:
        rows = rows_of(T, layer, 1, kind, torch.device("cpu")) if timed else None
        used = int((rows.starts_E1.diff() > 0).sum()) if rows is not None else 0
        weights = num_parts * layer.F * layer.D
        return Case(
            f"T={T} {layer} tile={tile} {kind}",
            partial(inputs, T, layer, tile, kind),
            small=layer in SMALL and T <= 20,
            num_bytes=used * weights * (1 if layer.fp8 else 2),
            num_flops=2 * T * layer.K * weights if timed and T > 1000 else 0,
        )

    checked = [case(T, layer, 16, "plain") for layer in SMALL for T in (1, 3)]
    checked += [case(20, layer, 16, kind) for layer in SMALL for kind in ("one", "few")]
    checked += [case(T, layer, 16, "plain") for layer in LARGE for T in (2, 33)]
    checked += [
        case(T, layer, tile, kind)
        for layer in (*SMALL[:4], *LARGE)
        for T, tile, kind in ((129, 64, "one"), (300, 128, "plain"))
    ]
    timed = [
        case(T, layer, 16, "plain", timed=True)
        for layer in (QWEN3, MINIMAX, NEXT)
        for T in (1, 2, 8, 64)
    ]
    many = [
        case(8192, layer, experts.MANY, "plain", timed=True)
        for layer in (QWEN3, QWEN3._replace(fp8=True))
    ]
    return (*checked, *timed, *many)


def combine_cases() -> tuple[Case, ...]:
    layers = (*SMALL, LARGE[2], QWEN3, NEXT)
    checked = [
        Case(f"T={T} {layer} {kind}", partial(combine_inputs, T, layer, kind), T * layer.D < 1000)
        for layer in layers
        for T, kind in ((1, "plain"), (5, "alone"), (513, "plain"))
    ]
    timed = [
        Case(f"T={T} {layer} timed", partial(combine_inputs, T, layer, "plain"),
             num_bytes=2 * T * (layer.K + 3) * layer.D)
        for layer in (QWEN3, MINIMAX)
        for T in (1, 64, 8192)
    ]  # fmt: skip
    return (*checked, *timed)


GATE_UP = Kernel(
    "expert_gate_up",
    experts.expert_gate_up,
    partial(exact, reference.expert_gate_up),
    cases(gate_up_inputs, 2),
    ulps_16=1,
    scale=scale,
    outputs=written_rows,
)
DOWN = Kernel(
    "expert_down",
    experts.expert_down,
    partial(exact, reference.expert_down),
    cases(down_inputs, 1),
    ulps_16=1,
    scale=scale,
    outputs=written_pairs,
)
COMBINE = Kernel(
    "combine", experts.combine, reference.combine, combine_cases(), ulps_16=1, scale=combine_scale
)
