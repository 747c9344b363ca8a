"""Products of each head with a matrix of its own, in one order of sums for any number of rows.

For kernels.invariant. The library has other kernels for one row than for many, and their sums have
another order. Here a program computes 64 rows, of which the last ones may be padding, and goes
through the inputs from first to last.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.triton_parts import dot

ROWS, COLUMNS, INPUTS = 64, 128, 64  # of a program's tile


def per_head(x_THD: Tensor, weight_HDN: Tensor, out_THN: Tensor | None = None) -> Tensor:
    """Return y_THN, x W of each head with its own W [D, N], in out_THN if given.

    Strides are arbitrary.
    """
    (T, H, D), N = x_THD.shape, weight_HDN.shape[2]
    if out_THN is None:
        out_THN = torch.empty(T, H, N, dtype=x_THD.dtype, device=x_THD.device)
    per_head_kernel[(triton.cdiv(T, ROWS), H, triton.cdiv(N, COLUMNS))](
        x_THD, weight_HDN, out_THN, T, *x_THD.stride(), *weight_HDN.stride(), *out_THN.stride(),
        D=D, N=N, ROWS=ROWS, COLUMNS=COLUMNS, INPUTS=INPUTS, num_warps=4,
    )  # fmt: skip
    return out_THN


@triton.jit(do_not_specialize=["num_rows"])
def per_head_kernel(
    x_THD, weight_HDN, out_THN, num_rows, x_row, x_head, x_input, weight_head, weight_input,
    weight_column, out_row, out_head, out_column, D: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n, d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INPUTS)
    x_at = x_THD + t[:, None] * x_row + head * x_head
    weight_at = weight_HDN + head * weight_head + n[None, :] * weight_column
    sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, D, INPUTS):
        in_x = (t < num_rows)[:, None] & (first + d < D)[None, :]
        in_weight = (first + d < D)[:, None] & (n < N)[None, :]
        x = tl.load(x_at + (first + d)[None, :] * x_input, in_x, 0.0)
        weight = tl.load(weight_at + (first + d)[:, None] * weight_input, in_weight, 0.0)
        sum = dot(x, weight, sum)
    out_at = out_THN + t[:, None] * out_row + head * out_head + n[None, :] * out_column
    inside = (t < num_rows)[:, None] & (n < N)[None, :]
    tl.store(out_at, sum.to(out_THN.dtype.element_ty), inside)


def reference(x_THD: Tensor, weight_HDN: Tensor) -> Tensor:
    return torch.einsum("thd,hdn->thn", x_THD.float(), weight_HDN.float()).to(x_THD.dtype)


def sizes(expected: Tensors, args: Args) -> Tensors:
    """Return the root of the summed squares of each product's terms, as errors add up."""
    x_THD, weight_HDN = (each.float().square() for each in args)
    return (expected[0].abs() + torch.einsum("thd,hdn->thn", x_THD, weight_HDN).sqrt(),)


def case(T: int, H: int, D: int, N: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Return a case with heads of a wider tensor, and with transposed matrices."""

    def inputs(device: torch.device) -> Args:
        x_THD = normal(device, T, H, D + 8, dtype=dtype)[..., :D]
        return x_THD, normal(device, H, N, D, dtype=dtype, seed=1).mul_(D**-0.5).mT

    num_bytes = dtype.itemsize * (T * H * (D + N) + H * D * N) * (D >= 128)
    return Case(f"T={T} H={H} D={D} N={N} {bits(dtype)}", inputs, D < 128, num_bytes)


R1 = partial(case, H=128)  # heads of DeepSeek-R1 without their rotated part, and latents
PER_HEAD = Kernel(
    "per_head", per_head, reference,
    (
        case(3, 2, 24, 40), case(70, 3, 80, 20, torch.float32),
        *(R1(T, D=D, N=N) for T in (1, 64, 1024) for D, N in ((128, 512), (512, 128))),
    ),
    4, 64, scale=sizes,
)  # fmt: skip
