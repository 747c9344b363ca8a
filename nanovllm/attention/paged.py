"""Decode rows by our own kernels, in combination with any GPU backend's prompt chunks.

Handles shapes and launches; the arithmetic is in nanovllm_kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanovllm_kernels.attention.paged_decode import DECODE as TRITON_DECODE, DecodeKernel
from torch import Tensor

from nanovllm.attention.base import Attend, Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.kv.layout import CacheLayout

CUTE_ROWS = range(9, 129)  # numbers of rows for which the CuTe DSL kernel is faster


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
