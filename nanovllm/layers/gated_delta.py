"""Gated DeltaNet behind its norm: projections around the convolution and the delta rule.

Heads of keys are cut over ranks, and with each go the heads of values that it serves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from nanovllm_kernels.delta_reference import DeltaWeights
from nanovllm_kernels.reference import summed
from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.attention.gated_delta import DeltaStates, GatedDelta
from nanovllm.config import ConfigError
from nanovllm.layers.linear import AddLinear, Layer, Linear, NormLinear, Placement, parameter
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Residual, as_tensor
from nanovllm.parallel.mesh import Mesh, Span, interleaved


class DeltaSizes(NamedTuple):
    """The heads of all ranks, the elements of each, and the tokens that the convolution sees."""

    hidden: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int

    @property
    def each(self) -> int:
        """Heads of values that a head of keys serves: neighbours."""
        return self.value_heads // self.key_heads

    def channels(self, keys: Span) -> list[Span]:
        """This rank's channels of the convolution: queries, keys, values."""
        key, value = keys.of_width(self.key), keys.of_width(self.each * self.value)
        parts = (key, 0), (key, key.full), (value, 2 * key.full)
        full = 2 * key.full + value.full
        return [Span(full, before + part.start, part.count) for part, before in parts]


class GatedDeltaNet(Layer):
    """`is_last`: no layer follows, so the results are of the tokens that rows predict from.
    Raises ConfigError for a convolution that the kernels cannot compute.

    `is_one`: everything is one product. Else b and a are another one, as their weights are in the
    model's dtype where others are in fp8.
    """

    inputs: NormLinear

    def __init__(
        self, sizes: DeltaSizes, eps: float, is_last: bool, is_one: bool, mesh: Mesh, ops: Ops
    ) -> None:
        super().__init__()
        self.eps, self.is_last, self.ops = eps, is_last, ops
        if sizes.taps not in (taps := ops.delta.taps):
            allowed = f"{taps.start} to {taps.stop - 1}, or kernels.delta torch"
            raise ConfigError(f"linear_conv_kernel_dim is {sizes.taps}; it must be {allowed}")
        keys = mesh.span("linear_num_key_heads", sizes.key_heads)
        each, values = sizes.each, keys.of_width(sizes.each)
        widths = sizes.key, sizes.key, each * sizes.value, each * sizes.value
        qkvz, ba = interleaved(keys, widths), interleaved(keys, (each, each))
        of_ba = tuple(("ba" if is_one else "", span) for span in ba)
        of_qkvz = tuple(("qkvz" if is_one else "", span) for span in qkvz)
        count = keys.count * (sum(widths) + (2 * each if is_one else 0))
        inputs = NormLinear(sizes.hidden, eps, {"": Span(count, 0, count)}, ops)
        inputs.placements["weight"] = Placement(0, of_qkvz + of_ba if is_one else of_qkvz)
        self.add_module("qkvzba" if is_one else "qkvz", inputs)
        vars(self)["inputs"] = inputs  # not as a second module
        whole = Placement(0, of_ba)
        self.ba = None if is_one else Linear(2 * values.count, sizes.hidden, whole, ops)
        channels = sizes.channels(keys)
        self.conv = parameter(sum(span.count for span in channels), 1, sizes.taps)
        self.a_log, self.dt_bias = (parameter(values.count, dtype=torch.float32) for _ in "ab")
        of_heads = Placement(0, (("", values),))
        of_channels = Placement(0, tuple(("", span) for span in channels))
        self.placements = {"conv": of_channels, "a_log": of_heads, "dt_bias": of_heads}
        self.norm = parameter(sizes.value)
        self.attend = GatedDelta(keys.count, sizes.key, values.count, sizes.value, ops.delta)
        self.out_proj = AddLinear(values.of_width(sizes.value), sizes.hidden, mesh, ops)

    @property
    def out(self) -> AddLinear:
        """Under the name that it has in any layer of attention."""
        return self.out_proj

    def bind(self, states: DeltaStates) -> None:
        """The states are the layer's own from here on. Weights are loaded by now."""
        weights = self.conv[:, 0], self.a_log, self.dt_bias, self.norm
        self.attend.bind(states, DeltaWeights(*weights, self.eps))

    def forward(self, residual: Residual, cos_sin_LA: Tensor, ctx: ForwardContext) -> Residual:
        """The residual stream with what this gives. May overwrite what it is given."""
        more = []
        if self.ba is not None:
            x_TD, residual = self.ops.norm(residual, self.inputs.norm_weight, self.eps)
            more = [self.ba.product(x_TD)]
        y, stream = self.inputs(residual)
        y_TX = summed(as_tensor(y)).to(stream.stream_TD.dtype)
        x_TX = ctx.eager(self.attend, ctx, y_TX, *more).flatten(1)
        if self.is_last and not ctx.all_hidden:
            x_TX, stream = ctx.batch.sampled(x_TX), Added(ctx.batch.sampled(stream.stream_TD))
        after: Residual = self.out_proj(x_TX, stream)
        return after

    def elements(self) -> int:
        """How many of a token are allocated at once beside the stream: products, what the
        convolution gives, and five times as much as the result, at most.
        """
        return len(self.inputs.weight) + len(self.conv) + 5 * self.out.weight.shape[1]
