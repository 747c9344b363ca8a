"""Paged attention by our own kernels in Triton: the portable GPU path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nanovllm_kernels import paged_decode as triton_decode
from nanovllm_kernels.paged_decode import INTERPRETED
from nanovllm_kernels.paged_prefill import paged_prefill
from torch import Tensor

from nanovllm.attention.base import Attend, Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.paged import DecodeKernel, bind_rows, obstacle_of_shapes
from nanovllm.kv.layout import CacheLayout

MAX_HEAD_SIZE = 256


class TritonPaged:
    name = "triton"

    def __init__(self, like: PagedKV, decode: DecodeKernel = triton_decode) -> None:
        """`like`: a cache of any pages, of every layer's shape and dtype."""
        self.like = like
        self.decode = decode

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Why not, or None."""
        if device.type != "cuda" and not INTERPRETED:
            return f"Triton's kernels run on a GPU, not on {device.type}"
        group = layout.paged[0]
        if group.k_size != group.v_size or group.k_size > MAX_HEAD_SIZE:
            return f"keys and values must be equally wide, at most {MAX_HEAD_SIZE}"
        return obstacle_of_shapes(layout)

    def bind(self, batch: Batch) -> Attend:
        return bind_rows(self.like, batch, TritonPrefill, self.decode)


@dataclass(frozen=True, slots=True)
class TritonPrefill:
    batch: Batch

    def __call__(self, cache: PagedKV, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        batch = self.batch
        return paged_prefill(
            q_THA,
            cache.k_PSGA,
            cache.v_PSGA,
            batch.page_table_RM,
            batch.starts_R1,
            batch.lengths_R,
            batch.max_new,
            out_THA,
        )
