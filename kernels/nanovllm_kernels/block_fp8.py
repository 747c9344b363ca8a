"""Products of rows and weights that both are block fp8, of any sizes, in Triton.

Meaning: block_fp8_cases.py.

Decision: a tensor core keeps few bits of an fp8 sum, so each 128 inputs, which share their scales,
are a product of their own, added up in float32. A sum handed to `tl.dot` would stay in there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows
from nanovllm_kernels.fp8_reference import BLOCK, Fp8Linear
from nanovllm_kernels.paged_decode import INTERPRETED
from nanovllm_kernels.quantise import norm_quantise, quantise, silu_mul_quantise

TILE_LINES, MOST_TILE_ROWS = 64, 128
TOGETHER = 8  # tiles of rows that share what they read of W while it is in the cache


def block_fp8_linear(
    x8_TD: Tensor,
    x_scale_BT: Tensor,
    w8_ND: Tensor,
    w_scale: Tensor,
    residual_TN: Tensor | None = None,
    block_rows: int = BLOCK,
) -> Tensor:
    """y_TN in bfloat16: the residual stream itself, to which the product is added, if there is one.

    `x_scale_BT`: [D / 128 rounded up, T]. `w_scale`: [N / block_rows rounded up, D / 128 rounded
    up].
    """
    (num_rows, width), num_lines = x8_TD.shape, len(w8_ND)
    y_TN = residual_TN
    if y_TN is None:
        y_TN = x8_TD.new_empty(num_rows, num_lines, dtype=torch.bfloat16)
    tile_rows = min(max(triton.next_power_of_2(num_rows), 16), MOST_TILE_ROWS)
    waits = follows(num_rows, x8_TD.device)
    grid = triton.cdiv(num_rows, tile_rows), triton.cdiv(num_lines, TILE_LINES)
    block_fp8_kernel[(grid[0] * grid[1],)](
        x8_TD, x_scale_BT, w8_ND, w_scale, residual_TN, y_TN,
        num_rows, num_lines, width, x8_TD.stride(0), x_scale_BT.stride(0), w_scale.stride(0),
        y_TN.stride(0),
        BLOCK_ROWS=block_rows, TILE_ROWS=tile_rows, TILE_LINES=TILE_LINES, TOGETHER=TOGETHER,
        WAITS=waits, launch_pdl=waits, num_warps=4, num_stages=4,
    )  # fmt: skip
    return y_TN


@triton.jit
def block_fp8_kernel(
    x8_TD, x_scale_BT, w8_ND, w_scale, residual_TN, y_TN, num_rows, num_lines, width,
    x_stride, x_scale_stride, w_scale_stride, y_stride, BLOCK_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_LINES: tl.constexpr, TOGETHER: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    if WAITS:
        tl.extra.cuda.gdc_wait()
    row_tiles, line_tiles = tl.cdiv(num_rows, TILE_ROWS), tl.cdiv(num_lines, TILE_LINES)
    row_tile, line_tile = tl.swizzle2d(
        tl.program_id(0) // line_tiles,
        tl.program_id(0) % line_tiles,
        row_tiles,
        line_tiles,
        TOGETHER,
    )
    t = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = line_tile * TILE_LINES + tl.arange(0, TILE_LINES)
    d = tl.arange(0, 128)
    x_at = x8_TD + t.to(tl.int64)[:, None] * x_stride + d[None, :]
    w_at = w8_ND + n.to(tl.int64)[None, :] * width + d[:, None]
    x_scale_at, w_scale_at = x_scale_BT + t, w_scale + n // BLOCK_ROWS * w_scale_stride
    sums = tl.zeros((TILE_ROWS, TILE_LINES), tl.float32)
    for start in range(0, width, 128):
        inside = start + d < width
        x = tl.load(x_at, (t < num_rows)[:, None] & inside[None, :], 0.0)
        w = tl.load(w_at, (n < num_lines)[None, :] & inside[:, None], 0.0)
        if INTERPRETED:
            x, w = x.to(tl.float32), w.to(tl.float32)
        x_scale = tl.load(x_scale_at, t < num_rows, 0.0)
        w_scale_n = tl.load(w_scale_at, n < num_lines, 0.0)
        sums += tl.dot(x, w) * (x_scale[:, None] * w_scale_n[None, :])
        x_at += 128
        w_at += 128
        x_scale_at += x_scale_stride
        w_scale_at += 1
    at = t.to(tl.int64)[:, None] * y_stride + n[None, :]
    inside = (t < num_rows)[:, None] & (n < num_lines)[None, :]
    if residual_TN is not None:
        sums += tl.load(residual_TN + at, inside, 0.0).to(tl.float32)
    tl.store(y_TN + at, sums.to(y_TN.dtype.element_ty), inside)


FP8_LINEAR = Fp8Linear(
    block_fp8_linear, lambda *_: None, None, quantise, norm_quantise, silu_mul_quantise
)
