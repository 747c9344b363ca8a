"""Gated MLP with its norm: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from nanovllm.attention.base import ForwardContext
from nanovllm.layers.linear import AddLinear, Layer, NormLinear
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Residual
from nanovllm.parallel.mesh import Mesh


class MLP(Layer):
    """MLP block. `is_last`: only sampled tokens arrive, since no attention follows."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        eps: float,
        mesh: Mesh,
        ops: Ops,
        *,
        is_last: bool = False,
    ) -> None:
        super().__init__()
        self.is_last = is_last
        inner = mesh.span("intermediate_size", intermediate_size)
        self.gate_up = NormLinear(hidden_size, eps, {"gate": inner, "up": inner}, ops, gated=True)
        self.down = AddLinear(inner, hidden_size, mesh, ops)
        self.inner = inner.count

    def forward(self, residual: Residual, ctx: ForwardContext) -> Residual:
        """Return the residual stream plus the block's result. May overwrite its input."""
        rows = ctx.adapters and ctx.adapted(is_last=self.is_last)
        y_TF, stream = self.gate_up(residual, rows)
        after: Residual = self.down(y_TF, stream, rows)
        return after

    def elements(self, pending: int, *, fuses_gate: bool) -> int:
        """Return the elements per token that are allocated at once after the norm.

        `pending` are those of the result, if it is not added in place. `fuses_gate`: one product
        computes gate and up and applies the gate.
        """
        return max(self.inner + pending, self.inner if fuses_gate else 3 * self.inner)
