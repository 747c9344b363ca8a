"""Linear layers cut over tensor-parallel ranks.

Each module describes the cut of its parameters (`placements`); one loader handles all of them. A
fused parameter is a list of named parts, each cut separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from nanovllm_kernels.fp8_reference import Quantised, Scaled, Weight
from torch import Tensor, nn

from nanovllm.attention.base import AdaptedRows
from nanovllm.layers.lora import Delta
from nanovllm.layers.ops import Ops, norm_quantised
from nanovllm.layers.products import Fusion, Implementation, Norm, RowTable
from nanovllm.layers.residual import Added, Parted, Pending, Residual
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

    Subclasses fuse operations before and after, with their own tables. `delta` is what adapters add
    to the product, or None if no adapter changes it.
    """

    delta: Delta | None = None

    def __init__(self, out_features: int, in_features: int, placement: Placement, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight = parameter(out_features, in_features)
        self.dtype = self.weight.dtype  # of the model
        self.block_rows = 0  # rows per scale of an fp8 weight
        self.placements = {"weight": placement}
        self.by_rows = ops.by_rows(self.weight, Fusion())

    def set_tables(self) -> None:
        """Set the table for the weight's type, after it has changed."""
        self.by_rows = self.ops.by_rows(self.operand, Fusion())

    @property
    def operand(self) -> Weight:
        """The weight, in fp8 with its scales.

        It is read for each product. nn.Module's own lookups take 1.5 to 3 us, this one 0.3.
        """
        weight, scale = self._parameters["weight"], self._parameters.get("weight_scale")
        assert weight is not None
        return weight if scale is None else Scaled(weight, scale, self.block_rows, self.dtype)

    def product(self, x: Tensor | Quantised) -> Tensor:
        """Return y_TN for this rank's output or input features."""
        num_rows = len(x.values_XD if isinstance(x, Quantised) else x)
        y_TN: Tensor = self.by_rows[num_rows].run(x, self.operand)
        return y_TN

    def adapted_product(self, x_TD: Tensor, rows: AdaptedRows) -> Tensor:
        """Return y_TN with the deltas of adapters. No other operation is fused with it."""
        if self.delta is None:
            return self._unfused(x_TD)
        return self.delta.add(x_TD, lambda: self._unfused(x_TD), rows)

    def _unfused(self, x_TD: Tensor) -> Tensor:
        y_TN: Tensor = self.ops.by_rows(self.operand, Fusion())[len(x_TD)].run(x_TD, self.operand)
        return y_TN


class NormLinear(Linear):
    """Product y = rms_norm(residual stream) W^T, with output features cut over ranks.

    `parts` are fused in order, for example q, k and v. `gated`: the parts are gate and up, of equal
    widths, and y is silu(gate) * up.
    """

    by_rows_pending: RowTable  # if the norm cannot be part of the product

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
        self.set_tables()

    def set_tables(self, *, quantised: bool = False) -> None:
        """Set the tables for the weight's type. `quantised`: y may be Quantised rows."""
        alone = Fusion(gate=self.gated, quantised=quantised, sliced=not self.gated)
        self.by_rows = self.ops.by_rows(self.operand, alone._replace(norm=True))
        self.by_rows_pending = self.ops.by_rows(self.operand, alone)

    def forward(self, residual: Residual, rows: AdaptedRows | None = None) -> tuple[Any, Added]:
        """Return y, and the stream with all products added. May overwrite its input.

        y is an Output, or Quantised rows for the next product. `rows`: add the deltas of adapters.
        """
        if rows is not None:
            return self._adapted(residual, rows)
        num_rows, norm = len(residual.stream_TD), Norm(self.norm_weight, self.eps)
        chosen = self.by_rows[num_rows]
        if isinstance(residual, Parted) and chosen.fused.norm:
            residual = residual.added()
        if isinstance(residual, Added) and chosen.fused.norm:
            x_TD, gated = residual.stream_TD, chosen.fused.gate
            y = chosen.run(x_TD, self.operand, norm=norm, gated=gated)
        else:
            chosen = self.by_rows_pending[num_rows]
            x, residual = self._normed(residual, norm, chosen)
            y = chosen.run(x, self.operand, gated=chosen.fused.gate)
        if self.gated and not chosen.fused.gate:
            y = self.ops.silu_mul(y)
        return y, residual

    def _adapted(self, residual: Residual, rows: AdaptedRows) -> tuple[Tensor, Added]:
        x_TD, stream = self.ops.norm(residual, self.norm_weight, self.eps)
        if self.gated and self.delta is not None:
            return self.delta.add_gated(x_TD, lambda: self._unfused(x_TD), rows), stream
        y_TN = self.adapted_product(x_TD, rows)
        return self.ops.silu_mul(y_TN) if self.gated else y_TN, stream

    def _normed(
        self, residual: Residual, norm: Norm, chosen: Implementation
    ) -> tuple[Tensor | Quantised, Added]:
        if chosen.norm_quantise is not None:
            return norm_quantised(residual, norm, chosen.norm_quantise)
        return self.ops.norm(residual, *norm)


class AddLinear(Linear):
    """Product x W^T for the residual stream: inputs are cut over ranks, results summed."""

    def __init__(self, inputs: Span, hidden_size: int, mesh: Mesh, ops: Ops) -> None:
        super().__init__(hidden_size, inputs.count, Placement(1, (("", inputs),)), ops)
        self.mesh = mesh
        self.set_tables()

    def set_tables(self) -> None:
        """Set the table for the weight's type. A sum over ranks takes one tensor from each."""
        is_whole = self.mesh.tp_size == 1
        self.by_rows = self.ops.by_rows(self.operand, Fusion(residual=is_whole, sliced=is_whole))

    def forward(
        self, x: Tensor | Quantised, residual: Added, rows: AdaptedRows | None = None
    ) -> Residual:
        """Return the stream with the product added or pending. May overwrite the stream.

        `rows`: add the deltas of adapters. Each rank adds its part before the sum over ranks.
        """
        chosen = self.by_rows[len(residual.stream_TD)]
        if chosen.fused.residual:
            add = partial(chosen.run, x, self.operand, residual_TN=residual.stream_TD)
            if rows is None or self.delta is None:
                return Added(add())
            assert isinstance(x, Tensor)
            return Added(self.delta.add(x, add, rows))
        if rows is not None:
            assert isinstance(x, Tensor)
            y: Any = self.adapted_product(x, rows)
        else:
            y = chosen.run(x, self.operand)
        if self.mesh.tp_size > 1:
            return with_pending_sum(y, residual, self.mesh)
        return Pending(residual.stream_TD, y)
