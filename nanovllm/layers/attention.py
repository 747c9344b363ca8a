"""Grouped-query attention with its norm: projections, rotation and store, attention, output.

The layer owns its cache. Pages and lengths are handled by the backend.

Decision: after the attention of the last layer only sampled tokens are computed further. Keys and
values of the others are stored by then, and nothing else of them is read. This saves 2 to 3 % of a
prompt's work. All tokens are computed if `all_hidden` is set.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.attention.grouped import GroupedHeads
from nanovllm.layers.linear import AddLinear, Layer, Linear, NormLinear, Placement, parameter
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Residual, as_tensor
from nanovllm.parallel.mesh import Mesh, Span

QKNorm = Literal["none", "head", "row"]


class Attention(Layer):
    """Attention block. `is_last`: no layer follows, so results are of sampled tokens only.

    `qk_norm`: RMS norm of queries and keys before the rotation, either of each head ("head") or of
    all heads of all ranks together ("row").
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        eps: float,
        qk_norm: QKNorm,
        is_last: bool,
        mesh: Mesh,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.is_last, self.eps, self.ops = is_last, eps, ops
        q = mesh.span("num_attention_heads", num_heads).of_width(head_size)
        kv = mesh.span_or_copy("num_key_value_heads", num_kv_heads).of_width(head_size)
        self.qkv: Linear = NormLinear(hidden_size, eps, {"q": q, "k": kv, "v": kv}, ops)
        # All key heads have the same number of copies: the mean over ranks is that over heads.
        self.norm_ranks = mesh if qk_norm == "row" else None
        spans = (q, kv) if qk_norm == "row" else (Span(head_size, 0, head_size),) * 2
        norms = [parameter(span.count) if qk_norm != "none" else None for span in spans]
        self.q_norm, self.k_norm = norms
        cuts = (Placement(0, (("", span),)) for span in spans)
        self.placements = dict(zip(("q_norm", "k_norm"), cuts, strict=True))
        self.attend = GroupedHeads(kv.count // head_size)
        self.bind = self.attend.bind
        self.out = AddLinear(q, hidden_size, mesh, ops)

    def forward(self, residual: Residual, cos_sin_LA: Tensor, ctx: ForwardContext) -> Residual:
        """Return the residual stream plus the block's result. May overwrite its input."""
        batch = ctx.batch
        qkv, stream = self.qkv(residual, ctx.adapters)
        o_TX = self.attended(as_tensor(qkv), cos_sin_LA, ctx)
        if self.is_last and not ctx.all_hidden:
            o_TX, stream = batch.sampled(o_TX), Added(batch.sampled(stream.stream_TD))
        after: Residual = self.out(o_TX, stream, ctx.adapters and ctx.adapted(is_last=self.is_last))
        return after

    def elements(self) -> int:
        """Return the elements per token that are allocated at once besides the stream."""
        return len(self.qkv.weight) + 2 * self.out.weight.shape[1]

    def attended(self, qkv_TX: Tensor, cos_sin_LA: Tensor, ctx: ForwardContext) -> Tensor:
        """Rotate queries and keys, store keys and values, and return the attention o_TX.

        qkv_TX may also be the unsummed slices of a product, as `rope_store` accepts them.
        """
        batch, cache = ctx.batch, self.attend.cache
        q_THA = self.ops.rope_store(
            qkv_TX,
            q_norm_X=self.q_norm,
            k_norm_X=self.k_norm,
            eps=self.eps,
            cos_sin_LA=cos_sin_LA,
            positions_T=batch.positions_T,
            slot_mapping_T=batch.slot_mapping_T,
            k_PSGA=cache.k_PSGA,
            v_PSGA=cache.v_PSGA,
            scales_2G=cache.scales_2G,
            ranks=self.norm_ranks,
        )
        return ctx.eager(self.attend, ctx, q_THA).flatten(1)
