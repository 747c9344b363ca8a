"""Paged attention by our own Triton kernels: the portable GPU path, and every backend's decode.

Knows shapes and launches; the arithmetic is in nanovllm_kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nanovllm_kernels.paged_decode import INTERPRETED, paged_decode, plan_decode
from nanovllm_kernels.paged_prefill import paged_prefill
from torch import Tensor

from nanovllm.attention.base import Attend, Batch, PagedKV
from nanovllm.kv.layout import CacheLayout

MAX_HEAD_WIDTH = 256


class TritonPaged:
    name = "triton"

    def __init__(self, caches: tuple[PagedKV, ...]) -> None:
        self.caches = caches

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Why not, or None."""
        if device.type != "cuda" and not INTERPRETED:
            return f"Triton's kernels run on a GPU, not on {device.type}"
        if len({(group.num_heads, group.k_width, group.v_width) for group in layout.paged}) != 1:
            return "one plan serves all layers, so their caches must have one shape"
        group = layout.paged[0]
        if group.k_width != group.v_width or group.k_width > MAX_HEAD_WIDTH:
            return f"keys and values must be equally wide, at most {MAX_HEAD_WIDTH}"
        return None

    def bind(self, batch: Batch) -> Attend:
        if batch.max_new == 1:
            return bind_decode(self.caches, batch)
        return TritonPrefill(self.caches, batch)


def bind_decode(caches: tuple[PagedKV, ...], batch: Batch) -> Attend:
    """For a batch in which every row feeds one token."""
    return TritonDecode(caches, batch, plan_decode(batch.lengths_R, caches[0].k_PSGA))


@dataclass(frozen=True, slots=True)
class TritonDecode:
    caches: tuple[PagedKV, ...]
    batch: Batch
    plan_N5: Tensor

    def __call__(self, layer: int, q_THA: Tensor) -> Tensor:
        cache, batch = self.caches[layer], self.batch
        return paged_decode(
            q_THA, cache.k_PSGA, cache.v_PSGA, batch.page_table_RM, batch.lengths_R, self.plan_N5
        )


@dataclass(frozen=True, slots=True)
class TritonPrefill:
    caches: tuple[PagedKV, ...]
    batch: Batch

    def __call__(self, layer: int, q_THA: Tensor) -> Tensor:
        cache, batch = self.caches[layer], self.batch
        return paged_prefill(
            q_THA,
            cache.k_PSGA,
            cache.v_PSGA,
            batch.page_table_RM,
            batch.starts_R1,
            batch.lengths_R,
            batch.max_new,
        )
