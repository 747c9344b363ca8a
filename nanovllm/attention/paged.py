"""Decode rows by our own kernels, in combination with any GPU backend's prompt chunks.

Handles shapes and launches; the arithmetic is in nanovllm_kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from nanovllm_kernels.attention.paged_decode import DECODE as TRITON_DECODE, DecodeKernel
from nanovllm_kernels.attention.paged_prefill import division_of, paged_prefill
from torch import Tensor

from nanovllm.attention.base import Attend, Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.kv.layout import CacheLayout

CUTE_ROWS = range(9, 129)  # numbers of rows for which the CuTe DSL kernel is faster
SLOWER = 1.7  # time of a tile by paged_prefill relative to flash-attn-4's: 353 and 600 TFLOP/s
WARM_TOKENS = 16


def obstacle_of_shapes(layout: CacheLayout) -> str | None:
    """Return the reason why our kernel cannot compute decode rows, or None."""
    if len({(group.num_heads, group.k_size, group.v_size) for group in layout.paged}) != 1:
        return "one plan serves all layers, so their caches must have one shape"
    return None


def bind_rows(
    like: PagedKV,
    batch: Batch,
    bind_chunks: Callable[[Batch], Attend],
    kernel: DecodeKernel,
    portable: DecodeKernel | None = None,
) -> Attend:
    """Bind decode rows to our own kernel and prompt chunks to the backend's.

    `portable` (None: Triton's) takes the numbers of rows for which `kernel` is slower or has no
    room.
    """
    at, width = batch.num_decodes, batch.decode_width
    if at == 0:
        return bind_chunks(batch)
    if at not in CUTE_ROWS or width > kernel.max_width:
        kernel = portable or TRITON_DECODE
    rows = batch.decodes()
    plan = kernel.plan(rows.lengths_R, like.k_PSGA)
    attend = kernel.attend
    if width > 1:
        attend = partial(attend, starts_R1=rows.starts_R1, width=width)
    decode = RowsAttend(attend, (rows.page_table_RM, rows.lengths_R, plan))
    if at == len(batch.lengths_R):
        return decode
    return DecodeAndChunks(decode, bind_chunks(batch.chunks()), batch.num_decode_tokens)


@dataclass(frozen=True, slots=True)
class RowsAttend:
    """A kernel for grouped heads, with its arguments that depend on a step's rows."""

    kernel: Callable[..., Tensor]
    rows: tuple[Any, ...]

    def __call__(self, cache: PagedKV, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        k_PSGA, v_PSGA, scales_2G = cache
        scaled = {} if scales_2G is None else {"scales_2G": scales_2G}
        return self.kernel(q_THA, k_PSGA, v_PSGA, *self.rows, out_THA, **scaled)


@dataclass(frozen=True, slots=True)
class DecodeAndChunks:
    """Attention of a step with both kinds of rows. The tokens of decode rows come first."""

    decode: Attend
    chunks: Attend
    num_decode_tokens: int

    def __call__(self, cache: PagedKV, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        o_THA = self.chunks(cache, q_THA, out_THA)
        at = self.num_decode_tokens
        self.decode(cache, q_THA[:at], o_THA[:at])
        return o_THA


class ChunksAttend:
    """Prompt chunks by our own kernel, which divides the keys of short chunks over the GPU.

    `whole` is a kernel that does not divide keys. It takes the chunks for which it is faster.
    """

    def __init__(self, batch: Batch, whole: Attend | None = None) -> None:
        self.batch, self.whole = batch, whole
        ends = [chunk.start + chunk.num_tokens for chunk in batch.planned]
        self.longest = max(ends, default=0)  # 0: not known
        self.is_padding = not batch.planned and not batch.is_draft

    def __call__(self, cache: PagedKV, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        batch, whole, parts = self.batch, self.whole, 1
        if self.is_padding:
            self.warm_up(cache, q_THA)
        elif self.longest:
            division = division_of(
                q_THA.shape[1],
                cache.k_PSGA,
                num_rows=len(batch.planned),
                max_new=batch.max_new,
                max_length=self.longest,
            )
            parts = division.parts
            if division.time * SLOWER < division.undivided:
                whole = None
        if whole is not None:
            return whole(cache, q_THA, out_THA)
        rows = batch.page_table_RM, batch.starts_R1, batch.lengths_R, batch.max_new
        return RowsAttend(partial(paged_prefill, parts=parts), rows)(cache, q_THA, out_THA)

    def warm_up(self, cache: PagedKV, q_THA: Tensor) -> None:
        """Compile the kernels that divide keys, and take the memory that they need at most."""
        batch, starts_R1 = self.batch, self.batch.starts_R1
        starts_R1 = torch.minimum(starts_R1[:2], starts_R1[:1] + WARM_TOKENS)
        lengths_R = batch.lengths_R[:1].clamp(max=WARM_TOKENS)
        rows = batch.page_table_RM[:1], starts_R1, lengths_R, WARM_TOKENS
        RowsAttend(partial(paged_prefill, parts=2), rows)(cache, q_THA)
