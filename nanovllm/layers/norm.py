"""RMS norm of the residual stream, after any pending product has been added."""

from __future__ import annotations

from torch import Tensor

from nanovllm.layers.linear import Layer, parameter
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Residual


class RMSNorm(Layer):
    """The norm after the last block. Norms before products belong to their `NormLinear`."""

    def __init__(self, hidden_size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.weight = parameter(hidden_size)

    def forward(self, residual: Residual) -> tuple[Tensor, Added]:
        """Return the normalised stream y_TD, and the stream. May overwrite its input."""
        return self.ops.norm(residual, self.weight, self.eps)
