"""Grouped GEMMs of routed experts: products of sorted rows with the weights of their experts.

The reference is reference.py. A program multiplies some rows of one expert's weight with a tile of
tokens, and waits for no other program, so sums have one order. With few tokens the reads of weights
dominate. So weights are the operand of the tensor cores that has 64 rows, and tokens the one that
has 8. Several tiles of weights are in flight at any time.

Decision: block-fp8 weights are converted to float16 in registers, exactly and by one instruction.
For bfloat16 it takes three, which took longer than the reads of memory. So tokens become float16,
too, after division by a power of two. Tokens up to 4e6 can be represented. Below 1/256 they are off
by 2e-6 at most, which is less than 8 bits would cost. Each sum over 128 inputs is scaled
separately, in float32. Products of 64 tokens rose from 87 % of the copy rate to 104 %, and 8-bit
tokens gained nothing more.

Decision: with so few tokens that rows are not sorted, the down product also sums over a token's
experts. Tensor cores take 64 rows of weights and at least 8 columns, of which a pair fills one. So
a program's rows are some features of all of a token's experts, and its columns are their inputs.
Only the diagonal blocks are used. This saves a launch, and no program waits for another.

Decision: pairs are not sorted if the weights that they read again take less time than sorting and
summing, 9 us a layer of Qwen3-Next. P pairs of E experts have P * P / 2E couples of one expert. So
44 pairs of 512 experts, which are four tokens, are not sorted, but 33 of 128 are.

Decision: the pipeline stages of unsorted pairs are limited so that all programs run at once.
A second wave of programs costs more than deeper pipelines save. A token of M2 takes 4 % less
time, one of R1 and Qwen3-Next 1 %. Prefetching the weights of down into the cache during gate_up
took 3 to 12 % more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import launches_early, processors
from nanovllm_kernels.experts.combine import store_sum
from nanovllm_kernels.experts.reference import ExpertProducts
from nanovllm_kernels.experts.route_reference import Chosen, ExpertRows
from nanovllm_kernels.triton_parts import dot, launch_dependents, wait

ALONE, FEW, MANY = 8, 16, 128  # tokens of a tile; ALONE: one pair, with 8-bit weights
UNSORTED = 32  # up to this number, pairs are never sorted
MOST_UNSORTED = 64  # above this number, they always are
REPEATED_BYTES = 16 << 20  # that unsorted pairs may read again: about 4 us at the copy rate
FEW_PER_EXPERT = 16  # average pairs per expert from which on tiles are large
SCALED = tl.constexpr(128)  # elements that share a scale, in both dimensions
LIFT = tl.constexpr(64.0)  # divisor of tokens before they become float16


class Shape(NamedTuple):
    """Tile sizes and pipeline of a product's program."""

    weights: int  # rows of the weight, gate and up together
    depth: int  # inputs per iteration
    stages: int  # pipeline stages
    warps: int


SHAPES = {  # key: (tokens of a tile, bytes per element of the weight)
    (8, 1): Shape(64, 128, 6, 2),
    (16, 1): Shape(64, 128, 5, 2),
    (16, 2): Shape(64, 128, 4, 4),
    (128, 1): Shape(128, 128, 3, 8),
    (128, 2): Shape(128, 64, 4, 8),
}
OTHER = Shape(32, 32, 2, 4)  # float32, or a tile without measurements
GROUP = 4  # warps of a group, which multiply together (wgmma)
SHARED_BYTES = 227 * 1024  # shared memory of a multiprocessor
IN_TURNS = 3  # stages if the programs cannot all run at once


def tile_of(num_pairs: int, num_experts: int) -> int:
    """Return the tile size that rows are sorted in for these products."""
    return FEW if num_pairs < FEW_PER_EXPERT * num_experts else MANY


def is_unsorted(num_pairs: int, gate_up_E2FD: Tensor) -> bool:
    """Return True if `num_pairs` pairs are multiplied without sorting them by expert."""
    num_experts, expert_bytes = len(gate_up_E2FD), 3 * gate_up_E2FD[0].nbytes // 2  # with down
    repeated = num_pairs**2 * expert_bytes // (2 * num_experts)
    return num_pairs <= UNSORTED or (num_pairs <= MOST_UNSORTED and repeated <= REPEATED_BYTES)


