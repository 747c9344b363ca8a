"""Inputs, cases and tolerances of the Triton kernels of routed experts, from logits to sums."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal
from nanovllm_kernels.experts import (
    combine as sums,
    products as experts,
    reference as experts_reference,
    route as routes,
    route_reference as reference,
    rows as expert_rows,
)
from nanovllm_kernels.experts.cases import MoECase, kernels
from nanovllm_kernels.experts.route_reference import ExpertRows, Placed, Routing

SOFTMAX = Routing("softmax", renormalise=True)
PLAIN = Routing("softmax", renormalise=False, scale=16.0, num_groups=3, chosen_groups=1)
SIGMOID = Routing("sigmoid", renormalise=True)
GROUPS = Routing("sigmoid", renormalise=True, scale=2.5, num_groups=8, chosen_groups=4)


def route_inputs(T: int, E: int, K: int, rule: Routing, kind: str, device: torch.device) -> Args:
    """Return logits on a grid, so that scores are equal or far apart. Sigmoids have a bias.

    `tied`: bfloat16 logits, all equal in some rows. `hashed`: uniform routing. `placed`: each
    expert has two replicas, in another order, and some tokens are padding.
    """
    steps_TE = torch.randint(-90, 70, (T, E), generator=torch.Generator().manual_seed(T + E))
    logits_TE = (steps_TE / 16 + 0.03).to(device)
    if kind == "tied":
        logits_TE[::3] = -1000.0
        logits_TE = logits_TE.bfloat16()
    is_biased, rows_T = rule.score == "sigmoid", torch.arange(T, device=device)
    bias_E = (torch.arange(E, device=device) * 7 % 5 - 2.2) * 0.37 if is_biased else None
    uniform = (rows_T * 5 % 97, rows_T * 3, 11) if kind == "hashed" else None
    tokens_X = torch.zeros(2 * E, dtype=torch.int64, device=device)
    turns_EX = torch.arange(2 * E, device=device).flip(0).view(2, E).T.repeat(1, 12).int()
    placed = Placed(rows_T * 5 % 97, tokens_X, turns_EX) if kind == "placed" else None
    return logits_TE, bias_E, K, rule, uniform, placed


def sort_inputs(
    T: int, E: int, K: int, first: int, own: int, tile: int, kind: str, device: torch.device
) -> Args:
    """Return experts. `one`: all rows begin with the same; `few`: only the first K are chosen."""
    experts_TK = torch.rand(T, E, generator=torch.Generator().manual_seed(T)).argsort(1)[:, :K]
    if kind == "one":
        experts_TK = torch.where(experts_TK == first, experts_TK[:, :1], experts_TK)
        experts_TK[:, 0] = first
    if kind == "few":
        experts_TK = (torch.arange(T)[:, None] + torch.arange(K)) % K
    return experts_TK.int().to(device), first, own, tile


def combine_inputs(routed: MoECase, kind: str, device: torch.device) -> Args:
    """Return rows of width F, NaN for other ranks' pairs. `plain` has shared_TD and residual_TD."""
    shape = routed.T, routed.E, routed.K, routed.first, routed.num_experts, 1, kind
    experts_TK, *_ = sort_inputs(*shape, device)
    rows = reference.sort_rows(experts_TK, routed.first, routed.num_experts, 1)
    y_XD = normal(device, routed.T * routed.K, routed.F, dtype=torch.bfloat16)
    y_XD[rows.pair_of_X < 0] = torch.nan
    weights_TK = normal(device, routed.T, routed.K, dtype=torch.float32, seed=1).softmax(-1)
    size = routed.T, routed.F
    more = [normal(device, *size, dtype=torch.bfloat16, seed=seed) for seed in (2, 3)]
    return y_XD, weights_TK, rows.row_of_TK, *(more if kind == "plain" else (None, None))


def sum_scale(expected: Tensors, args: Args) -> Tensors:
    """Return the error scale of float32 sums of terms of size 1, rounded once."""
    return (expected[0].abs() + 1 / 1024,)


def tables(result: ExpertRows, args: Args) -> Tensors:
    """Return all tables of the sort."""
    return expert_rows.tensors_of(result)


