"""The gated MLP: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor, nn

from nanovllm.dist.mesh import Mesh
from nanovllm.layers.linear import ColumnLinear, RowLinear
from nanovllm.layers.ops import Ops


class MLP(nn.Module):
    def __init__(self, width: int, inner_width: int, mesh: Mesh, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        inner = mesh.span("intermediate_size", inner_width)
        self.gate_up = ColumnLinear(width, {"gate": inner, "up": inner})
        self.down = RowLinear(inner, width, mesh)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.down(self.ops.silu_mul(self.gate_up(x_TD)))
        return y_TD
