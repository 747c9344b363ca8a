"""Batches over scattered pages with random contents, for tests of attention backends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from nanovllm_kernels.attention.reference import paged_inputs, paged_prefill
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.kv.layout import CacheLayout, PagedGroup
from nanovllm.plan import Chunk

Heads = tuple[int, int, int]  # query heads, key/value heads, head size


def make_batch(
    lengths: Sequence[int],
    new: Sequence[int],
    heads: Heads,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    width: int = 1,
) -> tuple[Tensor, PagedKV, Batch]:
    """Return queries, one layer's cache and the batch. Unused cells have finite values.

    The first rows of up to `width` new tokens are decode rows.
    """
    q_THA, k_PSGA, v_PSGA, table_RM, starts_R1, lengths_R = paged_inputs(
        lengths, new, heads, page_tokens, dtype, device
    )
    cache = PagedKV(k_PSGA.nan_to_num(3.0), v_PSGA.nan_to_num(-5.0))
    unused = torch.empty(0, dtype=torch.int64, device=device)
    decodes = list(takewhile(lambda count: count <= width, new))
    batch = Batch(
        token_ids_T=unused,
        positions_T=unused,
        slot_mapping_T=unused,
        slots_T=unused,
        slots_R=torch.arange(len(lengths), device=device),
        starts_R1=starts_R1,
        lengths_R=lengths_R,
        page_table_RM=table_RM,
        sampled_at=unused,
        num_decodes=len(decodes),
        num_decode_tokens=sum(decodes),
        decode_width=width,
        max_new=max(new),
        max_length=max(lengths),
        planned=[
            Chunk(row, new[row], True, start=lengths[row] - new[row])
            for row in range(len(decodes), len(new))
        ],
    )
    return q_THA, cache, batch


def error_share(o_THA: Tensor, q_THA: Tensor, cache: PagedKV, batch: Batch) -> float:
    """Return the largest error in ulps of the sum of weight * |value|; the bound is 1."""
    rows = batch.page_table_RM, batch.starts_R1, batch.lengths_R, batch.max_new
    expected_THA = paged_prefill(q_THA, cache.k_PSGA, cache.v_PSGA, *rows)
    size_THA = paged_prefill(q_THA, cache.k_PSGA, cache.v_PSGA.abs(), *rows)
    allowed_THA = torch.finfo(o_THA.dtype).eps * size_THA
    return float(((o_THA.float() - expected_THA).abs() / allowed_THA).nan_to_num(torch.inf).max())


def layout_of(heads: Heads, bytes_per_element: int = 2) -> CacheLayout:
    _, num_kv_heads, width = heads
    return CacheLayout((PagedGroup((0,), num_kv_heads, width, width, bytes_per_element),))