ROUTED = (
    (128, 8, SOFTMAX), (512, 10, SOFTMAX), (256, 8, SIGMOID), (6, 2, SOFTMAX), (160, 6, GROUPS),
    (24, 16, SIGMOID), (48, 6, PLAIN), (33, 10, replace(SOFTMAX, shared="gated")),
    (160, 6, replace(GROUPS, shared="whole")),
)  # fmt: skip
KINDS = (1, "plain"), (7, "hashed"), (7, "tied"), (7, "placed"), (513, "plain"), (513, "placed")
ROUTE_CASES = tuple(
    Case(f"T={T} E={E} K={K} {rule.score} groups={rule.num_groups} shared={rule.shared} {kind}",
         partial(route_inputs, T, E, K, rule, kind), small=T <= 7, num_bytes=num_bytes)
    for shapes, kinds, timed in (
        (ROUTED, KINDS, 0), (ROUTED[:3], [*product((2, 8, 64, 4096), ("plain", "placed"))], 4),
    )
    for E, K, rule in shapes
    for T, kind in kinds
    for num_bytes in [timed * T * (E + 2 * K)]
)  # fmt: skip
SORTED = (  # T, E, K, this rank's first expert and number of experts, tile, bytes if timed
    (1, 128, 8, 0, 128, 16, 4), (33, 128, 8, 0, 128, 16, 0), (128, 60, 4, 15, 45, 4, 0),
    (129, 6, 2, 2, 3, 8, 0), (257, 160, 6, 80, 80, 64, 0), (4000, 512, 10, 0, 512, 128, 0),
    (16384, 512, 8, 128, 128, 128, 0), (5, 200, 3, 199, 1, 16, 0), (8, 128, 8, 0, 128, 16, 4),
    (64, 128, 8, 0, 128, 16, 4), (256, 128, 8, 0, 128, 64, 4), (8192, 128, 8, 0, 128, 128, 4),
    (64, 256, 8, 0, 256, 16, 4), (8192, 256, 8, 0, 256, 128, 4),
)  # fmt: skip
SORT_CASES = tuple(
    Case(f"T={T} E={E} K={K} {more[0]}+{more[1]} tile={more[2]} {kind}",
         partial(sort_inputs, T, E, K, *more, kind), T * E <= 10_000,
         num_bytes=2 * timed * T * K * (kind == "plain"))
    for T, E, K, *more, timed in SORTED
    for kind in ("plain", "one", "few")
)  # fmt: skip
SMALL = (
    MoECase(1, 1, 1, 8, 8),
    MoECase(1, 3, 6, 96, 200, block_fp8=True),
    MoECase(2, 4, 24, 96, 72, 8, 9),
    MoECase(2, 4, 24, 200, 136, 20, 2, kind="last", block_fp8=True),
    MoECase(20, 2, 6, 200, 96, kind="last"),
    MoECase(7, 4, 24, 96, 72, 8, 9, kind="first"),  # this rank has nothing to do
)
CHECKED = (
    MoECase(33, 12, 12, 1408, 2048),
    MoECase(33, 6, 160, 192, 1536, 80, 80, block_fp8=True),
    MoECase(33, 4, 60, 96, 2048, block_fp8=True),
)
LAYERS = MoECase(1, 8, 128, 768, 2048), MoECase(1, 8, 256, 1536, 3072, block_fp8=True)
TIMED = tuple(replace(layer, T=T) for layer in LAYERS for T in (1, 2, 8, 64))
MANY = tuple(replace(LAYERS[0], T=8192, block_fp8=is_fp8) for is_fp8 in (False, True))
COMBINE_CASES = tuple(
    Case(f"{routed} {kind}", partial(combine_inputs, routed, kind), routed in SMALL,
         num_bytes=2 * timed * routed.T * (routed.K + 3) * routed.F)
    for several, kinds, timed in (
        (SMALL, ("plain", "one"), 0),
        ([MoECase(T, 8, 128, 2048, 8) for T in (1, 64, 513, 8192)], ("plain",), 1),
    )
    for routed in several
    for kind in kinds
)  # fmt: skip

# Two exponentials may err by 2 ulps each, and sums of up to 512 terms have another order.
ROUTE = Kernel("route", routes.route, reference.route, ROUTE_CASES, ulps_32=32)
SORT_ROWS = Kernel(
    "sort_rows", expert_rows.sort_rows, reference.sort_rows, SORT_CASES, outputs=tables
)
BOTH = experts.expert_gate_up, experts.expert_down
FEW_GATE_UP, FEW_DOWN = kernels("few", *BOTH, experts.FEW, CHECKED, TIMED, small=SMALL)
TILED = tuple(replace(routed, T=130) for routed in (*SMALL, *CHECKED))
TILED_GATE_UP, TILED_DOWN = kernels("tiled", *BOTH, experts.MANY, TILED, MANY, small=SMALL[2:5])
COMBINE = Kernel(
    "combine", sums.combine, experts_reference.combine, COMBINE_CASES, ulps_16=1, scale=sum_scale
)
