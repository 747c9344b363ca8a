"""Quantisation of activations to block fp8: e4m3 with a float32 scale per row and 128 numbers.

Rows may be quantised for their experts: a token is read once and written to the sorted rows of all
its pairs. Scales are stored in the order of the GEMMs' reads: those of all rows for one block of
inputs are contiguous. A block of zeros has scale 1. The reference is quantise_cases.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import launches_early
from nanovllm_kernels.fp8_reference import BLOCK, Quantised, empty
from nanovllm_kernels.triton_parts import INTERPRETED, launch_dependents, wait

BLOCKS = 8, 16  # blocks of 128 numbers per program; 16 if the width is a multiple of that


def silu_mul_quantise(gate_up_T2F: Tensor) -> Quantised:
    """Return silu(gate) * up, quantised without rounding it to 16 bits."""
    return quantise(gate_up_T2F, gated=True)


def quantise(x_TD: Tensor, row_of_TK: Tensor | None = None, *, gated: bool = False) -> Quantised:
    """Return each row once, or copies at the sorted rows of its pairs. Other rows are not written.

    If `gated`, quantise the silu of the first half of each row, times the second.
    """
    num_rows, width = len(x_TD), x_TD.shape[1] // (1 + gated)
    num_copies = 1 if row_of_TK is None else row_of_TK.shape[1]
    result = empty(num_rows * num_copies, width, x_TD.device)
    waits, blocks = launches_early(num_rows, x_TD.device), BLOCKS[width % (BLOCKS[1] * BLOCK) == 0]
    quantise_kernel[(num_rows, triton.cdiv(width, blocks * BLOCK))](
        x_TD,
        row_of_TK,
        *result,
        x_TD.stride(0),
        width,
        num_rows * num_copies,
        GATED=gated,
        COPIES=num_copies,
        BLOCKS=blocks,
        WAITS=waits,
        launch_pdl=waits,
    )
    return result


def norm_quantise(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float
) -> Quantised:
    """Return norm.rms_norm of x, quantised.

    With a residual stream, add x, or the sum of its slices, to the stream in place, and take the
    norm of the sum.
    """
    num_rows, width = x_TD.shape[-2:]
    result, waits = empty(num_rows, width, x_TD.device), launches_early(num_rows, x_TD.device)
    blocks = triton.next_power_of_2(triton.cdiv(width, BLOCK))
    norm_quantise_kernel[(num_rows,)](
        x_TD,
        residual_TD,
        norm_weight_D,
        *result,
        x_TD.stride(0),
        x_TD.stride(-2),
        0 if residual_TD is None else residual_TD.stride(0),
        num_rows,
        eps,
        SLICES=len(x_TD) if x_TD.ndim == 3 else 1,
        WIDTH=width,
        BLOCKS=blocks,
        WAITS=waits,
        launch_pdl=waits,
        num_warps=min(max(blocks // 4, 1), 16),
    )
    return result


def few_quantise(x_TD: Tensor, norm_weight_D: Tensor | None = None, eps: float = 0.0) -> Quantised:
    """Return rows, or their norm in float32, quantised. The width is a multiple of 128.

    The next kernel is launched at once, which must be one that loads only weights before it waits.
    """
    num_rows, width = x_TD.shape
    result, waits = empty(num_rows, width, x_TD.device), launches_early(num_rows, x_TD.device)
    is_normed = norm_weight_D is not None
    blocks = triton.next_power_of_2(width // BLOCK) if is_normed else BLOCKS[0]
    few_quantise_kernel[(num_rows, triton.cdiv(width, blocks * BLOCK))](
        x_TD,
        norm_weight_D,
        *result,
        x_TD.stride(0),
        num_rows,
        eps,
        WIDTH=width,
        BLOCKS=blocks,
        WAITS=waits,
        launch_pdl=waits,
        num_warps=8 if is_normed else 4,
    )
    return result


@triton.jit(do_not_specialize=["num_rows"])
def few_quantise_kernel(
    x_TD, norm_weight_D, values_TD, scale_BT, stride, num_rows, eps, WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    launch_dependents(WAITS)
    row = tl.program_id(0).to(tl.int64)
    block, d = places(BLOCKS)
    if norm_weight_D is not None:
        norm_weight = tl.load(norm_weight_D + d, d < WIDTH, 0.0).to(tl.float32)
    wait(WAITS)
    x = tl.load(x_TD + row * stride + d, d < WIDTH, 0.0).to(tl.float32)
    if norm_weight_D is not None:
        factor = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / WIDTH + eps)
        x *= norm_weight
    values, scale = scaled(x)
    if norm_weight_D is not None:  # quantisation does not depend on a common factor of a row
        scale *= factor
    tl.store(values_TD + row * WIDTH + d, values, d < WIDTH)
    tl.store(scale_BT + block * num_rows + row, scale, block * 128 < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def norm_quantise_kernel(
    x_TD, residual_TD, norm_weight_D, values_TD, scale_BT, slice_stride, x_stride, residual_stride,
    num_rows, eps, SLICES: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block, d = places(BLOCKS)
    norm_weight = tl.load(norm_weight_D + d, d < WIDTH, 0.0)
    wait(WAITS)
    x = tl.load(x_TD + row * x_stride + d, d < WIDTH, 0.0)
    if residual_TD is not None:
        total = x.to(tl.float32)
        for nth in tl.static_range(1, SLICES):
            at = x_TD + nth * slice_stride + row * x_stride + d
            total += tl.load(at, d < WIDTH, 0.0).to(tl.float32)
        at = residual_TD + row * residual_stride + d
        x = (total + tl.load(at, d < WIDTH, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(at, x, d < WIDTH)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / WIDTH + eps)
    values, scale = scaled((wide * factor).to(x.dtype).to(tl.float32) * norm_weight.to(tl.float32))
    tl.store(values_TD + row * WIDTH + d, values, d < WIDTH)
    tl.store(scale_BT + block * num_rows + row, scale, block * 128 < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def quantise_kernel(
    x_TD, row_of_TK, values_XD, scale_BX, stride, width, num_rows, GATED: tl.constexpr,
    COPIES: tl.constexpr, BLOCKS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    wait(WAITS)
    token = tl.program_id(0).to(tl.int64)
    block, d = places(BLOCKS)
    x = tl.load(x_TD + token * stride + d, d < width, 0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_TD + token * stride + width + d, d < width, 0.0).to(tl.float32)
        x = x / (1 + tl.exp(-x)) * up
    values, scale = scaled(x)
    for k in tl.static_range(COPIES):
        row = token
        if row_of_TK is not None:
            row = tl.load(row_of_TK + token * COPIES + k).to(tl.int64)
        end = tl.where(row < 0, 0, width)  # rows of other ranks are not written
        tl.store(values_XD + row * width + d, values, d < end)
        tl.store(scale_BX + block * num_rows + row, scale, block * 128 < end)


@triton.jit
def places(BLOCKS: tl.constexpr):
    """Return this program's blocks and the columns in them."""
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    return block.to(tl.int64), block[:, None] * 128 + tl.arange(0, 128)[None, :]


@triton.jit
def scaled(x):
    """Return blocks in e4m3, and their scales."""
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, largest / 448.0, 1.0)
    values = x / scale[:, None]
    if INTERPRETED:  # the interpreter drops a rounding carry into the exponent
        split = values * 1048577.0
        values = split - (split - values)  # rounded to 4 significant bits
    return values.to(tl.float8e4nv), scale
