"""Products whose result for a row does not depend on the other rows.

A library chooses its kernel, and with it the order of a sum, by the sizes of a product. On a CPU,
all products of a weight therefore have the same size here: ROWS rows, of which the last ones may be
padding. The place of a row in a product has no effect on its bits, which
tests/kernels/test_invariant.py verifies.

On an NVIDIA GPU, all kernels of the library add the products of a sum in the order of the inputs,
16 at a time, except those that split the inputs (split-K). The latter need a workspace. Without
one, ten shapes of weights gave the same bits for 1 to 4,096 rows on an H100, equal to those of
skinny_linear.ORDERED_LINEAR and of Triton's tiles of 16, 64 and 128 rows.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16  # of a product
# The library reads these when it first needs a workspace. The second is for products with a bias.
NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def without_workspace() -> None:
    """Forbid the GPU library of this process to split the inputs of a product.

    Workspaces that it already has are freed, so the next product reads the new size.
    """
    os.environ |= NO_WORKSPACE
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


def linear(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Return y_TN = x W^T."""
    y_TN = x_TD.new_empty(len(x_TD), len(weight_ND))
    for start in range(0, len(x_TD), ROWS):
        x_XD = x_TD[start : start + ROWS]
        y_XN = F.linear(F.pad(x_XD, (0, 0, 0, ROWS - len(x_XD))), weight_ND)
        y_TN[start : start + ROWS] = y_XN[: len(x_XD)]
    return y_TN


def per_head(x_THD: Tensor, weight_HND: Tensor) -> Tensor:
    """Return y_THN, x W^T of each head with its own W [N, D]."""
    heads = zip(x_THD.unbind(1), weight_HND, strict=True)
    return torch.stack([linear(x_TD.contiguous(), weight_ND) for x_TD, weight_ND in heads], 1)
