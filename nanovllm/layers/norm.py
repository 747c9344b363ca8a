"""RMS normalisation of the residual stream, after the addition of what came before."""

from __future__ import annotations

from torch import Tensor

from nanovllm.layers.linear import Layer, parameter
from nanovllm.layers.ops import Ops


class RMSNorm(Layer):
    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.weight = parameter(width)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """As Ops.norm."""
        return self.ops.norm(x_TD, residual_TD, self.weight, self.eps)
