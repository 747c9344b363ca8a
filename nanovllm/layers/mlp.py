"""The gated MLP behind its norm: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from nanovllm.attention.base import ForwardContext
from nanovllm.layers.linear import AddLinear, Layer, NormLinear
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Residual
from nanovllm.parallel.mesh import Mesh


class MLP(Layer):
    def __init__(
        self, hidden_size: int, intermediate_size: int, eps: float, mesh: Mesh, ops: Ops
    ) -> None:
        super().__init__()
        inner = mesh.span("intermediate_size", intermediate_size)
        self.gate_up = NormLinear(hidden_size, eps, {"gate": inner, "up": inner}, ops, gated=True)
        self.down = AddLinear(inner, hidden_size, mesh, ops)
        self.inner = inner.count

    def forward(self, residual: Residual, _: ForwardContext) -> Residual:
        """The residual stream with what this block gives. May overwrite what it is given."""
        y_TF, stream = self.gate_up(residual)
        after: Residual = self.down(y_TF, stream)
        return after

    def elements(self, pending: int, *, fuses_gate: bool) -> int:
        """How many of a token are allocated at once behind the norm. `pending`: of the result, if
        that is not added in place; `fuses_gate`: gate and up are one product.
        """
        return max(self.inner + pending, self.inner if fuses_gate else 3 * self.inner)
