"""Attention of prompt chunks by flash-attn-4, and of decode rows by our own kernel.

Decision: the package has no fp8 caches on Hopper, so chunks over such a cache use paged_prefill.
Nor does it divide a chunk's keys over multiprocessors on Hopper. So short chunks over long contexts
use paged_prefill, too.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from nanovllm_kernels.attention.paged_decode import DECODE as TRITON_DECODE, DecodeKernel
from nanovllm_kernels.device import is_hopper
from nanovllm_kernels.fp8_reference import FP8

from nanovllm.attention.base import Attend, Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.latent_rows import bind_latents
from nanovllm.attention.paged import ChunksAttend, RowsAttend, bind_rows, obstacle_of_shapes
from nanovllm.kv.layout import CacheKind, CacheLayout

MAX_HEAD_SIZE = 256


class FlashPaged:
    def __init__(
        self, like: PagedKV, decode: DecodeKernel = TRITON_DECODE, kind: CacheKind = "grouped"
    ) -> None:
        """`like` is a cache with the shape and dtype of every layer's; its pages do not matter.

        `decode` is a kernel for caches of this kind.
        """
        self.like = like
        self.decode = decode
        self.kind = kind

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Return the reason why this backend cannot be used, or None."""
        if not is_hopper(device):
            return "flash-attn-4 is used on Hopper GPUs only"
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            return "the package flash-attn-4 is not installed"
        for group in layout.paged:
            if group.kind == "latent":
                continue  # expanded keys and values may have any sizes
            if group.bytes_per_element > 2:
                return "flash-attn-4 computes in bfloat16; the cache is wider"
            if max(group.k_size, group.v_size) > MAX_HEAD_SIZE or group.k_size % 16:
                return f"head size {group.k_size} is not a multiple of 16 up to {MAX_HEAD_SIZE}"
        return obstacle_of_shapes(layout)

    def bind(self, batch: Batch) -> Attend:
        if self.kind == "latent":
            return bind_latents(batch, self.like.k_PSGA.shape[1], self.decode, expands=True)
        return bind_rows(self.like, batch, self._bind_chunks, self.decode)

    def _bind_chunks(self, batch: Batch) -> Attend:
        from nanovllm_kernels.attention.flash_prefill import (
            flash_prefill,  # imports CuTe DSL (seconds)
        )

        if self.like.k_PSGA.dtype == FP8:
            return ChunksAttend(batch)
        rows = batch.page_table_RM, batch.starts_R1, batch.lengths_R
        return ChunksAttend(batch, whole=RowsAttend(flash_prefill, rows))
