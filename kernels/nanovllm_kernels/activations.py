"""Activations in plain torch, equal for equal inputs at any place of a tensor.

On a CPU, torch computes the last elements of a tensor in another way than the others: its sigmoid,
silu and softplus of one number then differ in the last bit. Its exp and log1p do not. On other
devices torch's functions are used, which take one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LINEAR = 20.0  # from here on, softplus(x) is x in float32


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), computed in float32 or wider, in the dtype of x."""
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    wide = x if x.itemsize >= 4 else x.float()
    return (1 / (1 + (-wide).exp())).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), computed in float32 or wider, in the dtype of x."""
    if x.device.type != "cpu":
        return F.silu(x)
    wide = x if x.itemsize >= 4 else x.float()
    return (wide / (1 + (-wide).exp())).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x))."""
    if x.device.type != "cpu":
        return F.softplus(x)
    return x.exp().log1p().where(x < LINEAR, x)
