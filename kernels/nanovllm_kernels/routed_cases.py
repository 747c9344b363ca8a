"""What the Triton kernels of routed experts are checked and timed with, from logits to sums."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nanovllm_kernels import (
    combine as sums,
    expert_rows,
    experts,
    experts_reference,
    route as routes,
    route_reference as reference,
)
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal
from nanovllm_kernels.expert_cases import Routed, in_float, kernels
from nanovllm_kernels.route_reference import ExpertRows, Routing

SOFTMAX = Routing("softmax", renormalise=True)
PLAIN = Routing("softmax", renormalise=False)
SIGMOID = Routing("sigmoid", renormalise=True)
GROUPS = Routing("sigmoid", renormalise=True, scale=2.5, num_groups=8, chosen_groups=4)
ODD_GROUPS = Routing("softmax", renormalise=False, scale=16.0, num_groups=3, chosen_groups=1)
HASHED, TIED = "hashed", "tied"


def logits(T: int, E: int, kind: str, device: torch.device) -> Tensor:
    """Of a grid, so that scores are equal or far apart. `tied`: bfloat16, some rows all equal."""
    steps_TE = torch.randint(-90, 70, (T, E), generator=torch.Generator().manual_seed(T + E))
    logits_TE = (steps_TE / 16 + 0.03).to(device)
    if kind == TIED:
        logits_TE[::3] = -1000.0
        return logits_TE.bfloat16()
    return logits_TE


def route_inputs(T: int, E: int, K: int, rule: Routing, kind: str, device: torch.device) -> Args:
    """logits, a bias where scores are sigmoids, K, the rule, and what uniform routing hashes."""
    bias_E, uniform = None, None
    if rule.score == "sigmoid":
        bias_E = (torch.arange(E, device=device) * 7 % 5 - 2.2) * 0.37
    if kind == HASHED:
        slots_T = torch.arange(T, device=device) * 5 % 97
        uniform = slots_T, torch.arange(T, device=device) * 3, 11
    return logits(T, E, kind, device), bias_E, K, rule, uniform


def sort_inputs(
    T: int, E: int, K: int, first: int, own: int, tile: int, kind: str, device: torch.device
) -> Args:
    """`one`: every row begins with the same expert; `few`: no other than the first K."""
    generator = torch.Generator().manual_seed(T)
    experts_TK = torch.rand(T, E, generator=generator).argsort(1)[:, :K]
    if kind == "one":
        experts_TK = torch.where(experts_TK == first, experts_TK[:, :1], experts_TK)
        experts_TK[:, 0] = first
    if kind == "few":
        experts_TK = (torch.arange(T)[:, None] + torch.arange(K)) % K
    return experts_TK.int().to(device), first, own, tile


def combine_inputs(
    T: int, E: int, K: int, D: int, own: int, kind: str, device: torch.device
) -> Args:
    """Rows that are nobody's are NaN. `plain`: with a shared expert and the stream."""
    rows = reference.sort_rows(*sort_inputs(T, E, K, 0, own, 1, kind, device))
    y_XD = normal(device, T * K, D, dtype=torch.bfloat16)
    y_XD[rows.pair_of_X < 0] = torch.nan
    weights_TK = normal(device, T, K, dtype=torch.float32, seed=1).softmax(-1)
    more = [normal(device, T, D, dtype=torch.bfloat16, seed=seed) for seed in (2, 3)]
    return y_XD, weights_TK, rows.row_of_TK, *(more if kind == "plain" else (None, None))


def down_combine_inputs(routed: Routed, kind: str, device: torch.device) -> Args:
    """`plain`: with a shared expert and the stream."""
    shape = routed.T, routed.E, routed.K, routed.first, routed.num_experts, 1, kind
    experts_TK, *_ = sort_inputs(*shape, device)
    rows = reference.sort_rows(experts_TK, routed.first, routed.num_experts, 1)
    y_XF = normal(device, routed.T * routed.K, routed.F, dtype=torch.bfloat16)
    y_XF[rows.pair_of_X < 0] = torch.nan
    weights_TK = normal(device, routed.T, routed.K, dtype=torch.float32, seed=1).softmax(-1)
    more: list[Tensor | None] = [None, None]
    if kind == "plain":
        more = [
            normal(device, routed.T, routed.D, dtype=torch.bfloat16, seed=seed) for seed in (2, 3)
        ]
    routing = weights_TK, experts_TK, rows.row_of_TK, routed.first
    return y_XF, *routed.weight(1, routed.D, routed.F, device), *routing, *more


