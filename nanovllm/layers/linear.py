"""Linear layers cut over tensor-parallel ranks.

Each module describes the cut of its parameters (`placements`); one loader handles all of them. A
fused parameter is a list of named parts, each cut separately.
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
    """Slices of checkpoint tensors that form one parameter of this rank, in order.

    A parameter that stacks experts has a further dimension 0, and the slices apply to each expert's
    tensors. `experts` has the index of each expert in that dimension, or -1 if this rank lacks it.
    `has_shared`: the last one is the shared expert, whose parts have other names.
    """

    dim: int  # the dimension of a checkpoint tensor that is cut
    parts: tuple[tuple[str, Span], ...]  # an unfused parameter has one part, named ""
    experts: tuple[int, ...] | None = None
    has_shared: bool = False


class Layer(nn.Module):
    """Module without hooks. The lookup of hooks takes torch 5 us a call, 1 ms of a step."""

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401
        return self.forward(*args)

    def after_load(self) -> None:
        """Compute tensors derived from the loaded weights."""


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return an uninitialised parameter. The loader sets the default dtype and device before."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def with_pending_sum(y_TD: Tensor, residual: Added, mesh: Mesh) -> Residual:
    """Return the residual stream with a partial product that must still be summed over ranks.

    May overwrite both inputs.
    """
    if (peers := mesh.peers_for(y_TD)) is not None:
        return Parted(residual.stream_TD, y_TD, peers)
    return Pending(residual.stream_TD, mesh.all_reduce(y_TD))


class Linear(Layer):
    """Product y = x W^T: a weight [N, D], and the table of its implementations by rows.

    Subclasses fuse operations before and after, with their own tables.
    """

    operand: Weight  # argument of the implementations: the weight, in fp8 with its scales

    def __init__(self, out_features: int, in_features: int, placement: Placement, ops: Ops) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        vars(self)["operand"] = self.weight  # bypasses nn.Module: not a second parameter
        self.placements = {"weight": placement}
        self.by_rows = ops.plain(self.weight)

    def product(self, x_TD: Tensor) -> Tensor:
        """Return y_TN for this rank's output or input features."""
        y_TN: Tensor = self.by_rows[len(x_TD)].run(x_TD, self.operand)
        return y_TN


class NormLinear(Linear):
    """Product y = rms_norm(residual stream) W^T, with output features cut over ranks.

    `parts` are fused in order, for example q, k and v. `gated`: the parts are gate and up, of equal
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
        """Return y, and the stream with all products added. May overwrite its input."""
        if isinstance(residual, Parted) and self.by_rows[len(residual.stream_TD)].norms:
            residual = residual.added()
        table = self.by_rows if isinstance(residual, Added) else self.by_rows_pending
        run = table[len(residual.stream_TD)].run
        found: tuple[Product, Added] = run(residual, self.norm_weight, self.eps, self.operand)
        return found


class AddLinear(Linear):
    """Product x W^T for the residual stream: inputs are cut over ranks, results summed."""

    def __init__(self, inputs: Span, hidden_size: int, mesh: Mesh, ops: Ops) -> None:
        super().__init__(hidden_size, inputs.count, Placement(1, (("", inputs),)), ops)
        self.mesh = mesh
        self.by_rows = (ops.plain if mesh.tp_size > 1 else ops.added)(self.weight)

    def forward(self, x_TD: Tensor, residual: Added) -> Residual:
        """Return the stream with the product added or pending. May overwrite the stream."""
        run = self.by_rows[len(residual.stream_TD)].run  # x may be Quantised, with another len()
        if self.mesh.tp_size > 1:
            return with_pending_sum(run(x_TD, self.operand), residual, self.mesh)
        after: Residual = run(x_TD, self.operand, residual)
        return after
