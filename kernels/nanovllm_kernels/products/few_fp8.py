"""GEMM of up to 64 quantised rows with block-fp8 weights in one launch: y = x W^T, with split-K.

y may be added to the residual stream. The reference in few_fp8_cases.py is the same as for many
rows: each sum over 128 inputs is scaled separately, in float32. Up to FEW_ROWS rows that are not
quantised have a kernel in few_fp8_cute.py, which takes all weights of 64 rows or a multiple.

Decision: weights are the tensor cores' operand with 64 rows, x the one with 8, both as fp8. Tiles
of 16 or 32 features with all of their inputs, in 16 bits, took 14.9 us in place of 16.0 for one row
of 4096x12288, but 35 in place of 31 for 24576x4096.

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
from nanovllm_kernels.fp8_reference import Scaled
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

    features: int
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


def product(
    x8_TD: Tensor, x_scale_BT: Tensor, weight: Scaled, residual_TN: Tensor | None = None
) -> Tensor:
    """Return y_TN in bfloat16. If there is a residual stream, add to it in place and return it.

    `x_scale_BT` is [D / 128 rounded up, T or more].
    """
    (num_rows, width), device = x8_TD.shape, x8_TD.device
    num_features = len(weight.weight_ND)
    assert 0 < num_rows <= MOST_ROWS and x8_TD.stride(1) == 1
    assert weight.weight_ND.is_contiguous() and weight.scale.is_contiguous()
    y_TN = residual_TN
    if y_TN is None:
        y_TN = x8_TD.new_empty(num_rows, num_features, dtype=torch.bfloat16)
    rows = max(16, triton.next_power_of_2(num_rows))
    num_blocks, shape = triton.cdiv(width, DEEP.value), shape_of(rows, num_features)
    num_tiles = triton.cdiv(num_features, shape.features)
    num_processors = processors(device) if device.type == "cuda" else INTERPRETED_PROCESSORS
    steps = steps_of(num_tiles, num_blocks, rows, shape.programs, num_processors)
    splits, parts = triton.cdiv(num_blocks, steps), None
    if splits > 1:
        parts = y_TN.new_empty(num_tiles * splits, shape.features, rows, dtype=torch.float32)
    waits = launches_early(num_rows, device)
    few_fp8_kernel[(splits, num_tiles)](
        x8_TD, x_scale_BT, weight.weight_ND, weight.scale, residual_TN, y_TN, parts,
        tickets(device), num_rows, x8_TD.stride(0), x_scale_BT.stride(0), y_TN.stride(0),
        N=num_features, D=width, SHARED=weight.block_rows, FEATURES=shape.features, ROWS=rows,
        STEPS=steps, STAGES=shape.stages, WAITS=waits, launch_pdl=waits, num_warps=shape.warps,
    )  # fmt: skip
    return y_TN


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def few_fp8_kernel(
    x_TD, x_scale_BT, weight_ND, scale, residual_TN, y_TN, parts, tickets_X, num_rows, x_stride,
    scale_stride, y_stride, N: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of features with a slice of the inputs. SHARED rows of W share a scale."""
    BLOCKS: tl.constexpr = (D + DEEP - 1) // DEEP
    SPLITS: tl.constexpr = (BLOCKS + STEPS - 1) // STEPS
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    line = tl.minimum(feature, N - 1)
    begin, row = tl.program_id(0) * STEPS, tl.arange(0, ROWS)
    end, valid = tl.minimum(begin + STEPS, BLOCKS), row < num_rows
    launch_dependents(WAITS)
    wait(WAITS)
    sums = slice_of(
        x_TD, x_scale_BT, weight_ND, scale + line // SHARED * BLOCKS, line, row, valid, begin, end,
        x_stride, scale_stride, D, FEATURES, ROWS, STAGES,
    )  # fmt: skip
    if SPLITS > 1:
        at = row[None, :] * FEATURES + tl.arange(0, FEATURES)[:, None]
        parts += tl.program_id(1) * (SPLITS * FEATURES * ROWS)
        tl.store(parts + tl.program_id(0) * (FEATURES * ROWS) + at, sums, valid[None, :])
        tl.debug_barrier()  # all threads have stored
        if tl.atomic_add(tickets_X + tl.program_id(1), 1) < SPLITS - 1:
            return
        tl.store(tickets_X + tl.program_id(1), 0)
        sums = tl.zeros_like(sums)
        for nth in tl.range(SPLITS, loop_unroll_factor=SPLITS if ROWS <= 16 else 1):
            part = parts + nth * (FEATURES * ROWS)
            sums += tl.load(part + at, valid[None, :], 0.0, cache_modifier=".cg")
    to = row.to(tl.int64)[None, :] * y_stride + feature[:, None]
    stored = (feature < N)[:, None] & valid[None, :]
    if residual_TN is not None:
        sums += tl.load(residual_TN + to, stored, 0.0).to(tl.float32)
    tl.store(y_TN + to, sums.to(y_TN.dtype.element_ty), stored)


@triton.jit
def slice_of(
    x_TD, x_scale_BT, weight_ND, scale, line, row, valid, begin, end, x_stride, scale_stride,
    D: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the products over a range of input blocks.

    `scale` points to the first scale of each row of W.
    """
    BLOCKS: tl.constexpr = (D + DEEP - 1) // DEEP
    d = tl.arange(0, DEEP)
    weight = weight_ND + line.to(tl.int64)[:, None] * D + d[None, :]
    x_at = x_TD + row.to(tl.int64)[:, None] * x_stride + d[None, :]
    sums = tl.zeros([FEATURES, ROWS], tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        at = block * DEEP
        if D == BLOCKS * DEEP:
            w = tl.load(weight + at)
            x = tl.load(x_at + at, valid[:, None], 0.0)
        else:
            inside = (d < D - at)[None, :]
            w = tl.load(weight + at, inside, 0.0)
            x = tl.load(x_at + at, valid[:, None] & inside, 0.0)
        of_lines = tl.load(scale + block)
        x_scale = tl.load(x_scale_BT + block * scale_stride + row, valid, 0.0)
        if INTERPRETED:  # NumPy has no 8-bit floats
            w, x = w.to(tl.float32), x.to(tl.float32)
        sums += tl.dot(w, tl.trans(x)) * (of_lines[:, None] * x_scale[None, :])
    return sums
