"""Matrix products of few rows with weights in block fp8: y = f(x) W^T in one launch.

f is nothing or an RMSNorm. What follows is nothing, SiLU-mul, or the addition of the residual
stream. Meaning: the references in few_fp8_cases.py, which are those of many rows: x is quantised, a
scale for each 128 numbers of a row, and each sum over 128 inputs is scaled by itself, in float32.

Decision: weights take the side of the tensor cores that comes in 64 rows, x the one that comes in
8, and both go there as they are, 8 bits wide. Up to FEW_ROWS of x are quantised by each program on
the way; more had better be quantised once. A program that quantised its slice before it started
took as long (one row, 4096x4096: 8.2 us beside 8.3) or longer (4096x12288: 17.1 beside 16.1, where
x that came quantised took 16.0). Tiles of 16 or 32 lines with all of their inputs, in 16 bits,
took 7.0 and 14.9 us of x that came quantised, but 9.7 and 18.9 where each program quantised it;
a gate_up of 24576x4096 35 us, where this takes 34, and 31 of x that came quantised.

Decision: the norm has no launch of its own. A scale of x's does not change how it is quantised, so
its weight is applied on the way, and its factor at the end.

Decision: all programs are to run at once. Where there are too few tiles of features for that,
programs share one, each with a slice of the inputs: the last one to come, as its ticket tells it,
adds up what all have left, in their order. No program waits for another. Where tiles are more, but
some multiprocessors would have three and others two, they are cut as well: 288 tiles (R1's gate_up,
one row) took 105 us whole, 88 in halves, 75 in quarters and 78 in sevenths.

Decision: no weights are asked for before x is there: to have eight steps of them brought to the
cache meanwhile made 36 us of 33, four steps 10.2 of 9.4. Behind a kernel that leaves the memory
idle for 6 us it saves less than one: 37.2 of 38.0 with it (7168x16384), 14.5 of 15.0 (3072x6144).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows, processors
from nanovllm_kernels.following import let_next_come, wait
from nanovllm_kernels.fp8_reference import FEW_ROWS, FP8, Scaled
from nanovllm_kernels.paged_decode import INTERPRETED
from nanovllm_kernels.quantise import scaled

MOST_ROWS = 64  # of x, from which on tiles of many rows are faster
DEEP = tl.constexpr(128)  # inputs that share a scale
LEAST_STEPS = 4  # of so many inputs, that a program is to have
START = 2  # blocks of inputs, that a program could multiply while it starts
EVEN_ROWS = 16  # of more, parts cost more than an even share saves (32: R1's o 41 us, then 53)
TILES = 4096  # that may share tickets: more are as many programs as can run
INTERPRETED_PROCESSORS = 2


class Shape(NamedTuple):
    """What a program takes."""

    features: int  # of the gate and of up together
    stages: int  # loads on their way
    warps: int
    programs: int  # of a multiprocessor, that run at once


FEW_TILES = 32
SHAPES = {  # by rows of x, up to a power of two: of up to FEW_TILES tiles, and of more
    16: (Shape(128, 4, 4, 2), Shape(128, 3, 4, 3)),
    32: (Shape(128, 5, 4, 1), Shape(128, 4, 4, 2)),
    64: (Shape(128, 5, 4, 1), Shape(128, 4, 4, 2)),
}


@cache
def tickets(device: torch.device) -> Tensor:
    """A zero for each tile of a product, before and after it. Products follow one another."""
    return torch.zeros(TILES, dtype=torch.int32, device=device)


def shape_of(rows: int, num_features: int) -> Shape:
    few, many = SHAPES[rows]
    return few if num_features <= FEW_TILES * few.features else many


@cache  # a model has few shapes, and asks with each product that no graph replays
def steps_of(num_tiles: int, num_blocks: int, rows: int, at_once: int, num_processors: int) -> int:
    """Blocks of inputs that a program takes: as many as let programs fill what runs `at_once` on
    each multiprocessor, and of few rows fewer, if all multiprocessors then have more nearly the
    same to do. A program more costs as much time as its START blocks.
    """
    splits = max(1, min(at_once * num_processors // num_tiles, num_blocks // LEAST_STEPS))
    most = triton.cdiv(num_blocks, splits)
    if rows > EVEN_ROWS:
        return most

    def cost(steps: int) -> tuple[int, int]:
        programs = num_tiles * triton.cdiv(num_blocks, steps)
        return triton.cdiv(programs, num_processors) * (steps + START), -steps

    return min(range(min(LEAST_STEPS, most), most + 1), key=cost)


class FewFp8:
    """One of layers.ops.SkinnyLinear, for Scaled weights."""

    def fits(self, num_rows: int, weight: Scaled, **_: bool) -> bool:
        return num_rows <= FEW_ROWS and weight.dtype == FP8

    def linear(self, x_TD: Tensor, weight: Scaled) -> Tensor:
        return product(x_TD, None, weight)

    def linear_add(self, x_TD: Tensor, weight: Scaled, residual_TN: Tensor) -> Tensor:
        """In place of the residual stream."""
        return product(x_TD, None, weight, residual_TN=residual_TN)

    def norm_linear(
        self,
        x_TD: Tensor,
        norm_weight_D: Tensor,
        eps: float,
        weight: Scaled,
        *,
        gated: bool = False,
    ) -> Tensor:
        return product(x_TD, None, weight, norm_weight_D, eps, gated=gated)


FEW_FP8 = FewFp8()


def product(
    x_TD: Tensor,
    x_scale_BT: Tensor | None,
    weight: Scaled,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """y_TN in bfloat16: the residual stream itself, to which the product is added, if there is one.

    `x_scale_BT`: of rows that are quantised, [D / 128 rounded up, T or more].
    """
    (num_rows, width), device = x_TD.shape, x_TD.device
    num_features = len(weight.weight_ND) // (1 + gated)
    assert 0 < num_rows <= MOST_ROWS and x_TD.stride(1) == 1
    assert weight.weight_ND.is_contiguous() and weight.scale.is_contiguous()
    y_TN = residual_TN
    if y_TN is None:
        y_TN = x_TD.new_empty(num_rows, num_features, dtype=torch.bfloat16)
    rows = max(16, triton.next_power_of_2(num_rows))
    num_blocks, shape = triton.cdiv(width, DEEP.value), shape_of(rows, len(weight.weight_ND))
    num_tiles = triton.cdiv(num_features, shape.features // (1 + gated))
    num_processors = processors(device) if device.type == "cuda" else INTERPRETED_PROCESSORS
    steps = steps_of(num_tiles, num_blocks, rows, shape.programs, num_processors)
    splits, parts = triton.cdiv(num_blocks, steps), None
    if splits > 1:
        parts = x_TD.new_empty(num_tiles * splits, 1 + shape.features, rows, dtype=torch.float32)
    waits = follows(num_rows, device)
    scale_stride = 0 if x_scale_BT is None else x_scale_BT.stride(0)
    few_fp8_kernel[(splits, num_tiles)](
        x_TD, x_scale_BT, weight.weight_ND, weight.scale, norm_weight_D, residual_TN, y_TN, parts,
        tickets(device), num_rows, x_TD.stride(0), scale_stride, y_TN.stride(0), eps,
        N=num_features, D=width, SHARED=weight.block_rows, GATED=gated,
        FEATURES=shape.features // (1 + gated), ROWS=rows, STEPS=steps, STAGES=shape.stages,
        WAITS=waits, launch_pdl=waits, num_warps=shape.warps,
    )  # fmt: skip
    return y_TN


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def few_fp8_kernel(
    x_TD, x_scale_BT, weight_ND, scale, norm_weight_D, residual_TN, y_TN, parts, tickets_X,
    num_rows, x_stride, scale_stride, y_stride, eps, N: tl.constexpr, D: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A tile of features, and a slice of the inputs. SHARED: rows of W that share a scale."""
    BLOCKS: tl.constexpr = (D + DEEP - 1) // DEEP
    SPLITS: tl.constexpr = (BLOCKS + STEPS - 1) // STEPS
    ALL: tl.constexpr = 2 * FEATURES if GATED else FEATURES
    within = tl.program_id(1) * FEATURES + tl.arange(0, ALL) % FEATURES
    line = tl.arange(0, ALL) // FEATURES * N + tl.minimum(within, N - 1)
    begin, row = tl.program_id(0) * STEPS, tl.arange(0, ROWS)
    end, valid = tl.minimum(begin + STEPS, BLOCKS), row < num_rows
    let_next_come(WAITS)
    wait(WAITS)
    sums, squares = slice_of(
        x_TD, x_scale_BT, weight_ND, scale + line // SHARED * BLOCKS, norm_weight_D, line, row,
        valid, begin, end, x_stride, scale_stride, D, ALL, ROWS, STAGES,
    )  # fmt: skip
    if SPLITS > 1:
        at = row[None, :] * ALL + tl.arange(0, ALL)[:, None]
        parts += tl.program_id(1) * (SPLITS * (ALL + 1) * ROWS)
        own = parts + tl.program_id(0) * ((ALL + 1) * ROWS)
        tl.store(own + at, sums, valid[None, :])
        tl.store(own + ALL * ROWS + row, squares, valid)
        tl.debug_barrier()  # all have stored
        if tl.atomic_add(tickets_X + tl.program_id(1), 1) < SPLITS - 1:
            return
        tl.store(tickets_X + tl.program_id(1), 0)
        sums, squares = tl.zeros_like(sums), tl.zeros_like(squares)
        for nth in tl.range(SPLITS, loop_unroll_factor=SPLITS if ROWS <= 16 else 1):
            part = parts + nth * ((ALL + 1) * ROWS)
            sums += tl.load(part + at, valid[None, :], 0.0, cache_modifier=".cg")
            squares += tl.load(part + ALL * ROWS + row, valid, 0.0, cache_modifier=".cg")
    if norm_weight_D is not None:
        sums *= tl.rsqrt(squares / D + eps)[None, :]
    if GATED:
        gate, up = sums.reshape(2, FEATURES, ROWS).permute(1, 2, 0).split()
        sums = gate / (1 + tl.exp(-gate)) * up
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    to = row.to(tl.int64)[None, :] * y_stride + feature[:, None]
    stored = (feature < N)[:, None] & valid[None, :]
    if residual_TN is not None:
        sums += tl.load(residual_TN + to, stored, 0.0).to(tl.float32)
    tl.store(y_TN + to, sums.to(y_TN.dtype.element_ty), stored)