def down_combine_reference(
    y_XF: Tensor, down_EDF: Tensor, scale_EXX: Tensor | None, weights_TK: Tensor,
    experts_TK: Tensor, row_of_TK: Tensor, first: int, *more: Tensor | None,
) -> Tensor:  # fmt: skip
    """Both references, one after the other, in float32."""
    rows = reference.sort_rows(experts_TK, first, len(down_EDF), 1)
    product = in_float(experts_reference.expert_down)
    y_XD = product(y_XF, down_EDF, scale_EXX, rows, experts_TK.shape[1])
    return experts_reference.combine(y_XD, weights_TK, row_of_TK, *more).to(y_XF.dtype)


def combine_scale(expected: Tensors, args: Args) -> Tensors:
    """Sums are float32, of terms of a size of 1, and rounded once."""
    return (expected[0].abs() + 1 / 1024,)


def outputs(result: ExpertRows, args: Args) -> Tensors:
    return expert_rows.tensors_of(result)


def case_of_route(T: int, E: int, K: int, rule: Routing, kind: str, *, timed: bool) -> Case:
    name = f"T={T} E={E} K={K} {rule.score} groups={rule.num_groups} {kind}"
    inputs = partial(route_inputs, T, E, K, rule, kind)
    return Case(name, inputs, T <= 7, num_bytes=4 * T * (E + 2 * K) if timed else 0)


def route_cases() -> tuple[Case, ...]:
    rules = (
        (128, 8, SOFTMAX), (512, 10, SOFTMAX), (6, 2, SOFTMAX), (60, 4, PLAIN), (256, 8, SIGMOID),
        (256, 8, GROUPS), (160, 6, GROUPS), (24, 16, SIGMOID), (48, 6, ODD_GROUPS), (7, 1, SIGMOID),
    )  # fmt: skip
    checked = [
        case_of_route(T, E, K, rule, kind, timed=False)
        for E, K, rule in rules
        for T, kind in ((1, "plain"), (7, HASHED), (7, TIED), (513, "plain"))
    ]
    timed = [
        case_of_route(T, E, K, rule, "plain", timed=True)
        for E, K, rule in ((128, 8, SOFTMAX), (256, 8, SIGMOID), (512, 10, SOFTMAX))
        for T in (2, 8, 64, 4096)
    ]
    return (*checked, *timed)


def sort_cases() -> tuple[Case, ...]:
    shapes = (
        (1, 128, 8, 0, 128, 16), (33, 128, 8, 0, 128, 16), (128, 60, 4, 15, 45, 4),
        (129, 6, 2, 2, 3, 8), (300, 24, 16, 0, 24, 64), (257, 160, 6, 80, 80, 64),
        (4000, 512, 10, 0, 512, 128), (16384, 512, 8, 128, 128, 128), (5, 200, 3, 199, 1, 16),
    )  # fmt: skip
    checked = [
        Case(f"T={T} E={E} K={K} {first}+{own} tile={tile} {kind}",
             partial(sort_inputs, T, E, K, first, own, tile, kind), T * E <= 10_000)
        for T, E, K, first, own, tile in shapes
        for kind in ("plain", "one", "few")
    ]  # fmt: skip
    timed = [
        Case(f"T={T} E={E} K={K} timed", partial(sort_inputs, T, E, K, 0, E, 64, "plain"),
             num_bytes=2 * 4 * T * K)
        for E, K in ((128, 8), (512, 10))
        for T in (64, 256, 8192)
    ]  # fmt: skip
    return (*checked, *timed)


