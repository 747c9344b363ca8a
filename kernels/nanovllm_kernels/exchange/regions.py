"""Parts that kernels over ranks share: places in the memory of ranks, and the end of a sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def region(address, index, capacity, like):
    """Return the place of a region in the memory at `address`, where each has `capacity` bytes."""
    at = address + index.to(tl.int64) * capacity
    return tl.multiple_of(at.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def store_sum(
    whole, residual_TD, norm_weight, y_TD, at, inside, eps,
    HAS_NORM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store a sum in the residual stream if there is one, else in y. With a norm, y is the norm."""
    if residual_TD is not None:
        tl.store(residual_TD + at, whole, inside)
    if HAS_NORM:
        wide = whole.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        rounded = (wide * scale).to(whole.dtype).to(tl.float32)
        whole = (rounded * norm_weight.to(tl.float32)).to(whole.dtype)
    if HAS_NORM or residual_TD is None:
        tl.store(y_TD + at, whole, inside)
