"""Paged attention by our own kernels: in Triton the portable GPU path, and every backend's decode.

Knows shapes and launches; the arithmetic is in nanovllm_kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from nanovllm_kernels import paged_decode as triton_decode
from nanovllm_kernels.paged_decode import INTERPRETED
from nanovllm_kernels.paged_prefill import paged_prefill
from torch import Tensor

from nanovllm.attention.base import Attend, Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.kv.layout import CacheLayout

MAX_HEAD_SIZE = 256
DecodeKernel = ModuleType  # with the functions of nanovllm_kernels.paged_decode, meaning the same
CUTE_ROWS = range(9, 129)  # for which the CuTe DSL kernel is the faster one


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


def obstacle_of_shapes(layout: CacheLayout) -> str | None:
    """Why decode rows are not for our own kernel, or None."""
    if len({(group.num_heads, group.k_size, group.v_size) for group in layout.paged}) != 1:
        return "one plan serves all layers, so their caches must have one shape"
    return None


def bind_rows(
    like: PagedKV,
    batch: Batch,
    bind_chunks: Callable[[Batch], Attend],
    kernel: DecodeKernel,
) -> Attend:
    """Decode rows to our own kernel, prompt chunks to the backend's."""
    at, width = batch.num_decodes, batch.decode_width
    if at == 0:
        return bind_chunks(batch)
    if at not in CUTE_ROWS or (width > 1 and width > kernel.MAX_WIDTH):
        kernel = triton_decode
    rows = batch.decodes()
    plan = kernel.plan_decode(rows.lengths_R, like.k_PSGA)
    paged_decode = kernel.paged_decode
    if width > 1:
        paged_decode = partial(paged_decode, starts_R1=rows.starts_R1, width=width)
    decode = Decode(paged_decode, rows.page_table_RM, rows.lengths_R, plan)
    if at == batch.num_rows:
        return decode
    return Both(decode, bind_chunks(batch.chunks()), batch.num_decode_tokens)


@dataclass(frozen=True, slots=True)
class Decode:
    kernel: Callable[..., Tensor]
    page_table_RM: Tensor
    lengths_R: Tensor
    plan: Any

    def __call__(self, cache: PagedKV, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        return self.kernel(
            q_THA,
            cache.k_PSGA,
            cache.v_PSGA,
            self.page_table_RM,
            self.lengths_R,
            self.plan,
            out_THA,
        )


@dataclass(frozen=True, slots=True)
class Both:
    """Of a step with decode rows, whose tokens come first, and prompt chunks."""

    decode: Decode
    chunks: Attend
    num_decode_tokens: int

    def __call__(self, cache: PagedKV, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        o_THA = self.chunks(cache, q_THA, out_THA)
        at = self.num_decode_tokens
        self.decode(cache, q_THA[:at], o_THA[:at])
        return o_THA


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
