"""Paged attention by our own kernels in Triton: the portable GPU path."""

from __future__ import annotations

import torch
from nanovllm_kernels.attention.paged_decode import DECODE as TRITON_DECODE, DecodeKernel
from nanovllm_kernels.triton_parts import INTERPRETED

from nanovllm.attention.base import Attend, Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.latent_rows import bind_latents
from nanovllm.attention.paged import ChunksAttend, bind_rows, obstacle_of_shapes
from nanovllm.kv.layout import CacheKind, CacheLayout

MAX_HEAD_SIZE = 256


class TritonPaged:
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
        if device.type != "cuda" and not INTERPRETED:
            return f"Triton's kernels run on a GPU, not on {device.type}"
        group = layout.paged[0]
        if group.kind == "latent":
            return obstacle_of_shapes(layout)
        if group.k_size != group.v_size or group.k_size > MAX_HEAD_SIZE:
            return f"keys and values must be equally wide, at most {MAX_HEAD_SIZE}"
        return obstacle_of_shapes(layout)

    def bind(self, batch: Batch) -> Attend:
        if self.kind == "latent":
            return bind_latents(batch, self.like.k_PSGA.shape[1], self.decode, expands=False)
        return bind_rows(self.like, batch, ChunksAttend, self.decode)
