"""GEMM of few rows with block-fp8 weights in one launch: y = f(x) W^T, with split-K.

f is the identity or an RMSNorm. The epilogue is nothing, SiLU-mul, or the addition of the residual
stream. The references in few_fp8_cases.py are the same as for many rows. They quantise x with a
scale per row and 128 inputs, and scale each sum over 128 inputs separately, in float32.

Decision: weights are the tensor cores' operand with 64 rows, x the one with 8, both as fp8. Up to
FEW_ROWS rows of x are quantised by each program inside its loop; more are better quantised once,
before. Quantising a program's whole slice before its loop was not faster. One row of 4096x4096 took
8.2 us in place of 8.3. One of 4096x12288 took 17.1 in place of 16.1, and 16.0 if x is already
quantised. Tiles of 16 or 32 features with all of their inputs, in 16 bits, took 7.0 and 14.9 us if
x was already quantised. They took 9.7 and 18.9 us if each program quantised it. A gate_up of
24576x4096 took 35 us that way. It takes 34 us here, and 31 if x is already quantised.

Decision: the norm has no launch of its own. Quantisation does not depend on a common factor of a
row. So the norm's weight is applied before quantisation, and its factor at the end.

Decision: all programs should run at once. If there are too few tiles of features for that, the
inputs of a tile are split over several programs (split-K). The last program to finish, found by an
atomic ticket, adds the partial sums in a fixed order. No program waits for another. Larger numbers
of tiles are split as well if some multiprocessors would get three and others two. On R1's gate_up
with one row, 288 tiles took 105 us whole, 88 in halves, 75 in quarters and 78 in sevenths.

Decision: weights are not prefetched before x is ready. Prefetching eight steps into the L2 cache
took 36 us in place of 33, and four steps 10.2 in place of 9.4. A prefetch saves less than 1 us even
after a kernel that leaves memory idle for 6 us. It took 37.2 in place of 38.0 us (7168x16384), and
14.5 in place of 15.0 (3072x6144).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import launches_early, processors
from nanovllm_kernels.fp8_reference import FEW_ROWS, FP8, Scaled
from nanovllm_kernels.products.quantise import scaled
from nanovllm_kernels.triton_parts import INTERPRETED, launch_dependents, wait

MOST_ROWS = 64  # of x; with more, tiles of many rows are faster
DEEP = tl.constexpr(128)  # inputs that share a scale
LEAST_STEPS = 4  # minimum blocks of DEEP inputs for a program
START = 2  # blocks of inputs that a program could multiply during its start
EVEN_ROWS = 16  # with more, parts cost more than balance saves (32: R1's o 41 us, then 53)
TILES = 4096  # that may share tickets; more tiles keep the GPU busy unsplit
INTERPRETED_PROCESSORS = 2


class Shape(NamedTuple):
    """Tile and launch settings of a program."""

    features: int  # gate and up together
    stages: int  # depth of the load pipeline
    warps: int
    programs: int  # resident programs per multiprocessor


FEW_TILES = 32
SHAPES = {  # by rows of x, rounded up to a power of two: with up to FEW_TILES tiles, and with more
    16: (Shape(128, 4, 4, 2), Shape(128, 3, 4, 3)),
    32: (Shape(128, 5, 4, 1), Shape(128, 4, 4, 2)),
    64: (Shape(128, 5, 4, 1), Shape(128, 4, 4, 2)),
}


@cache
def tickets(device: torch.device) -> Tensor:
    """Return the ticket of each tile, 0 before and after a product. Products run one at a time."""
    return torch.zeros(TILES, dtype=torch.int32, device=device)


def shape_of(rows: int, num_features: int) -> Shape:
    few, many = SHAPES[rows]
    return few if num_features <= FEW_TILES * few.features else many


@cache  # a model has few shapes, and every product outside a CUDA graph calls this
def steps_of(num_tiles: int, num_blocks: int, rows: int, at_once: int, num_processors: int) -> int:
    """Return the blocks of inputs for a program.

    Split the inputs so far that the programs fill the GPU with `at_once` per multiprocessor. With
    few rows, split further if that balances the multiprocessors. An extra program costs the time of
    START blocks.
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
    """Kernels of layers.products.Skinny for Scaled weights."""

    def fits(self, num_rows: int, weight: Scaled, **_: bool) -> bool:
        return num_rows <= FEW_ROWS and weight.dtype == FP8

    def linear(self, x_TD: Tensor, weight: Scaled) -> Tensor:
        return product(x_TD, None, weight)

    def linear_add(self, x_TD: Tensor, weight: Scaled, residual_TN: Tensor) -> Tensor:
        """Add to the residual stream in place."""
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
    """Return y_TN in bfloat16. If there is a residual stream, add to it in place and return it.

    `x_scale_BT` has the scales if x is quantised, [D / 128 rounded up, T or more].
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
    waits = launches_early(num_rows, device)
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
    """Multiply a tile of features with a slice of the inputs. SHARED rows of W share a scale."""
    BLOCKS: tl.constexpr = (D + DEEP - 1) // DEEP
    SPLITS: tl.constexpr = (BLOCKS + STEPS - 1) // STEPS
    ALL: tl.constexpr = 2 * FEATURES if GATED else FEATURES
    within = tl.program_id(1) * FEATURES + tl.arange(0, ALL) % FEATURES
    line = tl.arange(0, ALL) // FEATURES * N + tl.minimum(within, N - 1)
    begin, row = tl.program_id(0) * STEPS, tl.arange(0, ROWS)
    end, valid = tl.minimum(begin + STEPS, BLOCKS), row < num_rows
    launch_dependents(WAITS)
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
        tl.debug_barrier()  # all threads have stored
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
    """Return the products over a range of input blocks, and the sums of squares for the norm.

    `scale` points to the first scale of each row of W.
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
                # One load per row of x: only a two-dimensional load is pipelined like the others.
                factor_at = norm_weight_D + (0 * row)[:, None] + d[None, :]
                x *= tl.load(factor_at + at, inside, 0.0).to(tl.float32)
            x, x_scale = scaled(x)
        else:
            x_scale = tl.load(x_scale_BT + block * scale_stride + row, valid, 0.0)
        if INTERPRETED:  # NumPy has no 8-bit floats
            w, x = w.to(tl.float32), x.to(tl.float32)
        sums += tl.dot(w, tl.trans(x)) * (of_lines[:, None] * x_scale[None, :])
    return sums, squares
