"""Grouped-query attention behind its norm: projections around rope-and-store and the backend.

Knows neither pages nor lengths: those are the backend's.

Decision: behind the last layer's attention only the tokens that rows predict from go on. The others
have left their keys and values, and nothing else of them is read: 2 to 3 % of a prompt's work.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.dist.mesh import Mesh
from nanovllm.layers.linear import Layer, NormedLinear, RowLinear, parameter
from nanovllm.layers.ops import Ops


class Attention(Layer):
    """`qk_norm`: query and key heads are RMS-normalised before the rotation. `is_last`: no layer
    follows, so the results are of the tokens that rows predict from, S.
    """

    def __init__(
        self,
        layer: int,
        *,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        eps: float,
        qk_norm: bool,
        is_last: bool,
        mesh: Mesh,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.layer, self.is_last, self.eps, self.ops = layer, is_last, eps, ops
        q = mesh.span("num_attention_heads", num_heads).of_width(head_width)
        kv = mesh.span_or_copy("num_key_value_heads", num_kv_heads).of_width(head_width)
        self.qkv = NormedLinear(width, eps, {"q": q, "k": kv, "v": kv}, ops)
        self.q_gain = parameter(head_width) if qk_norm else None
        self.k_gain = parameter(head_width) if qk_norm else None
        self.out = RowLinear(q, width, mesh, ops)

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, cos_sin_LA: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """As Ops.linear_add."""
        cache = ctx.caches[self.layer]
        qkv_TX, residual_TD = self.qkv(x_TD, residual_TD)
        q_THA = self.ops.rope_store(
            qkv_TX,
            self.q_gain,
            self.k_gain,
            self.eps,
            cos_sin_LA,
            ctx.batch.positions_T,
            ctx.batch.cells_T,
            cache.k_PSGA,
            cache.v_PSGA,
        )
        o_TX = ctx.attend(self.layer, q_THA).flatten(1)
        if self.is_last:
            o_TX, residual_TD = ctx.batch.sampled(o_TX), ctx.batch.sampled(residual_TD)
        x_TD, residual_TD = self.out(o_TX, residual_TD)
        return x_TD, residual_TD
