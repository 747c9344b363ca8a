"""Grouped-query attention: projections around one fused rope-and-store and the bound backend.

Knows neither pages nor lengths: those are the backend's.
"""

from __future__ import annotations

from torch import Tensor, nn

from nanovllm.attention.base import ForwardContext
from nanovllm.dist.mesh import Mesh
from nanovllm.layers.linear import ColumnLinear, RowLinear, parameter
from nanovllm.layers.ops import Ops


class Attention(nn.Module):
    """`norm_eps`: query and key heads are RMS-normalised with it before the rotation; None: not."""

    def __init__(
        self,
        layer: int,
        *,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        norm_eps: float | None,
        mesh: Mesh,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.layer, self.norm_eps, self.ops = layer, norm_eps or 0.0, ops
        q = mesh.span("num_attention_heads", num_heads).of_width(head_width)
        kv = mesh.span_or_copy("num_key_value_heads", num_kv_heads).of_width(head_width)
        self.qkv = ColumnLinear(width, {"q": q, "k": kv, "v": kv})
        self.q_gain = parameter(head_width) if norm_eps is not None else None
        self.k_gain = parameter(head_width) if norm_eps is not None else None
        self.out = RowLinear(q, width, mesh)

    def forward(self, x_TD: Tensor, cos_sin_LA: Tensor, ctx: ForwardContext) -> Tensor:
        cache = ctx.caches[self.layer]
        q_THA = self.ops.rope_store(
            self.qkv(x_TD),
            self.q_gain,
            self.k_gain,
            self.norm_eps,
            cos_sin_LA,
            ctx.batch.positions_T,
            ctx.batch.cells_T,
            cache.k_PSGA,
            cache.v_PSGA,
        )
        y_TD: Tensor = self.out(ctx.attend(self.layer, q_THA).flatten(1))
        return y_TD
