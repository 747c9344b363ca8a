"""Weighted sum of the outputs of a token's experts, for products that do not sum themselves.

The reference is combine of reference.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import launches_early
from nanovllm_kernels.triton_parts import launch_dependents, wait

COLUMNS = 512  # features that a program sums


def combine(
    y_XD: Tensor,
    weights_TK: Tensor,
    row_of_TK: Tensor | None,
    shared_TD: Tensor | None = None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum, which overwrites residual_TD if that is given."""
    num_rows, num_chosen = weights_TK.shape
    width = y_XD.shape[1]
    x_TD = y_XD.new_empty(num_rows, width) if residual_TD is None else residual_TD
    assert y_XD.is_contiguous() and weights_TK.is_contiguous()
    assert row_of_TK is None or row_of_TK.is_contiguous()
    assert x_TD.is_contiguous() and (shared_TD is None or shared_TD.is_contiguous())
    waits = launches_early(num_rows, y_XD.device)
    combine_kernel[(num_rows, triton.cdiv(width, COLUMNS))](
        y_XD, weights_TK, row_of_TK, shared_TD, residual_TD, x_TD, width, K=num_chosen,
        BLOCK=COLUMNS, WAITS=waits, launch_pdl=waits, num_warps=2,
    )  # fmt: skip
    return x_TD


@triton.jit
def combine_kernel(
    y_XD, weights_TK, row_of_TK, shared_TD, residual_TD, x_TD, width, K: tl.constexpr,
    BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    launch_dependents(WAITS)
    wait(WAITS)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = token * K + k
        if row_of_TK is not None:
            row = tl.load(row_of_TK + row).to(tl.int64)
        weight = tl.where(row >= 0, tl.load(weights_TK + token * K + k), 0.0)
        y = tl.load(y_XD + row * width + d, d < tl.where(row >= 0, width, 0), 0.0)
        total += y.to(tl.float32) * weight
    store_sum(total, token * width + d, inside, shared_TD, residual_TD, x_TD)


@triton.jit
def store_sum(total, at, inside, shared_TD, residual_TD, x_TD):
    if shared_TD is not None:
        total += tl.load(shared_TD + at, inside, 0.0).to(tl.float32)
    if residual_TD is not None:
        total += tl.load(residual_TD + at, inside, 0.0).to(tl.float32)
    tl.store(x_TD + at, total.to(x_TD.dtype.element_ty), inside)
