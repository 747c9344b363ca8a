"""Matrix products for steps of a few rows, where reading the weights is all the work there is.

y = f(x) W^T, f nothing or a residual addition and an RMSNorm, and SiLU-mul of the result if asked:
what a decoder layer does around attention, in four launches. Meaning: reference, below.

A program owns a few lines of W, which lie one after the other in memory. Its warps split the input
width: each multiplies its slice on tensor cores, x's rows padded in registers, and the slices'
sums are added at the end. Splitting a line over warps, not over programs, leaves no second pass.

Decision: the norm's scale is a factor of a whole row of y, so it is applied to y at the end. One
pass over x then both squares and multiplies, and a term is rounded once where the reference rounds
it twice. Every program does that for itself: for a few rows it costs less than a launch.

Decision: programs start while the launch before them still runs (programmatic dependent launch).
Until its results are there they ask the L2 cache to fetch their weights: a hint, which cannot read
anything stale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels import reference
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
MOST_ROWS = 16  # beyond, the library's product is as fast
MOST_NORMED = 16384  # rows * width: every program reads all of x
FETCHED_BYTES = tl.constexpr(4096)  # of each line of weights, ahead of x


class Shape(NamedTuple):
    """Of a program."""

    lines: int  # of W
    warps: int
    depth: int  # inputs that a warp takes at a time
    stages: int


def shape_of(num_lines: int) -> Shape:
    if num_lines <= 2048:  # as many programs as multiprocessors, or fewer: each needs more in flight
        return Shape(8, 8, 128, 4)
    return Shape(8 if num_lines < 65536 else 16, 4, 128, 4)


def fits(x_TD: Tensor, weight_ND: Tensor, *, normed: bool = False) -> bool:
    num_rows, width = x_TD.shape
    rows = num_rows <= MOST_ROWS and (not normed or num_rows * width <= MOST_NORMED)
    return rows and width % 16 == 0 and weight_ND.dtype.itemsize == 2


def linear(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    y_TN, _ = _launch(x_TD, None, None, 0.0, weight_ND)
    return y_TN


def norm_linear(
    x_TD: Tensor, residual_TD: Tensor | None, gain_D: Tensor, eps: float, weight_ND: Tensor
) -> tuple[Tensor, Tensor]:
    return _launch(x_TD, residual_TD, gain_D, eps, weight_ND)


def norm_gate_up(
    x_TD: Tensor, residual_TD: Tensor | None, gain_D: Tensor, eps: float, weight_ND: Tensor
) -> tuple[Tensor, Tensor]:
    return _launch(x_TD, residual_TD, gain_D, eps, weight_ND, gated=True)


def _launch(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    gain_D: Tensor | None,
    eps: float,
    weight_ND: Tensor,
    *,
    gated: bool = False,
    shape: Shape | None = None,
    overlap: bool = True,
) -> tuple[Tensor, Tensor]:
    """(y_TN, the residual stream). `overlap`: with the launch before, on devices that can."""
    (num_rows, width), num_lines = x_TD.shape, weight_ND.shape[0] // (1 + gated)
    assert x_TD.stride(1) == 1 and weight_ND.is_contiguous() and width % 16 == 0
    y_TN = torch.empty(num_rows, num_lines, dtype=x_TD.dtype, device=x_TD.device)
    sum_TD = None if residual_TD is None else torch.empty_like(residual_TD)
    shape = shape or shape_of(num_lines)
    overlap = overlap and can_overlap(x_TD.device)
    small_linear_kernel[(triton.cdiv(num_lines, shape.lines),)](
        x_TD,
        residual_TD,
        gain_D,
        weight_ND,
        y_TN,
        sum_TD,
        num_rows,
        num_lines,
        width,
        x_TD.stride(0),
        0 if residual_TD is None else residual_TD.stride(0),
        eps,
        GATED=gated,
        ROWS=triton.next_power_of_2(num_rows),
        LINES=shape.lines,
        SLICES=shape.warps,
        DEPTH=shape.depth,
        EVEN=width % (shape.warps * shape.depth) == 0,
        STAGES=shape.stages,
        OVERLAP=overlap,
        num_warps=shape.warps,
        launch_pdl=overlap,
    )
    return y_TN, x_TD if sum_TD is None else sum_TD


def can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def small_linear_kernel(
    x_TD,
    residual_TD,
    gain_D,
    weight_ND,
    y_TN,
    sum_TD,
    T,
    N,
    D,
    x_stride,
    residual_stride,
    eps,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first = tl.program_id(0) * LINES
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        fetch_ahead(weight_ND, first, N, D, LINES)
        if GATED:
            fetch_ahead(weight_ND + N.to(tl.int64) * D, first, N, D, LINES)
        tl.extra.cuda.gdc_wait()
    # Tensors here are [SLICES, rows or lines, DEPTH]. Lines past the last read the last.
    line = tl.minimum(first + tl.arange(0, LINES), N - 1)[None, :, None].to(tl.int64)
    weight_ND += line * D
    t = tl.arange(0, ROWS)[None, :, None]
    slice, d = tl.arange(0, SLICES)[:, None, None], tl.arange(0, DEPTH)[None, None, :]
    y = tl.zeros([SLICES, ROWS, LINES], tl.float32)
    up = tl.zeros([SLICES, ROWS, LINES], tl.float32)
    squares = tl.zeros([SLICES, ROWS, DEPTH], tl.float32)
    for done in tl.range(0, D, SLICES * DEPTH, num_stages=STAGES):
        at = done + slice * DEPTH + d
        inside = t < T if EVEN else (t < T) & (at < D)
        x = tl.load(x_TD + t * x_stride + at, inside, 0.0)
        if gain_D is not None:
            if residual_TD is not None:
                residual = tl.load(residual_TD + t * residual_stride + at, inside, 0.0)
                x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
                tl.store(sum_TD + t * D + at, x, inside & (first == 0))
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * load(gain_D, at, D, EVEN).to(tl.float32)).to(x.dtype)
        y = dot(x, load(weight_ND, at, D, EVEN), y)
        if GATED:
            up = dot(x, load(weight_ND + N.to(tl.int64) * D, at, D, EVEN), up)
    dtype = y_TN.dtype.element_ty
    scale = 1.0
    if gain_D is not None:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / D + eps)[:, None]
    y = (tl.sum(y, 0) * scale).to(dtype)
    if GATED:
        gate = y.to(tl.float32)
        activated = (gate / (1 + tl.exp(-gate))).to(dtype)
        up = (tl.sum(up, 0) * scale).to(dtype)
        y = (activated.to(tl.float32) * up.to(tl.float32)).to(dtype)
    row, n = tl.arange(0, ROWS)[:, None], first + tl.arange(0, LINES)[None, :]
    tl.store(y_TN + row * N + n, y, (row < T) & (n < N))


@triton.jit
def fetch_ahead(weight_ND, first, N, D, LINES: tl.constexpr):
    """The beginning of each of the program's lines, into the L2 cache. A warp asks for a line."""
    line = tl.minimum(first + tl.arange(0, LINES * 32) // 32, N - 1)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [(weight_ND + line.to(tl.int64) * D).to(tl.int64), tl.minimum(2 * D, FETCHED_BYTES)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load(start, at, D, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(start + at)
    return tl.load(start + at, at < D, 0.0)


@triton.jit
def dot(x, weight, sum):
    if INTERPRETED:  # numpy knows no bfloat16
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    return tl.dot(x, tl.permute(weight, (0, 2, 1)), sum)
