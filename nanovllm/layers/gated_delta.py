"""Gated DeltaNet with its norm: projections, convolution, delta rule, output.

Key heads are cut over ranks, each together with its value heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from nanovllm_kernels.delta.reference import DeltaWeights
from nanovllm_kernels.norms.reference import summed
from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.attention.gated_delta import DeltaStates, GatedDelta
from nanovllm.config import ConfigError
from nanovllm.layers.linear import AddLinear, Layer, Linear, NormLinear, Placement, parameter
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Residual, as_tensor
from nanovllm.parallel.mesh import Mesh, Span, interleaved

Parts = tuple[tuple[str, Span], ...]


class DeltaSizes(NamedTuple):
    """Heads of all ranks, elements per head, and the size of the convolution in tokens.

    `grouped`: the checkpoint has two tensors of projections, qkvz and ba, whose rows are stored key
    head by key head (Qwen3-Next). Otherwise it has four, qkv, z, b and a (Qwen3.5).
    """

    hidden: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int
    grouped: bool

    @property
    def each(self) -> int:
        """Value heads per key head. They are adjacent."""
        return self.value_heads // self.key_heads

    def channels(self, keys: Span) -> list[Span]:
        """Return this rank's channels of the convolution: queries, keys, values."""
        key, value = keys.of_width(self.key), keys.of_width(self.each * self.value)
        parts = (key, 0), (key, key.full), (value, 2 * key.full)
        full = 2 * key.full + value.full
        return [Span(full, before + part.start, part.count) for part, before in parts]

    def projections(self, keys: Span) -> tuple[Parts, Parts]:
        """Return this rank's rows of queries, keys, values and z, and those of b and a.

        In the parameter, rows of a kind are adjacent, in the order of heads.
        """
        each = self.each
        if self.grouped:
            widths = self.key, self.key, each * self.value, each * self.value
            qkvz, ba = interleaved(keys, widths), interleaved(keys, (each, each))
            return tuple(("qkvz", span) for span in qkvz), tuple(("ba", span) for span in ba)
        values = keys.of_width(each)
        qkvz = [*self.channels(keys), values.of_width(self.value)]
        return tuple(zip(("qkv", "qkv", "qkv", "z"), qkvz, strict=True)), (
            ("b", values),
            ("a", values),
        )


class GatedDeltaNet(Layer):
    """Gated DeltaNet block. `is_last`: no layer follows, so results are of sampled tokens only.

    `is_one`: all projections are one product. Otherwise b and a are a second one: in fp8 models,
    their weights stay in the model's dtype. Raise ConfigError if the kernels do not support the
    size of the convolution.
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
        values = keys.of_width(sizes.each)
        qkvz, ba = sizes.projections(keys)
        rows = qkvz + ba if is_one else qkvz
        count = sum(span.count for _, span in rows)
        inputs = NormLinear(sizes.hidden, eps, {"": Span(count, 0, count)}, ops)
        inputs.placements["weight"] = Placement(0, rows)
        self.add_module("qkvzba" if is_one else "qkvz", inputs)
        vars(self)["inputs"] = inputs  # not as a second module
        apart = Placement(0, ba)
        self.ba = None if is_one else Linear(2 * values.count, sizes.hidden, apart, ops)
        channels = sizes.channels(keys)
        self.conv = parameter(sum(span.count for span in channels), 1, sizes.taps)
        self.a_log, self.dt_bias = (parameter(values.count, dtype=torch.float32) for _ in "ab")
        of_heads = Placement(0, (("", values),))
        of_channels = Placement(0, tuple(("", span) for span in channels))
        self.placements = {"conv": of_channels, "a_log": of_heads, "dt_bias": of_heads}
        self.norm = parameter(sizes.value)
        self.attend = GatedDelta(
            key_heads=keys.count,
            key_size=sizes.key,
            value_heads=values.count,
            value_size=sizes.value,
            kernels=ops.delta,
        )
        self.out_proj = AddLinear(values.of_width(sizes.value), sizes.hidden, mesh, ops)

    @property
    def out(self) -> AddLinear:
        """The output projection, under the name that all attention layers use."""
        return self.out_proj

    def bind(self, states: DeltaStates) -> None:
        """Set the layer's states. Weights must be loaded."""
        self.attend.bind(states, self.delta_weights)

    @property
    def delta_weights(self) -> DeltaWeights:
        return DeltaWeights(
            conv_CW=self.conv[:, 0],
            a_log_H=self.a_log,
            dt_bias_H=self.dt_bias,
            norm_V=self.norm,
            eps=self.eps,
        )

    def forward(self, residual: Residual, cos_sin_LA: Tensor, ctx: ForwardContext) -> Residual:
        """Return the residual stream plus the block's result. May overwrite its input."""
        extra, rows = [], ctx.adapters
        if self.ba is not None:
            x_TD, residual = self.ops.norm(residual, self.inputs.norm_weight, self.eps)
            extra = [self.ba.product(x_TD) if rows is None else self.ba.adapted_product(x_TD, rows)]
        y, stream = self.inputs(residual, rows)
        y_TX = summed(as_tensor(y)).to(stream.stream_TD.dtype)
        x_TX = ctx.eager(self.attend, ctx, y_TX, *extra).flatten(1)
        if self.is_last and not ctx.all_hidden:
            x_TX, stream = ctx.batch.sampled(x_TX), Added(ctx.batch.sampled(stream.stream_TD))
        after: Residual = self.out_proj(
            x_TX, stream, ctx.adapters and ctx.adapted(is_last=self.is_last)
        )
        return after

    def elements(self) -> int:
        """Return the elements per token that are allocated at once besides the stream.

        These are the products, the output of the convolution, and up to five times the result.
        """
        return len(self.inputs.weight) + len(self.conv) + 5 * self.out.weight.shape[1]
