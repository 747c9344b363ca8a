"""The weighted sum of what a token's experts give, and, for a token or two, their last products.

Meaning: nanovllm_kernels.experts_reference.combine. With so few tokens `down_combine` needs neither
tiles nor a launch of its own for the sum: a program holds some output features of all of a token's
experts, asks for all of their weights at once, before it waits for what they multiply, and sums up.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows
from nanovllm_kernels.experts_reference import BLOCK

COLUMNS = 512  # that a program of `combine` sums up
MOST_TOKENS = 2  # of down_combine: each reads the weights of its experts
ELEMENTS = 16384  # of weights in a program of it
SCALED = tl.constexpr(BLOCK)


def combine(
    y_XD: Tensor,
    weights_TK: Tensor,
    row_of_TK: Tensor,
    shared_TD: Tensor | None = None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Overwrites the stream, if there is one, with the result."""
    num_rows, num_chosen = row_of_TK.shape
    width = y_XD.shape[1]
    x_TD = y_XD.new_empty(num_rows, width) if residual_TD is None else residual_TD
    assert y_XD.is_contiguous() and weights_TK.is_contiguous() and row_of_TK.is_contiguous()
    assert x_TD.is_contiguous() and (shared_TD is None or shared_TD.is_contiguous())
    waits = follows(num_rows, y_XD.device)
    combine_kernel[(num_rows, triton.cdiv(width, COLUMNS))](
        y_XD,
        weights_TK,
        row_of_TK,
        shared_TD,
        residual_TD,
        x_TD,
        width,
        K=num_chosen,
        BLOCK=COLUMNS,
        WAITS=waits,
        launch_pdl=waits,
        num_warps=2,
    )
    return x_TD


@triton.jit
def combine_kernel(
    y_XD,
    weights_TK,
    row_of_TK,
    shared_TD,
    residual_TD,
    x_TD,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WAITS: tl.constexpr,
):
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of_TK + token * K + k).to(tl.int64)
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


def down_combine(
    y_XF: Tensor,
    down_EDF: Tensor,
    scale_EXX: Tensor | None,
    weights_TK: Tensor,
    experts_TK: Tensor,
    row_of_TK: Tensor,
    first_expert: int,
    shared_TD: Tensor | None = None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """`combine` of expert_down's result, which is not rounded. For up to MOST_TOKENS.

    Rows must have been sorted before y was made: they are read while the kernel before runs.
    """
    (num_rows, num_chosen), (_, width, inner) = experts_TK.shape, down_EDF.shape
    x_TD = y_XF.new_empty(num_rows, width) if residual_TD is None else residual_TD
    assert y_XF.is_contiguous() and down_EDF.is_contiguous() and row_of_TK.is_contiguous()
    assert weights_TK.is_contiguous() and experts_TK.is_contiguous() and x_TD.is_contiguous()
    assert all(x is None or x.is_contiguous() for x in (scale_EXX, shared_TD))
    chosen, block = triton.next_power_of_2(num_chosen), max(triton.next_power_of_2(inner), BLOCK)
    features = max(ELEMENTS // (chosen * block), 1)
    waits = follows(num_rows, y_XF.device)
    down_combine_kernel[(triton.cdiv(width, features), num_rows)](
        y_XF,
        down_EDF,
        scale_EXX,
        weights_TK,
        experts_TK,
        row_of_TK,
        shared_TD,
        residual_TD,
        x_TD,
        FIRST=first_expert,
        D=width,
        F=inner,
        F_BLOCK=block,
        K=num_chosen,
        FEATURES=features,
        WAITS=waits,
        launch_pdl=waits,
        num_warps=8,
    )
    return x_TD


@triton.jit
def down_combine_kernel(
    y_XF,
    weight_EDF,
    scale_EXX,
    weights_TK,
    experts_TK,
    row_of_TK,
    shared_TD,
    residual_TD,
    x_TD,
    FIRST: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    F_BLOCK: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Rows of its matrix are pairs of a chosen expert and an output feature."""
    K_BLOCK: tl.constexpr = triton.next_power_of_2(K)
    token, first = tl.program_id(1), tl.program_id(0) * FEATURES
    k = tl.arange(0, K_BLOCK * FEATURES) // FEATURES
    feature = first + tl.arange(0, K_BLOCK * FEATURES) % FEATURES
    row = tl.load(row_of_TK + token * K + k, k < K, -1)
    is_ours = (row >= 0) & (feature < D)
    expert = tl.load(experts_TK + token * K + k, is_ours, FIRST).to(tl.int64) - FIRST
    share = tl.load(weights_TK + token * K + k, is_ours, 0.0)
    f = tl.arange(0, F_BLOCK)[None, :]
    inside = is_ours[:, None] & (f < F)
    w = tl.load(weight_EDF + (expert * D + feature)[:, None] * F + f, inside, 0.0)
    if scale_EXX is not None:
        BLOCKS: tl.constexpr = F_BLOCK // SCALED
        COLUMNS: tl.constexpr = (F + SCALED - 1) // SCALED
        block = tl.arange(0, BLOCKS)[None, :]
        at = expert * ((D + SCALED - 1) // SCALED) + feature // SCALED
        has_scale = is_ours[:, None] & (block < COLUMNS)
        scale = tl.load(scale_EXX + at[:, None] * COLUMNS + block, has_scale, 0.0)
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.load(y_XF + row.to(tl.int64)[:, None] * F + f, inside, 0.0).to(tl.float32)
    if scale_EXX is None:
        sums = tl.sum(w.to(tl.float32) * y, 1)
    else:
        terms = w.to(tl.float16).to(tl.float32) * y
        of_blocks = tl.sum(terms.reshape(K_BLOCK * FEATURES, BLOCKS, SCALED), 2)
        sums = tl.sum(of_blocks * scale, 1)
    total = tl.sum((sums * share).reshape(K_BLOCK, FEATURES), 0)
    feature = first + tl.arange(0, FEATURES)
    store_sum(total, token * D + feature, feature < D, shared_TD, residual_TD, x_TD)