def combine_cases() -> tuple[Case, ...]:
    shapes = ((1, 128, 8, 2048, 128), (5, 24, 4, 96, 9), (7, 6, 1, 520, 6), (2, 512, 10, 2048, 512))
    checked = [
        Case(f"T={T} E={E} K={K} D={D} 0+{own} {kind}",
             partial(combine_inputs, T, E, K, D, own, kind), T <= 7)
        for T, E, K, D, own in (*shapes, (513, 160, 6, 5120, 80))
        for kind in ("plain", "one")
    ]  # fmt: skip
    timed = [
        Case(f"T={T} K=8 D={D} timed", partial(combine_inputs, T, 128, 8, D, 128, "plain"),
             num_bytes=2 * T * (8 + 3) * D)
        for D in (2048, 4096)
        for T in (1, 8, 64, 8192)
    ]  # fmt: skip
    return (*checked, *timed)


def down_combine_cases() -> tuple[Case, ...]:
    def case(routed: Routed, kind: str, *, timed: bool = False) -> Case:
        pairs = routed.T * routed.K * routed.F * routed.D
        num_bytes = pairs * (1 if routed.block_fp8 else 2) if timed else 0
        name, inputs = f"{routed} {kind}", partial(down_combine_inputs, routed, kind)
        return Case(name, inputs, small=routed in SMALL, num_bytes=num_bytes)

    checked = [
        case(replace(routed, T=min(routed.T, 2)), kind)
        for routed in (*SMALL, *CHECKED)
        for kind in ("plain", "one")
    ]
    return (*checked, *(case(routed, "plain", timed=True) for routed in TIMED if routed.T <= 2))


SMALL = (
    Routed(1, 1, 1, 8, 8),
    Routed(1, 3, 6, 96, 200, block_fp8=True),
    Routed(2, 4, 24, 96, 72, 8, 9),
    Routed(2, 4, 24, 200, 136, 20, 2, kind="last", block_fp8=True),
    Routed(20, 2, 6, 200, 96, kind="last"),
    Routed(7, 4, 24, 96, 72, 8, 9, kind="first"),  # this rank has nothing to do
    Routed(20, 2, 5, 24, 144, kind="first", block_fp8=True),
)
CHECKED = (
    Routed(2, 4, 60, 200, 2048),
    Routed(33, 12, 12, 1408, 2048),
    Routed(33, 6, 160, 192, 1536, 80, 80, block_fp8=True),
    Routed(33, 4, 60, 96, 2048, block_fp8=True),
)
TIMED = tuple(
    replace(layer, T=T)
    for layer in (
        Routed(1, 8, 128, 768, 2048),
        Routed(1, 8, 256, 1536, 3072, block_fp8=True),
        Routed(1, 10, 512, 512, 2048),
    )
    for T in (1, 2, 8, 64)
)
BOTH = experts.expert_gate_up, experts.expert_down
GATE_UP, DOWN = kernels("few", *BOTH, experts.FEW, CHECKED, TIMED, small=SMALL)
GATE_UP_128, DOWN_128 = kernels(
    "tiled",
    *BOTH,
    experts.MANY,
    tuple(replace(routed, T=130) for routed in (*SMALL, *CHECKED)),
    tuple(Routed(8192, 8, 128, 768, 2048, block_fp8=is_fp8) for is_fp8 in (False, True)),
    small=SMALL[2:6],
)
# Two exponentials, by 2 ulps each, and sums of up to 512 terms in another order.
ROUTE = Kernel("route", routes.route, reference.route, route_cases(), ulps_32=32)
SORT_ROWS = Kernel(
    "sort_rows", expert_rows.sort_rows, reference.sort_rows, sort_cases(), outputs=outputs
)
COMBINE = Kernel(
    "combine", sums.combine, experts_reference.combine, combine_cases(), ulps_16=1,
    scale=combine_scale,
)  # fmt: skip
DOWN_COMBINE = Kernel(
    "down_combine", sums.down_combine, down_combine_reference, down_combine_cases(), ulps_16=1,
    scale=combine_scale,
)  # fmt: skip
