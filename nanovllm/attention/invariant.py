"""Batch-invariant attention: the bits of a token do not depend on other rows.

They do not depend on the chunk that the token is in either, so prompts and generated tokens are
computed alike. On a CPU, the arithmetic is in nanovllm_kernels.attention.invariant.

On a GPU, kernels read a row's keys in blocks that start at its first token, in one order, and do
not divide them among programs. The kernel of decode rows and that of prompt chunks do the same
arithmetic. So a few long rows leave most of the GPU idle.

Decision: latent attention is always absorbed. The expanded form is faster for long chunks, but
rounds differently, and a decode row would have to expand its whole context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from nanovllm_kernels.attention.invariant import QueryTiles, attention, tiles_of
from nanovllm_kernels.attention.latent_reference import dequantised
from nanovllm_kernels.fp8_reference import FP8
from nanovllm_kernels.products.invariant import per_head
from torch import Tensor

from nanovllm.attention.base import Attend, Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.latent import Latents
from nanovllm.kv.layout import CacheKind


class InvariantTorch:
    def __init__(self, like: PagedKV) -> None:
        """`like` is a cache whose pages are as long as those of every layer."""
        self.page_tokens = like.k_PSGA.shape[1]

    def bind(self, batch: Batch) -> InvariantAttend:
        tiles = tiles_of(batch.starts_R1, batch.lengths_R, batch.page_table_RM)
        return InvariantAttend(tiles, self.page_tokens)


class InvariantGpu:
    def __init__(self, like: PagedKV, kind: CacheKind) -> None:
        """`like` is a cache with the shape and dtype of every layer's; its pages do not matter."""
        self.like, self.kind = like, kind

    def bind(self, batch: Batch) -> Attend:
        from nanovllm_kernels.attention import latent_decode, paged_decode  # imports Triton

        if self.kind == "latent":
            from nanovllm_kernels.products.per_head import per_head

            from nanovllm.attention.latent_rows import bind_latents

            page_tokens, whole = self.like.k_PSGA.shape[1], latent_decode.WHOLE_ROWS
            return bind_latents(
                batch, page_tokens, whole, expands=False, portable=whole, per_head=per_head
            )
        from nanovllm.attention.paged import bind_rows

        whole = paged_decode.WHOLE_ROWS
        return bind_rows(self.like, batch, bind_ordered_chunks, whole, portable=whole)


def bind_ordered_chunks(batch: Batch) -> Attend:
    from nanovllm_kernels.attention.paged_prefill import paged_prefill

    from nanovllm.attention.paged import RowsAttend

    rows = batch.page_table_RM, batch.starts_R1, batch.lengths_R, batch.max_new
    return RowsAttend(partial(paged_prefill, ordered=True), rows)


@dataclass(frozen=True, slots=True)
class InvariantAttend:
    tiles: QueryTiles
    page_tokens: int

    def __call__(
        self, cache: PagedKV | Latents, q_THA: Tensor, out_THA: Tensor | None = None
    ) -> Tensor:
        if out_THA is None:
            out_THA = q_THA.new_empty(*q_THA.shape[:2], cache.width)
        if isinstance(cache, Latents):
            return out_THA.copy_(self._latent(cache, q_THA))
        return out_THA.copy_(self._grouped(cache, q_THA))

    def _grouped(self, cache: PagedKV, q_THA: Tensor) -> Tensor:
        def context(pages_NB: Tensor, offsets_NB: Tensor) -> tuple[Tensor, Tensor]:
            k_NBGA = at_places(cache.k_PSGA, pages_NB, offsets_NB)
            v_NBGA = at_places(cache.v_PSGA, pages_NB, offsets_NB)
            if cache.scales_2G is not None:
                k_scale_G1, v_scale_G1 = cache.scales_2G[:, :, None]
                k_NBGA = (k_NBGA.float() * k_scale_G1).to(q_THA.dtype)
                v_NBGA = (v_NBGA.float() * v_scale_G1).to(q_THA.dtype)
            return k_NBGA, v_NBGA

        return attention(
            q_THA,
            context,
            self.tiles,
            num_kv_heads=cache.k_PSGA.shape[2],
            width=cache.width,
            page_tokens=self.page_tokens,
            scale=q_THA.shape[2] ** -0.5,
        )

    def _latent(self, cache: Latents, q_THA: Tensor) -> Tensor:
        _, size, rank = cache.key_HAX.shape
        rotated = q_THA.shape[2] - size

        def context(pages_NB: Tensor, offsets_NB: Tensor) -> tuple[Tensor, Tensor]:
            rows_NBX = at_places(cache.pages_PSX, pages_NB, offsets_NB)
            keys_NBX = dequantised(rows_NBX, rank, rotated, q_THA.dtype)[:, :, None]
            return keys_NBX, keys_NBX[..., :rank]

        q_THX = torch.cat([per_head(q_THA[..., :size], cache.key_HAX.mT), q_THA[..., size:]], -1)
        o_THX = attention(
            q_THX,
            context,
            self.tiles,
            num_kv_heads=1,
            width=rank,
            page_tokens=self.page_tokens,
            scale=cache.scale,
        )
        return per_head(o_THX.to(q_THA.dtype), cache.value_HAX)


def at_places(pages_PSX: Tensor, pages_NB: Tensor, offsets_NB: Tensor) -> Tensor:
    """Return the cached tokens at these places. Torch cannot index fp8 tensors, but their bytes."""
    if pages_PSX.dtype == FP8:
        return pages_PSX.view(torch.uint8)[pages_NB, offsets_NB].view(FP8)
    return pages_PSX[pages_NB, offsets_NB]
