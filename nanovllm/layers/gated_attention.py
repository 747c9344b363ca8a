"""Grouped-query attention with an output gate: the sigmoid of one more projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import NormLinear, Placement
from nanovllm.layers.residual import Added, Residual, as_tensor
from nanovllm.parallel.mesh import Span, interleaved


class GatedAttention(Attention):
    """Gated attention block. In the checkpoint, each head's rows of q are query rows, then gate
    rows.
    """

    def __init__(self, **sizes: Any) -> None:  # noqa: ANN401
        """Take the arguments of Attention."""
        super().__init__(**sizes)
        (_, q), *others = self.qkv.placements["weight"].parts
        size, parts = sizes["head_size"], {"q": q.of_width(2), **dict(others)}
        heads = Span(*(count // size for count in (q.full, q.start, q.count)))
        spans = interleaved(heads, (size, size))
        rows = [("q", span) for span in (*spans[heads.count :], *spans[: heads.count])]
        self.qkv = NormLinear(sizes["hidden_size"], self.eps, parts, self.ops)  # gates come first
        self.qkv.placements["weight"] = Placement(0, (*rows, *others))

    def forward(self, residual: Residual, cos_sin_LA: Tensor, ctx: ForwardContext) -> Residual:
        """Return the residual stream plus the block's result. May overwrite its input."""
        batch, width = ctx.batch, self.out.weight.shape[1]
        qkv, stream = self.qkv(residual, ctx.adapters)
        products = as_tensor(qkv)
        o_TX = self.attended(products[..., width:], cos_sin_LA, ctx)
        gate = products[..., :width]  # of all slices
        if self.is_last and not ctx.all_hidden:
            o_TX, stream = batch.sampled(o_TX), Added(batch.sampled(stream.stream_TD))
            gate = batch.sampled(gate.movedim(-2, 0)).movedim(0, -2)
        rows = ctx.adapters and ctx.adapted(is_last=self.is_last)
        after: Residual = self.out(self.ops.sigmoid_mul(gate, o_TX), stream, rows)
        return after
