"""RMS normalisation of the residual stream, fused with the addition before it."""

from __future__ import annotations

from torch import Tensor, nn

from nanovllm.layers.linear import parameter
from nanovllm.layers.ops import Ops


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.weight = parameter(width)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normalised, sum) of x and the residual stream, which begins with x where it is None.

        May overwrite both inputs.
        """
        if residual_TD is None:
            return self.ops.rms_norm(x_TD, self.weight, self.eps), x_TD
        return self.ops.add_rms_norm(x_TD, residual_TD, self.weight, self.eps)