def expert_gate_up(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows | Chosen,
    num_chosen: int,
    *,
    ordered: bool = False,
) -> Tensor:
    """Return y_XF, as reference.expert_gate_up describes. `ordered`: see ORDERED_EXPERTS."""
    y_XF = x_TD.new_empty(len(x_TD) * num_chosen, gate_up_E2FD.shape[1] // 2)
    _product(
        x_TD,
        gate_up_E2FD,
        scale_EXX,
        rows,
        num_chosen,
        y_XF,
        gated=True,
        ordered=ordered,
    )
    return y_XF


def expert_down(
    y_XF: Tensor,
    down_EDF: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows | Chosen,
    num_chosen: int,
    *,
    ordered: bool = False,
) -> Tensor:
    """Return y_XD, as reference.expert_down describes. `ordered`: see ORDERED_EXPERTS."""
    y_XD = y_XF.new_empty(len(y_XF), down_EDF.shape[1])
    _product(y_XF, down_EDF, scale_EXX, rows, num_chosen, y_XD, ordered=ordered)
    return y_XD


def down_combine(
    y_XF: Tensor,
    down_EDF: Tensor,
    scale_EXX: Tensor | None,
    rows: Chosen,
    weights_TK: Tensor,
    shared_TD: Tensor | None = None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Return combine(expert_down(...)), which overwrites residual_TD if that is given."""
    num_tokens, num_chosen = weights_TK.shape
    x_TD = y_XF.new_empty(num_tokens, down_EDF.shape[1]) if residual_TD is None else residual_TD
    assert weights_TK.is_contiguous() and x_TD.is_contiguous()
    assert shared_TD is None or shared_TD.is_contiguous()
    _product(y_XF, down_EDF, scale_EXX, rows, num_chosen, x_TD, weights_TK, shared_TD, residual_TD)
    return x_TD


def _product(
    x_XD: Tensor,
    weight_END: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows | Chosen,
    num_chosen: int,
    out_XN: Tensor,
    weights_TK: Tensor | None = None,
    shared_TD: Tensor | None = None,
    residual_TD: Tensor | None = None,
    gated: bool = False,
    ordered: bool = False,
) -> None:
    num_features, depth = out_XN.shape[1], x_XD.shape[1]
    assert weight_END.is_contiguous() and x_XD.stride(1) == 1
    assert scale_EXX is None or scale_EXX.is_contiguous()
    is_alone = isinstance(rows, Chosen) and scale_EXX is not None and not ordered
    tile = ALONE if is_alone else rows.tile
    shape = shape_of(tile, weight_END.itemsize, ordered=ordered)
    together = 1 if weights_TK is None else num_chosen  # experts
    parts = 2 if gated else triton.next_power_of_2(together)
    features = max(1, shape.weights // parts)
    tables: tuple[Tensor | None, ...] = None, None, None
    experts = rows.experts_TK.view(-1) if isinstance(rows, Chosen) else rows.tile_expert_X
    if isinstance(rows, ExpertRows):
        tables = rows.pair_of_X, rows.starts_E1, rows.tile_start_X
    waits = launches_early(len(x_XD) if gated else len(x_XD) // num_chosen, x_XD.device)
    grid = triton.cdiv(num_features, features), len(experts) // together
    if isinstance(rows, Chosen) and x_XD.is_cuda:
        step_bytes = shape.depth * (shape.weights * weight_END.itemsize + 2 * max(tile, parts))
        shape = at_once(shape, step_bytes, grid[0] * grid[1], processors(x_XD.device))
    product_kernel[grid](
        x_XD, weight_END, scale_EXX, experts, *tables, weights_TK, shared_TD, residual_TD, out_XN,
        x_XD.stride(0), num_chosen, N=num_features, D=depth, GATED=gated, TOGETHER=together,
        FEATURES=features, TILE=max(tile, parts), DEPTH=shape.depth, STAGES=shape.stages,
        WAITS=waits, launch_pdl=waits, num_warps=shape.warps,
    )  # fmt: skip


def shape_of(tile: int, itemsize: int, *, ordered: bool = False) -> Shape:
    """Return the program's shape for a tile of tokens and weights of `itemsize` bytes."""
    shape = SHAPES.get((tile, itemsize), OTHER)
    return shape._replace(warps=max(shape.warps, GROUP if ordered else 1))


def at_once(shape: Shape, step_bytes: int, num_programs: int, num_processors: int) -> Shape:
    """Return the shape with its stages limited so that all programs run at the same time."""
    each = -(-num_programs // num_processors)
    fitting = (SHARED_BYTES // each - 1024) // step_bytes
    return shape._replace(stages=min(shape.stages, fitting) if fitting > 1 else IN_TURNS)


@triton.jit
def product_kernel(
    x_XD, weight_END, scale_EXX, tile_expert_X, pair_of_X, starts_E1, tile_start_X, weights_TK,
    shared_TD, residual_TD, out_XN, x_stride, num_chosen, N: tl.constexpr, D: tl.constexpr,
    GATED: tl.constexpr, TOGETHER: tl.constexpr, FEATURES: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of features for a tile of sorted rows or a pair, or for a token if combined.

    With weights_TK the products of a token's experts are weighted and summed.
    """
    PARTS: tl.constexpr = 2 if GATED else triton.next_power_of_2(TOGETHER)
    wait(WAITS and GATED)
    launch_dependents(WAITS and GATED and pair_of_X is not None)
    # Rows were sorted two launches before the down product, so it reads them without a wait.
    part, feature = tl.arange(0, PARTS * FEATURES) // FEATURES, tl.arange(0, FEATURES)
    first = tl.program_id(0) * FEATURES
    within = first + tl.arange(0, PARTS * FEATURES) % FEATURES
    exists, matrix = within < N, part
    if pair_of_X is None:
        at = tl.program_id(1) * TOGETHER + tl.arange(0, TILE)
        pair, valid = at, tl.arange(0, TILE) < TOGETHER
        if weights_TK is None:
            expert = tl.maximum(tl.load(tile_expert_X + tl.program_id(1)), 0)  # -1: padding
        else:
            expert, exists = 0, exists & (part < TOGETHER)
            experts = tile_expert_X + tl.program_id(1) * TOGETHER + part
            matrix = tl.maximum(tl.load(experts, part < TOGETHER, 0), 0).to(tl.int64)
    else:
        expert = tl.load(tile_expert_X + tl.program_id(1))
        if expert < 0:  # an unused tile
            return
        at = tl.load(tile_start_X + tl.program_id(1)) + tl.arange(0, TILE)
        valid = at < tl.load(starts_E1 + expert + 1)
        pair = tl.load(pair_of_X + at, valid, 0)
    source = pair // num_chosen if GATED else at

    d = tl.arange(0, DEPTH)
    weight = weight_END + tl.cast(expert, tl.int64) * (PARTS * N * D)
    weight += (matrix * N + within)[:, None] * D + d[None, :]
    x_at = x_XD + source.to(tl.int64)[:, None] * x_stride + d[None, :]
    if scale_EXX is not None:
        ROWS: tl.constexpr = (N + SCALED - 1) // SCALED
        COLUMNS: tl.constexpr = (D + SCALED - 1) // SCALED
        scale = scale_EXX + tl.cast(expert, tl.int64) * (PARTS * ROWS * COLUMNS)
        scale += (matrix * ROWS + within // SCALED) * COLUMNS
    wait(WAITS and not GATED)
    launch_dependents(WAITS and not GATED)

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
    launch_dependents(WAITS and GATED and pair_of_X is None)  # down's would take issue slots
    if GATED:
        gate, up = sums.reshape(2, FEATURES, TILE).permute(1, 2, 0).split()
        sums = gate / (1 + tl.exp(-gate)) * up
    feature += first
    if weights_TK is not None:
        sums = tl.sum(tl.where(part[:, None] == tl.arange(0, TILE)[None, :], sums, 0.0), 1)
        share = weights_TK + tl.program_id(1) * TOGETHER + part
        share = tl.load(share, part < TOGETHER, 0.0)
        sums = sums.to(x_XD.dtype.element_ty).to(tl.float32) * share  # rounded as by two launches
        total = tl.sum(sums.reshape(PARTS, FEATURES), 0)
        at = tl.program_id(1).to(tl.int64) * N + feature
        store_sum(total, at, feature < N, shared_TD, residual_TD, out_XN)
    else:
        out = out_XN + at.to(tl.int64)[None, :] * N + feature[:, None]
        tl.store(out, sums.to(out_XN.dtype.element_ty), (feature < N)[:, None] & valid[None, :])


FEW_EXPERTS = ExpertProducts(
    expert_gate_up, expert_down, tile_of, lambda num_pairs, weight: True, "triton"
)
# For kernels.invariant. Tensor cores add products of a whole warp group in another order than those
# of a single warp, so all tiles have a group. With 8 tokens, one of 17,000 results is rounded
# otherwise than with 16 or 128, so no tile has 8.
ORDERED_EXPERTS = replace(
    FEW_EXPERTS,
    gate_up=partial(expert_gate_up, ordered=True),
    down=partial(expert_down, ordered=True),
)