@triton.jit
def slice_of(
    x_TD, x_scale_BT, weight_ND, scale, norm_weight_D, line, row, valid, begin, end, x_stride,
    scale_stride, D: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products over some blocks of inputs, and what the norm needs of them. `scale`: where the
    scales of features of W begin.
    """
    BLOCKS: tl.constexpr = (D + DEEP - 1) // DEEP
    d = tl.arange(0, DEEP)
    weight = weight_ND + line.to(tl.int64)[:, None] * D + d[None, :]
    x_at = x_TD + row.to(tl.int64)[:, None] * x_stride + d[None, :]
    sums, squares = tl.zeros([ALL, ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        at = block * DEEP
        inside = (d < D - at)[None, :]
        if D == BLOCKS * DEEP:
            w = tl.load(weight + at)
            x = tl.load(x_at + at, valid[:, None], 0.0)
        else:
            w = tl.load(weight + at, inside, 0.0)
            x = tl.load(x_at + at, valid[:, None] & inside, 0.0)
        of_lines = tl.load(scale + block)
        if x_scale_BT is None:
            x = x.to(tl.float32)
            if norm_weight_D is not None:
                squares += tl.sum(x * x, 1)
                # As often as there are rows: only so is it read ahead, like the rest.
                factor_at = norm_weight_D + (0 * row)[:, None] + d[None, :]
                x *= tl.load(factor_at + at, inside, 0.0).to(tl.float32)
            x, x_scale = scaled(x)
        else:
            x_scale = tl.load(x_scale_BT + block * scale_stride + row, valid, 0.0)
        if INTERPRETED:  # numpy knows no numbers of 8 bits
            w, x = w.to(tl.float32), x.to(tl.float32)
        sums += tl.dot(w, tl.trans(x)) * (of_lines[:, None] * x_scale[None, :])
    return sums, squares
