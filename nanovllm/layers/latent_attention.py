"""Latent attention with its norm: low-rank projections, store of latents, attention, output.

Projections that all heads share, and the cache, are replicated on every rank. Heads are cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from nanovllm_kernels.compile_cache import Job
from nanovllm_kernels.fp8_reference import FP8, Scaled
from nanovllm_kernels.norms.reference import summed
from torch import Tensor

from nanovllm.attention.base import AdaptedRows, ForwardContext
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.latent import LatentHeads, Latents
from nanovllm.attention.latent_rows import can_expand
from nanovllm.config import Recipe
from nanovllm.layers.fp8 import to_fp8
from nanovllm.layers.linear import AddLinear, Layer, Linear, NormLinear, Placement, parameter
from nanovllm.layers.lora import Delta
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Output, Residual, as_tensor
from nanovllm.parallel.mesh import Mesh, Span

EPS = 1e-6  # of the norms of latents, independent of config.json's rms_norm_eps


class LatentSizes(NamedTuple):
    """Sizes of a token's latents and of a head."""

    hidden: int
    heads: int  # of all ranks
    query_rank: int | None  # None: queries are projected from the residual stream directly
    rank: int  # of the latent from which keys and values are computed
    key: int  # elements of a head's key that are computed from the latent
    rotated: int  # further elements of a key, which are rotated and shared by all heads
    value: int


