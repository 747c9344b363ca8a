"""Linear layers cut over tensor-parallel ranks.

Each module says how its parameters are cut (`placements`); loading is done elsewhere, once, for
all of them. A fused parameter is a list of named parts, each cut on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.dist.mesh import Mesh, Span
from nanovllm.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class Placement:
    """Which slice of each checkpoint tensor this rank keeps: the parts follow one another."""

    dim: int  # the dimension that is cut
    parts: tuple[tuple[str, Span], ...]  # an unfused parameter has the one part ""


class Layer(nn.Module):
    """Without hooks. torch's own call looks for some, for 5 us: 1 ms of a step's launches."""

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401
        return self.forward(*args)


def parameter(*shape: int) -> nn.Parameter:
    """Uninitialised, of the default dtype and device: the loader sets both, then fills it."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class NormedLinear(Layer):
    """y = rms_norm(x + residual) W^T, outputs cut over ranks. `parts` are fused in order: q, k, v.

    `gated`: the parts are gate and up, of equal widths, and y is silu(gate) * up.
    """

    def __init__(
        self, width: int, eps: float, parts: dict[str, Span], ops: Ops, *, gated: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.ops, self.gated = eps, ops, gated
        self.gain = parameter(width)
        self.weight = parameter(sum(span.count for span in parts.values()), width)
        self.placements = {"weight": Placement(0, tuple(parts.items()))}

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """y and the sum x + residual. May overwrite both inputs."""
        return self.ops.norm_linear(
            x_TD, residual_TD, self.gain, self.eps, self.weight, gated=self.gated
        )


class RowLinear(Layer):
    """y = x W^T, inputs cut over ranks and the partial results summed, for the residual stream."""

    def __init__(self, inputs: Span, width: int, mesh: Mesh, ops: Ops) -> None:
        super().__init__()
        self.mesh, self.ops = mesh, ops
        self.weight = parameter(width, inputs.count)
        self.placements = {"weight": Placement(1, (("", inputs),))}

    def forward(self, x_TD: Tensor, residual_TN: Tensor) -> tuple[Tensor, Tensor | None]:
        """As Ops.linear_add."""
        if self.mesh.tp_size == 1:
            return self.ops.linear_add(x_TD, self.weight, residual_TN)
        return self.mesh.all_reduce(self.ops.linear(x_TD, self.weight)), residual_TN
