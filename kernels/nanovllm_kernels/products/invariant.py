"""Product in plain torch whose result for a row does not depend on the other rows. Also for CPUs.

A library chooses its kernel, and with it the order of a sum, by the sizes of a product. Here all
products of a weight have the same size: ROWS rows, of which the last ones may be padding. The place
of a row in a product has no effect on its bits, which tests/kernels/test_invariant.py verifies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16  # of a product


def linear(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Return y_TN = x W^T."""
    y_TN = x_TD.new_empty(len(x_TD), len(weight_ND))
    for start in range(0, len(x_TD), ROWS):
        x_XD = x_TD[start : start + ROWS]
        y_XN = F.linear(F.pad(x_XD, (0, 0, 0, ROWS - len(x_XD))), weight_ND)
        y_TN[start : start + ROWS] = y_XN[: len(x_XD)]
    return y_TN


def per_head(x_THD: Tensor, weight_HND: Tensor) -> Tensor:
    """Return the product of each head with a matrix of its own."""
    heads = zip(x_THD.unbind(1), weight_HND, strict=True)
    return torch.stack([linear(x_TD.contiguous(), weight_ND) for x_TD, weight_ND in heads], 1)
