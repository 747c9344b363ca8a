"""Linear layers cut over tensor-parallel ranks.

Each module says how its parameters are cut (`placements`); loading is done elsewhere, once, for
all of them. A fused parameter is a list of named parts, each cut on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from nanovllm_kernels.fp8_reference import Weight
from torch import Tensor, nn

from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Parted, Pending, Product, Residual
from nanovllm.parallel.mesh import Mesh, Span


@dataclass(frozen=True, slots=True)
class Placement:
    """Which slice of each checkpoint tensor this rank keeps: the parts follow one another.

    Of a parameter that stacks experts, one tensor each, the same is true of every expert's.
    `experts`: where each is along a dimension 0 more, or -1 if this rank has it not. `has_shared`:
    behind all of them is one that every token goes to, whose parts have names of their own.
    """

    dim: int  # the dimension that is cut, of a checkpoint tensor
    parts: tuple[tuple[str, Span], ...]  # an unfused parameter has the one part ""
    experts: tuple[int, ...] | None = None
    has_shared: bool = False


class Layer(nn.Module):
    """Without hooks. torch's own call looks for some, for 5 us: 1 ms of a step's launches."""

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401
        return self.forward(*args)

    def finish(self) -> None:
        """Makes what is made once of weights, which are loaded now."""


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Uninitialised, of the default dtype and device: the loader sets both, then fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def summed_up(y_TD: Tensor, residual: Added, mesh: Mesh) -> Residual:
    """The stream, with a product pending of which each rank has a part. May overwrite both."""
    if (peers := mesh.peers_for(y_TD)) is not None:
        return Parted(residual.stream_TD, y_TD, peers)
    return Pending(residual.stream_TD, mesh.all_reduce(y_TD))


class Linear(Layer):
    """Computes y = x W^T: one weight [N, D], and the table of its implementations by rows.

    Subclasses say what is fused before and after, each with a table of its own.
    """

    operand: Weight  # what implementations multiply with: the weight, or with its scales in fp8

    def __init__(self, out_features: int, in_features: int, placement: Placement, ops: Ops) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        vars(self)["operand"] = self.weight  # not as a second parameter
        self.placements = {"weight": placement}
        self.by_rows = ops.plain(self.weight)

    def product(self, x_TD: Tensor) -> Tensor:
        """y_TN, of this rank's output or input features."""
        y_TN: Tensor = self.by_rows[len(x_TD)].run(x_TD, self.operand)
        return y_TN


class NormLinear(Linear):
    """Computes y = rms_norm(residual stream) W^T, its output features cut over ranks.

    `parts` are fused in their order: q, k and v, say. `gated`: the parts are gate and up, of equal
    widths, and y is silu(gate) * up.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        parts: dict[str, Span],
        ops: Ops,
        *,
        gated: bool = False,
    ) -> None:
        out_features = sum(span.count for span in parts.values())
        super().__init__(out_features, hidden_size, Placement(0, tuple(parts.items())), ops)
        self.eps, self.gated = eps, gated
        self.norm_weight = parameter(hidden_size)
        self.by_rows = ops.normed(self.weight, gated=gated, is_added=True)
        self.by_rows_pending = ops.normed(self.weight, gated=gated, is_added=False)

    def forward(self, residual: Residual) -> tuple[Product, Added]:
        """Returns y and the stream with everything added. May overwrite what it is given."""
        if isinstance(residual, Parted) and self.by_rows[len(residual.stream_TD)].norms:
            residual = residual.added()
        table = self.by_rows if isinstance(residual, Added) else self.by_rows_pending
        run = table[len(residual.stream_TD)].run
        found: tuple[Product, Added] = run(residual, self.norm_weight, self.eps, self.operand)
        return found


class AddLinear(Linear):
    """Computes x W^T for the residual stream: input features cut over ranks, results summed."""

    def __init__(self, inputs: Span, hidden_size: int, mesh: Mesh, ops: Ops) -> None:
        super().__init__(hidden_size, inputs.count, Placement(1, (("", inputs),)), ops)
        self.mesh = mesh
        self.by_rows = (ops.plain if mesh.tp_size > 1 else ops.added)(self.weight)

    def forward(self, x_TD: Tensor, residual: Added) -> Residual:
        """The stream with the product added, or pending. May overwrite the stream."""
        run = self.by_rows[len(residual.stream_TD)].run  # x may be Quantised, of another length
        if self.mesh.tp_size > 1:
            return summed_up(run(x_TD, self.operand), residual, self.mesh)
        after: Residual = run(x_TD, self.operand, residual)
        return after
