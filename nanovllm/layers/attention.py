"""Grouped-query attention behind its norm: projections around rope-and-store and the backend.

Knows neither pages nor lengths: those are the backend's. The cache is the layer's own.

Decision: behind the last layer's attention only the tokens that rows predict from go on. The others
have left their keys and values, and nothing else of them is read: 2 to 3 % of a prompt's work. All
tokens go on where somebody asks for the hidden states of all.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.attention.grouped import GroupedHeads
from nanovllm.layers.linear import AddLinear, Layer, NormLinear, parameter
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Residual, as_tensor
from nanovllm.parallel.mesh import Mesh


class Attention(Layer):
    """`qk_norm`: query and key heads are RMS-normalised before the rotation. `is_last`: no layer
    follows, so the results are of the tokens that rows predict from.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        eps: float,
        qk_norm: bool,
        is_last: bool,
        mesh: Mesh,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.is_last, self.eps, self.ops = is_last, eps, ops
        q = mesh.span("num_attention_heads", num_heads).of_width(head_size)
        kv = mesh.span_or_copy("num_key_value_heads", num_kv_heads).of_width(head_size)
        self.qkv = NormLinear(hidden_size, eps, {"q": q, "k": kv, "v": kv}, ops)
        self.q_norm = parameter(head_size) if qk_norm else None
        self.k_norm = parameter(head_size) if qk_norm else None
        self.attend = GroupedHeads()
        self.out = AddLinear(q, hidden_size, mesh, ops)

    def forward(self, residual: Residual, cos_sin_LA: Tensor, ctx: ForwardContext) -> Residual:
        """The residual stream with what attention gives. May overwrite what it is given."""
        batch, cache = ctx.batch, self.attend.cache
        norms = self.q_norm, self.k_norm, self.eps
        stored = batch.positions_T, batch.slot_mapping_T, cache.k_PSGA, cache.v_PSGA
        qkv, stream = self.qkv(residual)
        q_THA = self.ops.rope_store(as_tensor(qkv), *norms, cos_sin_LA, *stored)
        o_TX = ctx.eager(self.attend, ctx, q_THA).flatten(1)
        if self.is_last and not ctx.all_hidden:
            o_TX, stream = batch.sampled(o_TX), Added(batch.sampled(stream.stream_TD))
        after: Residual = self.out(o_TX, stream)
        return after
