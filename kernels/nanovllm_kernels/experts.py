"""Products of sorted rows with the weights of their experts.

Meaning: nanovllm_kernels.experts_reference. A program multiplies some rows of one expert's weight
with a tile of tokens, and never waits for another: sums have one order. Weights are what matters
at few rows, so they take the side of the tensor cores that comes in 64 rows, tokens the one that
comes in 8, and several tiles of weights are on their way at any time.

Decision: weights of block fp8 become float16 in registers, exactly and by one instruction, where
bfloat16 takes three, and these took longer than memory. So tokens do, too, times a power of two: up
to 4e6 they stand for themselves, and from 1/256 down they are off by 2e-6 at most, which is less
than 8 bits would cost them. Each sum over 128 inputs is scaled by itself, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows
from nanovllm_kernels.experts_reference import ExpertProducts
from nanovllm_kernels.paged_decode import dot
from nanovllm_kernels.route_reference import Chosen, ExpertRows

ALONE, FEW, MANY = 8, 16, 128  # tokens of a tile; ALONE: of one, beside weights of 8 bits
FEW_PER_EXPERT = 16  # pairs of an expert on average, from which on tiles are large
SCALED = tl.constexpr(128)  # elements that share a scale, in both directions
LIFT = tl.constexpr(64.0)  # what numbers are divided by, to be float16


class Shape(NamedTuple):
    """What a program of a product takes."""

    weights: int  # rows, of the gate and of up together
    depth: int  # inputs at a time
    stages: int  # loads on their way
    warps: int


SHAPES = {  # by tokens of a tile, and bytes of an element of the weight
    (8, 1): Shape(64, 128, 4, 2),
    (16, 1): Shape(64, 128, 4, 2),
    (16, 2): Shape(64, 128, 4, 4),
    (128, 1): Shape(128, 128, 3, 8),
    (128, 2): Shape(128, 64, 4, 8),
}
OTHER = Shape(32, 32, 2, 4)  # float32, or a tile that nobody measured


def tile_of(num_pairs: int, num_experts: int) -> int:
    """The tile that rows are sorted in for these products."""
    return FEW if num_pairs < FEW_PER_EXPERT * num_experts else MANY


def expert_gate_up(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows | Chosen,
    num_chosen: int,
) -> Tensor:
    y_XF = x_TD.new_empty(len(x_TD) * num_chosen, gate_up_E2FD.shape[1] // 2)
    _product(x_TD, gate_up_E2FD, scale_EXX, rows, num_chosen, y_XF, gated=True)
    return y_XF


def expert_down(
    y_XF: Tensor,
    down_EDF: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows | Chosen,
    num_chosen: int,
) -> Tensor:
    y_XD = y_XF.new_empty(len(y_XF), down_EDF.shape[1])
    _product(y_XF, down_EDF, scale_EXX, rows, num_chosen, y_XD, gated=False)
    return y_XD


def _product(
    x_XD: Tensor,
    weight_END: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows | Chosen,
    num_chosen: int,
    out_XN: Tensor,
    *,
    gated: bool,
) -> None:
    num_features, depth = out_XN.shape[1], x_XD.shape[1]
    assert weight_END.is_contiguous() and x_XD.stride(1) == 1
    assert scale_EXX is None or scale_EXX.is_contiguous()
    tile = ALONE if isinstance(rows, Chosen) and scale_EXX is not None else rows.tile
    shape = SHAPES.get((tile, weight_END.itemsize), OTHER)
    features = shape.weights // (1 + gated)
    waits = follows(len(out_XN) // num_chosen, x_XD.device)
    tables: tuple[Tensor | None, ...] = None, None, None
    experts = rows.experts_TK.view(-1) if isinstance(rows, Chosen) else rows.tile_expert_X
    if isinstance(rows, ExpertRows):
        tables = rows.pair_of_X, rows.starts_E1, rows.tile_start_X
    product_kernel[(triton.cdiv(num_features, features), len(experts))](
        x_XD, weight_END, scale_EXX, experts, *tables, out_XN, x_XD.stride(0), num_chosen,
        N=num_features, D=depth, GATED=gated, FEATURES=features, TILE=tile,
        DEPTH=shape.depth, STAGES=shape.stages, WAITS=waits, launch_pdl=waits,
        num_warps=shape.warps,
    )  # fmt: skip


@triton.jit
def product_kernel(
    x_XD, weight_END, scale_EXX, tile_expert_X, pair_of_X, starts_E1, tile_start_X, out_XN,
    x_stride, num_chosen, N: tl.constexpr, D: tl.constexpr, GATED: tl.constexpr,
    FEATURES: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    if WAITS and GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Rows were sorted two launches before the product that is not gated: no need to wait for them.
    expert = tl.load(tile_expert_X + tl.program_id(1))
    at = tl.program_id(1) + tl.arange(0, TILE)
    if pair_of_X is None:
        pair, valid = at, tl.arange(0, TILE) == 0
        expert = tl.maximum(expert, 0)  # -1: of a token that is none
    else:
        if expert < 0:  # a dead tile
            return
        at = tl.load(tile_start_X + tl.program_id(1)) + tl.arange(0, TILE)
        valid = at < tl.load(starts_E1 + expert + 1)
        pair = tl.load(pair_of_X + at, valid, 0)
    source = pair // num_chosen if GATED else at

    part, feature = tl.arange(0, PARTS * FEATURES) // FEATURES, tl.arange(0, FEATURES)
    first = tl.program_id(0) * FEATURES
    within = first + tl.arange(0, PARTS * FEATURES) % FEATURES
    exists = within < N
    d = tl.arange(0, DEPTH)
    weight = weight_END + expert.to(tl.int64) * (PARTS * N * D)
    weight += (part * N + within)[:, None] * D + d[None, :]
    x_at = x_XD + source.to(tl.int64)[:, None] * x_stride + d[None, :]
    if scale_EXX is not None:
        ROWS: tl.constexpr = (N + SCALED - 1) // SCALED
        COLUMNS: tl.constexpr = (D + SCALED - 1) // SCALED
        scale = scale_EXX + expert.to(tl.int64) * (PARTS * ROWS * COLUMNS)
        scale += (part * ROWS + within // SCALED) * COLUMNS
    if WAITS and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    sums = tl.zeros([PARTS * FEATURES, TILE], tl.float32)
    for begun in tl.range(0, D, DEPTH, num_stages=STAGES):
        if D % DEPTH == 0:
            w = tl.load(weight + begun, exists[:, None], 0.0)
            x = tl.load(x_at + begun, valid[:, None], 0.0)
        else:
            inside = (d < D - begun)[None, :]
            w = tl.load(weight + begun, exists[:, None] & inside, 0.0)
            x = tl.load(x_at + begun, valid[:, None] & inside, 0.0)
        if scale_EXX is None:
            sums = dot(w, tl.trans(x), sums)
        else:
            of_rows = tl.load(scale + begun // SCALED, exists, 0.0) * LIFT
            nothing = tl.zeros([PARTS * FEATURES, TILE], tl.float32)
            x = (x.to(tl.float32) * (1 / LIFT)).to(tl.float16)
            sums += dot(w.to(tl.float16), tl.trans(x), nothing) * of_rows[:, None]
    if GATED:
        gate, up = sums.reshape(2, FEATURES, TILE).permute(1, 2, 0).split()
        sums = gate / (1 + tl.exp(-gate)) * up
    feature += first
    out = out_XN + at.to(tl.int64)[None, :] * N + feature[:, None]
    tl.store(out, sums.to(out_XN.dtype.element_ty), (feature < N)[:, None] & valid[None, :])


FEW_EXPERTS = ExpertProducts(
    expert_gate_up, expert_down, tile_of, lambda num_pairs, weight: True, "triton"
)
