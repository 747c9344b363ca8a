"""Plain torch reference of the deltas of LoRA adapters. Also runs on CPUs.

A rank is one row of A and one column of B of an adapter, for every product that it changes. The
ranks of all adapters on the device are the rows of one tensor, R in all. RANK_PAGE adjacent ranks
belong to one adapter, the owner of the page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm_kernels.norms.reference import silu_mul

RANK_PAGE = 16  # ranks of a page
NO_ADAPTER, NO_OWNER = -1, -2  # of a token, and of a page of ranks


def add_deltas(
    x_TD: Tensor,
    product: Callable[[], Tensor],
    a_RID: Tensor,
    b_RN: Tensor,
    widths: tuple[int, ...],
    adapter_T: Tensor,
    owner_P: Tensor,
    tables: dict[str, Any] | None = None,
    *,
    gated: bool = False,
    multiply: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> Tensor:
    """Add (x A^T) B of each token's adapter to y = product(), in place, and return y.

    `gated`: return silu(first half) * second half of y instead; y is then undefined. Columns of y
    after the last part stay. Kernels launch the product between their own launches.

    The product has I parts, of `widths` columns each, and each part has its own A. `adapter_T` are
    the adapters of tokens, int32, or NO_ADAPTER; rows of the latter are not written. `owner_P` are
    the owners of pages, int32, or NO_OWNER. B includes the scale. `multiply` computes x W^T.
    `tables` is for kernels. All calls of a step for these tokens pass it, the first one empty.
    """
    is_own_TR = own_ranks(adapter_T, owner_P)
    has_any_T1 = (adapter_T != NO_ADAPTER)[:, None]
    y_TN = product()
    added_TN = y_TN[:, : sum(widths)]
    columns = zip(added_TN.split(widths, 1), b_RN.split(widths, 1), strict=True)
    for part, (y_TX, b_RX) in enumerate(columns):
        h_TR = multiply(x_TD, a_RID[:, part]).masked_fill(~is_own_TR, 0)
        y_TX.copy_(torch.where(has_any_T1, y_TX + multiply(h_TR, b_RX.t()), y_TX))
    return silu_mul(added_TN) if gated else y_TN


def own_ranks(adapter_T: Tensor, owner_P: Tensor) -> Tensor:
    """Return as bool [T, R] the ranks of each token's adapter."""
    return adapter_T[:, None] == owner_P.repeat_interleave(RANK_PAGE)
