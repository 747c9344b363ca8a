"""Products of sorted rows with the weights of their experts, and the sum over a token's experts.

Meaning: nanovllm_kernels.experts_reference. A program multiplies some rows of one expert's weight
with a tile of tokens, and never waits for another: sums have one order. Weights are what matters
at few rows, so they take the side of the tensor cores that comes in 64 rows, tokens the one that
comes in 8, and several tiles of weights are on their way at any time. Weights of block fp8 become
16 bits wide in registers, exactly; each sum over 128 inputs is scaled by itself, in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows
from nanovllm_kernels.expert_cases import Routed, kernels
from nanovllm_kernels.experts_reference import ExpertProducts
from nanovllm_kernels.paged_decode import dot
from nanovllm_kernels.route_reference import ExpertRows

FEW, MANY = 16, 128  # tokens of a tile
FEW_PER_EXPERT = 16  # pairs of an expert on average, from which on tiles are large
SCALED = tl.constexpr(128)  # elements that share a scale, in both directions
COLUMNS = 512  # that a program of `combine` sums up


class Shape(NamedTuple):
    """What a program of a product takes."""

    weights: int  # rows, of the gate and of up together
    depth: int  # inputs at a time
    stages: int  # loads on their way
    warps: int


SHAPES = {  # by tokens of a tile, and bytes of an element of the weight
    (16, 1): Shape(64, 128, 5, 4),
    (16, 2): Shape(32, 128, 4, 4),
    (64, 1): Shape(128, 128, 3, 4),
    (64, 2): Shape(128, 64, 4, 4),
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
    rows: ExpertRows,
    num_chosen: int,
) -> Tensor:
    y_XF = x_TD.new_empty(len(rows.pair_of_X), gate_up_E2FD.shape[1] // 2)
    _product(x_TD, gate_up_E2FD, scale_EXX, rows, num_chosen, y_XF, gated=True)
    return y_XF


def expert_down(
    y_XF: Tensor, down_EDF: Tensor, scale_EXX: Tensor | None, rows: ExpertRows, num_chosen: int
) -> Tensor:
    y_XD = y_XF.new_empty(len(y_XF), down_EDF.shape[1])
    _product(y_XF, down_EDF, scale_EXX, rows, num_chosen, y_XD, gated=False)
    return y_XD


def _product(
    x_XD: Tensor,
    weight_END: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows,
    num_chosen: int,
    out_XN: Tensor,
    *,
    gated: bool,
) -> None:
    num_features, depth = out_XN.shape[1], x_XD.shape[1]
    assert weight_END.is_contiguous() and x_XD.stride(1) == 1
    assert scale_EXX is None or scale_EXX.is_contiguous()
    shape = SHAPES.get((rows.tile, weight_END.itemsize), OTHER)
    if scale_EXX is not None:
        shape = shape._replace(depth=min(shape.depth, SCALED.value))
    features = shape.weights // (1 + gated)
    waits = follows(len(out_XN) // num_chosen, x_XD.device)
    product_kernel[(triton.cdiv(num_features, features), len(rows.tile_start_X))](
        x_XD,
        weight_END,
        scale_EXX,
        rows.pair_of_X,
        rows.starts_E1,
        rows.tile_expert_X,
        rows.tile_start_X,
        out_XN,
        x_XD.stride(0),
        num_chosen,
        N=num_features,
        D=depth,
        GATED=gated,
        FEATURES=features,
        TILE=rows.tile,
        DEPTH=shape.depth,
        STAGES=shape.stages,
        WAITS=waits,
        launch_pdl=waits,
        num_warps=shape.warps,
    )


@triton.jit
def product_kernel(
    x_XD,
    weight_END,
    scale_EXX,
    pair_of_X,
    starts_E1,
    tile_expert_X,
    tile_start_X,
    out_XN,
    x_stride,
    num_chosen,
    N: tl.constexpr,
    D: tl.constexpr,
    GATED: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):
    PARTS: tl.constexpr = 2 if GATED else 1
    if WAITS and GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Rows were sorted two launches before the product that is not gated: no need to wait for them.
    expert = tl.load(tile_expert_X + tl.program_id(1))
    start = tl.load(tile_start_X + tl.program_id(1))
    if expert < 0:  # a dead tile
        return
    at = start + tl.arange(0, TILE)
    valid = at < tl.load(starts_E1 + expert + 1)
    source = tl.load(pair_of_X + at, valid, 0) // num_chosen if GATED else at

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
            of_rows = tl.load(scale + begun // SCALED, exists, 0.0)
            nothing = tl.zeros([PARTS * FEATURES, TILE], tl.float32)
            # By way of both: the instruction from float16 to bfloat16 is slower than memory.
            wide = w.to(tl.float16).to(tl.float32).to(x.dtype)
            sums += dot(wide, tl.trans(x), nothing) * of_rows[:, None]
    if GATED:
        gate, up = sums.reshape(2, FEATURES, TILE).permute(1, 2, 0).split()
        sums = gate / (1 + tl.exp(-gate)) * up
    feature += first
    out = out_XN + at.to(tl.int64)[None, :] * N + feature[:, None]
    tl.store(out, sums.to(out_XN.dtype.element_ty), (feature < N)[:, None] & valid[None, :])


def combine(
    y_XD: Tensor,
    weights_TK: Tensor,
    row_of_TK: Tensor,
    shared_TD: Tensor | None = None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Overwrites the stream, if there is one, with the result."""
    num_rows, num_chosen = row_of_TK.shape
    width = y_XD.shape[1]
    x_TD = y_XD.new_empty(num_rows, width) if residual_TD is None else residual_TD
    assert y_XD.is_contiguous() and weights_TK.is_contiguous() and row_of_TK.is_contiguous()
    assert x_TD.stride(1) == 1 and (shared_TD is None or shared_TD.stride(1) == 1)
    waits = follows(num_rows, y_XD.device)
    combine_kernel[(num_rows, triton.cdiv(width, COLUMNS))](
        y_XD,
        weights_TK,
        row_of_TK,
        shared_TD,
        residual_TD,
        x_TD,
        0 if shared_TD is None else shared_TD.stride(0),
        x_TD.stride(0),
        width,
        K=num_chosen,
        BLOCK=COLUMNS,
        WAITS=waits,
        launch_pdl=waits,
        num_warps=2,
    )
    return x_TD


