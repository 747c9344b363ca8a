"""Grouped heads: query heads that share key/value heads, over pages of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.attention.base import ForwardContext
from nanovllm.kv.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's cache. Zero-filled at start; page 0 is never given to a request."""

    k_PSGA: Tensor
    v_PSGA: Tensor


class GroupedHeads:
    """A layer's attention: causal, of scale A**-0.5, over each row's context in its own cache."""

    cache: PagedKV  # from Decoder.bind_caches on

    def __call__(self, ctx: ForwardContext, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        """o_THA, as wide as values; it is out_THA if given. Keys and values have been stored."""
        return ctx.attend(self.cache, q_THA, out_THA)

    def empty(self, q_THA: Tensor) -> Tensor:
        """What o_THA will look like."""
        return q_THA.new_empty(*q_THA.shape[:2], self.cache.v_PSGA.shape[3])


def pageless(layout: CacheLayout, page_tokens: int, dtype: torch.dtype) -> PagedKV:
    """A cache of no pages in the shape of the first group's: what backends plan by."""
    group = layout.paged[0]
    k_PSGA, v_PSGA = (
        torch.empty(0, page_tokens, group.num_heads, size, dtype=dtype)
        for size in (group.k_size, group.v_size)
    )
    return PagedKV(k_PSGA, v_PSGA)
