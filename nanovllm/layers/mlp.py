"""The gated MLP behind its norm: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from nanovllm.dist.mesh import Mesh
from nanovllm.layers.linear import Layer, NormedLinear, RowLinear
from nanovllm.layers.ops import Ops


class MLP(Layer):
    def __init__(self, width: int, inner_width: int, eps: float, mesh: Mesh, ops: Ops) -> None:
        super().__init__()
        inner = mesh.span("intermediate_size", inner_width)
        self.gate_up = NormedLinear(width, eps, {"gate": inner, "up": inner}, ops, gated=True)
        self.down = RowLinear(inner, width, mesh, ops)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As Ops.linear_add."""
        x_TD, residual_TD = self.down(*self.gate_up(x_TD, residual_TD))
        return x_TD, residual_TD