@triton.jit
def combine_kernel(
    y_XD,
    weights_TK,
    row_of_TK,
    shared_TD,
    residual_TD,
    x_TD,
    shared_stride,
    x_stride,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WAITS: tl.constexpr,
):
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of_TK + token * K + k).to(tl.int64)
        weight = tl.where(row >= 0, tl.load(weights_TK + token * K + k), 0.0)
        y = tl.load(y_XD + row * width + d, d < tl.where(row >= 0, width, 0), 0.0)
        total += y.to(tl.float32) * weight
    if shared_TD is not None:
        total += tl.load(shared_TD + token * shared_stride + d, inside, 0.0).to(tl.float32)
    if residual_TD is not None:
        total += tl.load(residual_TD + token * x_stride + d, inside, 0.0).to(tl.float32)
    tl.store(x_TD + token * x_stride + d, total.to(x_TD.dtype.element_ty), inside)


FEW_EXPERTS = ExpertProducts(
    expert_gate_up, expert_down, tile_of, lambda num_pairs, weight: True, "triton"
)
FP8 = (
    Routed(1, 3, 6, 96, 200, block_fp8=True),
    Routed(20, 2, 5, 24, 144, kind="first", block_fp8=True),
    Routed(5, 4, 24, 200, 136, 20, 2, kind="last", block_fp8=True),
)
SMALL = (
    Routed(1, 1, 1, 8, 8),
    Routed(20, 2, 6, 200, 96, kind="last"),
    Routed(5, 4, 24, 96, 72, 8, 9),
    Routed(7, 4, 24, 96, 72, 8, 9, kind="first"),  # this rank has nothing to do
    *FP8,
)
CHECKED = (
    Routed(2, 4, 60, 200, 2048),
    Routed(33, 12, 12, 1408, 2048),
    Routed(33, 6, 160, 192, 1536, 80, 80, block_fp8=True),
    Routed(33, 4, 60, 96, 2048, block_fp8=True),
)
TIMED = tuple(
    Routed(T, *layer)
    for layer in (
        (8, 128, 768, 2048),
        (8, 256, 1536, 3072, 0, None, "uniform", True),
        (10, 512, 512, 2048),
    )
    for T in (1, 2, 8, 64)
)
MANY_CHECKED = tuple(replace(routed, T=130) for routed in (*SMALL, *CHECKED))
MANY_TIMED = tuple(Routed(8192, 8, 128, 768, 2048, block_fp8=is_fp8) for is_fp8 in (False, True))
GATE_UP, DOWN = kernels("few", expert_gate_up, expert_down, FEW, CHECKED, TIMED, small=SMALL)
GATE_UP_128, DOWN_128 = kernels(
    "tiled", expert_gate_up, expert_down, MANY, MANY_CHECKED, MANY_TIMED, small=SMALL[1:5]
)