class LatentAttention(Layer):
    """Latent attention block. `scale` multiplies scores.

    `is_last`: no layer follows, so results are of sampled tokens only.
    """

    def __init__(
        self, sizes: LatentSizes, eps: float, scale: float, is_last: bool, mesh: Mesh, ops: Ops
    ) -> None:
        super().__init__()
        self.sizes, self.scale, self.is_last = sizes, scale, is_last
        self.store = ops.latent_store
        heads = mesh.span("num_attention_heads", sizes.heads)
        q, cached = heads.of_width(sizes.key + sizes.rotated), sizes.rank + sizes.rotated
        first = q if sizes.query_rank is None else whole(sizes.query_rank)
        products = NormLinear(sizes.hidden, eps, {"q": first, "kv": whole(cached)}, ops)
        self.qkv = products if first is q else None
        self.latents = None if first is q else products
        self.q_b = None if first is q else NormLinear(first.count, EPS, {"": q}, ops)
        self.kv_norm = parameter(sizes.rank)
        self.kv_b = KeysValues(heads.of_width(sizes.key + sizes.value), sizes.rank, ops)
        self.attend = LatentHeads()
        self.latent_space = LatentHeads()  # for adapters of kv_b
        self.out = AddLinear(heads.of_width(sizes.value), sizes.hidden, mesh, ops)

    def bind(self, cache: PagedKV) -> None:
        """Set the layer's cache, which has one key head and no values. Weights must be loaded."""
        weight_HXX = self.kv_b.dequantised().unflatten(0, (-1, self.sizes.key + self.sizes.value))
        key_HAX, value_HAX = weight_HXX.split([self.sizes.key, self.sizes.value], 1)
        pages_PSX = cache.k_PSGA[:, :, 0]
        if pages_PSX.dtype == FP8:  # only a part of each row is fp8
            pages_PSX = pages_PSX.view(torch.uint8)
        self.attend.cache = Latents(pages_PSX, key_HAX, value_HAX, self.scale)
        if self.kv_b.delta is not None:
            same_XX = torch.eye(self.sizes.rank, dtype=key_HAX.dtype, device=key_HAX.device)
            same_HXX = same_XX.expand(len(key_HAX), -1, -1)
            self.latent_space.cache = Latents(pages_PSX, same_HXX, same_HXX, self.scale)

    def forward(self, residual: Residual, cos_sin_LA: Tensor, ctx: ForwardContext) -> Residual:
        """Return the residual stream plus the block's result. May overwrite its input."""
        batch, cache = ctx.batch, self.attend.cache
        products = self.latents or self.qkv
        assert products is not None
        rows = ctx.adapters
        qkv, stream = products(residual, rows)
        qkv_TX = unsliced(qkv, stream.stream_TD.dtype)
        q_TX, kv_TX = qkv_TX.tensor_split([-sum(self.sizes[3:6:2])], 1)
        if self.q_b is None or self.q_b.by_rows[len(q_TX)].fused.norm:  # a norm alone takes strides
            q_TX = q_TX.contiguous()
        if self.q_b is not None:
            q_TX = unsliced(self.q_b(Added(q_TX), rows)[0], q_TX.dtype)
        q_THA = q_TX.unflatten(1, (len(cache.key_HAX), -1))
        q_THA = self.store(
            kv_TX,
            norm_weight_X=self.kv_norm,
            eps=EPS,
            q_THA=q_THA,
            cos_sin_LA=cos_sin_LA,
            positions_T=batch.positions_T,
            slot_mapping_T=batch.slot_mapping_T,
            pages_PSX=cache.pages_PSX,
        )
        if rows is not None and self.kv_b.delta is not None:
            o_TX = self._adapted(q_THA, ctx, rows, self.kv_b.delta).flatten(1)
        else:
            o_TX = ctx.eager(self.attend, ctx, q_THA).flatten(1)
        if self.is_last and not ctx.all_hidden:
            o_TX, stream = batch.sampled(o_TX), Added(batch.sampled(stream.stream_TD))
        after: Residual = self.out(o_TX, stream, ctx.adapters and ctx.adapted(is_last=self.is_last))
        return after

    def _adapted(
        self, q_THA: Tensor, ctx: ForwardContext, rows: AdaptedRows, delta: Delta
    ) -> Tensor:
        """Return o_THA with adapters of kv_b, which change the keys and values of cached latents.

        Attention runs in the latent space, with an identity in place of each head's matrices. The
        matrices, and the deltas, are applied to queries before and to results after it.
        """
        cache, key = self.attend.cache, self.sizes.key
        q_THX = torch.einsum("tha,hax->thx", q_THA[..., :key], cache.key_HAX)
        q_THX = q_THX + delta.absorbed_query(q_THA[..., :key], rows)
        o_THX = ctx.eager(self.latent_space, ctx, torch.cat((q_THX, q_THA[..., key:]), 2))
        o_THA = torch.einsum("thx,hax->tha", o_THX, cache.value_HAX)
        return delta.value(o_THX, o_THA, rows)

    def jobs(self, recipe: Recipe) -> list[Job]:
        """Return the kernels that attention needs compiled."""
        jobs: list[Job] = []
        num_heads = self.out.weight.shape[1] // self.sizes.value
        size, value = self.sizes.key + self.sizes.rotated, self.sizes.value
        if recipe.kernels.attention == "flash" and can_expand(size, value, recipe.dtype):
            from nanovllm_kernels.attention.flash_prefill import compile_expanded

            jobs += [compile_expanded.job(size, value, recipe.dtype, kind) for kind in (0, 1)]
        if recipe.kernels.decode == "cute":
            from nanovllm_kernels.attention.latent_decode_cute import compile_decode

            widths = {0, 1 + recipe.speculate.tokens if recipe.speculate is not None else 0}
            tokens = int(recipe.cache.page_tokens)
            jobs += [compile_decode.job(num_heads, tokens, width) for width in widths]
        return jobs

    def elements(self) -> int:
        """Return the elements per token that are allocated at once besides the stream.

        These are the products and the result. Expanded chunks add keys, values and a second result;
        absorbed ones add queries and results in the latent space.
        """
        features = [
            len(part.weight) for part in (self.qkv, self.latents, self.q_b) if part is not None
        ]
        _, _, _, rank, key, rotated, value = self.sizes
        heads = self.out.weight.shape[1] // value
        return sum(features) + heads * (value + max(key + rotated + 2 * value, 2 * rank))


class KeysValues(Linear):
    """Weight that maps a latent to each head's key and value.

    Rows are stored head by head: those of the key, then those of the value. An fp8 weight also has
    a copy in the model's dtype, which is the one that attention uses.
    """

    def __init__(self, rows: Span, rank: int, ops: Ops) -> None:
        super().__init__(rows.count, rank, Placement(0, (("", rows),)), ops)
        del self.by_rows  # attention multiplies head by head instead

    def set_tables(self) -> None:
        """Set nothing: no product is chosen by rows."""

    def to_fp8(self) -> None:
        """Change the type of a weight whose storage is not allocated yet, and add its scales."""
        shape = self.weight.shape
        to_fp8(self)
        self.register_buffer("whole_ND", torch.empty(shape, dtype=self.dtype), persistent=False)

    def dequantised(self) -> Tensor:
        """Return the weight in the model's dtype. It must be loaded."""
        weight = self.operand
        if isinstance(weight, Scaled):
            return self.get_buffer("whole_ND").copy_(weight.dequantised())
        return weight


def whole(count: int) -> Span:
    return Span(count, 0, count)


def unsliced(product: Output, dtype: torch.dtype) -> Tensor:
    return summed(as_tensor(product)).to(dtype)
