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
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels import reference
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal
from nanovllm_kernels.device import can_overlap

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Where it beats the library on one H200 (results/LOG.md, 2026-11-21).
ALWAYS_ROWS = 4  # up to so many rows a plain product
MOST_ROWS = 16  # or up to so many,
MOST_OUTPUTS = 32768  # with at most so many results: rows * lines
MOST_NORMED = 4096  # with a norm, rows * width: every program reads all of x


class Shape(NamedTuple):
    """How a program cuts its part of a product."""

    lines: int  # of W
    warps: int
    depth: int  # inputs that a warp takes at a time
    stages: int
    ahead: int  # bytes of each line that are fetched while the launch before runs


def shape_of(num_lines: int, width: int, gated: bool) -> Shape:
    """The fastest of eleven for each layer of Qwen3-0.6B and 8B, one row, on one H200."""
    if num_lines <= 2048:
        return Shape(8, 4, 128, 3, 4096)
    if num_lines <= 4096 <= width:
        return Shape(8, 4, 128, 6, 4096)
    return Shape(8 if gated else 16, 4, 128, 4, 4096)


@dataclass(frozen=True, slots=True)
class SmallLinear:
    """The methods of layers.ops.Ops of the same names, each in one launch."""

    overlap: bool = False  # with the launch before: in a chain of layers it loses what it gains
    shape: Shape | None = None  # None: the best known

    def fits(self, num_rows: int, weight_ND: Tensor, *, normed: bool = False) -> bool:
        width = weight_ND.shape[1]
        if normed:
            few = num_rows <= MOST_ROWS and num_rows * width <= MOST_NORMED
        else:
            few_results = num_rows * weight_ND.shape[0] <= MOST_OUTPUTS
            few = num_rows <= (MOST_ROWS if few_results else ALWAYS_ROWS)
        return few and width % 16 == 0 and weight_ND.dtype.itemsize == 2

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        return self._launch(x_TD, None, None, 0.0, weight_ND, False)[0]

    def norm_linear(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        norm_weight_D: Tensor,
        eps: float,
        weight_ND: Tensor,
        *,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return self._launch(x_TD, residual_TD, norm_weight_D, eps, weight_ND, gated)

    def _launch(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        norm_weight_D: Tensor | None,
        eps: float,
        weight_ND: Tensor,
        gated: bool,
    ) -> tuple[Tensor, Tensor]:
        (num_rows, width), num_lines = x_TD.shape, weight_ND.shape[0] // (1 + gated)
        assert x_TD.stride(1) == 1 and weight_ND.is_contiguous() and width % 16 == 0
        y_TN = torch.empty(num_rows, num_lines, dtype=x_TD.dtype, device=x_TD.device)
        sum_TD = None
        if residual_TD is not None:  # not in place: every program reads the old one
            sum_TD = torch.empty(num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
        shape = self.shape or shape_of(num_lines, width, gated)
        overlap = self.overlap and can_overlap(x_TD.device)
        small_linear_kernel[(triton.cdiv(num_lines, shape.lines),)](
            x_TD,
            residual_TD,
            norm_weight_D,
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
            AHEAD=shape.ahead,
            OVERLAP=overlap,
            num_warps=shape.warps,
            launch_pdl=overlap,
        )
        return y_TN, x_TD if sum_TD is None else sum_TD


SMALL_LINEAR = SmallLinear()


@triton.jit
def small_linear_kernel(
    x_TD,
    residual_TD,
    norm_weight_D,
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
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first = tl.program_id(0) * LINES
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD:
            fetch_ahead(weight_ND, first, N, D, LINES, AHEAD)
            if GATED:
                fetch_ahead(weight_ND + N.to(tl.int64) * D, first, N, D, LINES, AHEAD)
        tl.extra.cuda.gdc_wait()
    # Tensors here are [SLICES, rows or lines, DEPTH]. Lines past the last read the last.
    line = tl.minimum(first + tl.arange(0, LINES), N - 1)[None, :, None].to(tl.int64)
    weight_ND += line * D
    t = tl.arange(0, ROWS)[None, :, None]
    slice, d = tl.arange(0, SLICES)[:, None, None], tl.arange(0, DEPTH)[None, None, :]
    kept = tl.where(first == 0, T, 0)  # rows of the sum that this program writes
    y = tl.zeros([SLICES, ROWS, LINES], tl.float32)
    up = tl.zeros([SLICES, ROWS, LINES], tl.float32)
    squares = tl.zeros([SLICES, ROWS, DEPTH], tl.float32)
    for done in tl.range(0, D, SLICES * DEPTH, num_stages=STAGES):
        at = done + slice * DEPTH + d
        inside = t < T if EVEN else (t < T) & (at < D)
        x = tl.load(x_TD + t * x_stride + at, inside, 0.0)
        if norm_weight_D is not None:
            if residual_TD is not None:
                residual = tl.load(residual_TD + t * residual_stride + at, inside, 0.0)
                x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
                tl.store(sum_TD + t * D + at, x, inside & (t < kept))
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * load(norm_weight_D, at, D, EVEN).to(tl.float32)).to(x.dtype)
        y = dot(x, load(weight_ND, at, D, EVEN), y)
        if GATED:
            up = dot(x, load(weight_ND + N.to(tl.int64) * D, at, D, EVEN), up)
    dtype = y_TN.dtype.element_ty
    scale = 1.0
    if norm_weight_D is not None:
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
def fetch_ahead(weight_ND, first, N, D, LINES: tl.constexpr, AHEAD: tl.constexpr):
    """The beginning of each of the program's lines, into the L2 cache. A warp asks for a line."""
    line = tl.minimum(first + tl.arange(0, LINES * 32) // 32, N - 1)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [(weight_ND + line.to(tl.int64) * D).to(tl.int64), tl.minimum(2 * D, AHEAD)],
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


def linear_reference(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    return functional.linear(x_TD.float(), weight_ND.float()).to(x_TD.dtype)


def norm_linear_reference(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight_ND: Tensor,
    *,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    normed_TD, sum_TD = normed(x_TD, residual_TD, norm_weight_D, eps)
    y_TN = linear_reference(normed_TD, weight_ND)
    return reference.silu_mul(y_TN) if gated else y_TN, sum_TD


def normed(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if residual_TD is None:
        return reference.rms_norm(x_TD, norm_weight_D, eps), x_TD
    return reference.add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)


def linear_inputs(T: int, N: int, D: int, device: torch.device) -> Args:
    weight_ND = normal(device, N, D, dtype=torch.bfloat16, seed=1).mul_(D**-0.5)
    return normal(device, T, D + 32, dtype=torch.bfloat16)[:, :D], weight_ND


def norm_inputs(T: int, N: int, D: int, device: torch.device, kind: str = "normal") -> Args:
    """`first`: no residual yet; `spike`: one huge element a row; `faint`: squares of eps' size."""
    x_TD, weight_ND = linear_inputs(T, N, D, device)
    if kind == "spike":
        x_TD[:, D // 3] = 3e4
    residual_TD = None if kind == "first" else normal(device, T, D, dtype=x_TD.dtype, seed=2)
    eps = 1.0 if kind == "faint" else 1e-6
    return x_TD, residual_TD, normal(device, D, dtype=x_TD.dtype, seed=3), eps, weight_ND


def sizes(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """How large each product's terms are together, as errors add up: root of summed squares."""
    return functional.linear(x_TD.float().square(), weight_ND.float().square()).sqrt()


def linear_scale(expected: Tensors, args: Args) -> Tensors:
    return (expected[0].abs() + sizes(*args),)


def norm_scale(expected: Tensors, args: Args) -> Tensors:
    y_TN, sum_TD = (tensor.abs() for tensor in expected)
    return y_TN + sizes(normed(*args[:4])[0], args[4]), sum_TD


def gate_up_scale(expected: Tensors, args: Args) -> Tensors:
    y_TF, sum_TD = (tensor.abs() for tensor in expected)
    normed_TD, _ = normed(*args[:4])
    gate_up_TN = linear_reference(normed_TD, args[4]).float()
    return y_TF + gated_sizes(gate_up_TN, sizes(normed_TD, args[4])), sum_TD


def gated_sizes(gate_up_TN: Tensor, sizes_TN: Tensor) -> Tensor:
    """Errors of the gate, by at most 1.1 of which its activation moves, and of the other factor."""
    (gate_TF, up_TF), (gate_size_TF, up_size_TF) = gate_up_TN.chunk(2, -1), sizes_TN.chunk(2, -1)
    return 1.1 * gate_size_TF * up_TF.abs() + functional.silu(gate_TF).abs() * up_size_TF


def cases(
    inputs: Callable[..., Args], kinds: tuple[str, ...], shapes: list[tuple[int, int]]
) -> tuple[Case, ...]:
    """`shapes`: N, D of Qwen3's layers, timed. The checked ones end within blocks of both."""
    most = 4 if kinds else 16  # rows of which norms are computed here
    checked = [(T, N, D) for T, N in ((1, 8), (3, 44), (most, 24)) for D in (64, 1024, 1136)]
    odd = [
        Case(f"{kind} T=2 N=24 D=528", partial(inputs, 2, 24, 528, kind=kind), True)
        for kind in kinds
    ]
    timed = [
        Case(
            f"T={T} N={N} D={D}",
            partial(inputs, T, N, D),
            num_bytes=2 * (N * D + T * D * (1 + 2 * bool(kinds)) + T * N),
        )
        for (N, D), T in product(shapes, (1, 2, 4, 8))
    ]
    small = [Case(f"T={T} N={N} D={D}", partial(inputs, T, N, D), True) for T, N, D in checked]
    return (*small, *odd, *timed)


KINDS = ("first", "spike", "faint")
PLAIN = [(1024, 2048), (1024, 3072), (151936, 1024), (4096, 4096), (4096, 12288), (151936, 4096)]

# An ulp for the rounding of y; a third of one in each term of a product, of which there are many.
LINEAR = Kernel(
    "small_linear",
    SMALL_LINEAR.linear,
    linear_reference,
    cases(linear_inputs, (), PLAIN),
    ulps_16=1,
    scale=linear_scale,
)
NORM_LINEAR = Kernel(
    "norm_linear",
    SMALL_LINEAR.norm_linear,
    norm_linear_reference,
    cases(norm_inputs, KINDS, [(4096, 1024), (6144, 4096)]),
    ulps_16=1.5,
    scale=norm_scale,
)
NORM_GATE_UP = Kernel(
    "norm_gate_up",
    partial(SMALL_LINEAR.norm_linear, gated=True),
    partial(norm_linear_reference, gated=True),
    cases(norm_inputs, KINDS, [(6144, 1024), (24576, 4096)]),
    ulps_16=1.5,
    scale=gate_up_scale,
)
