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

from nanovllm.attention.base import Attend, Batch, PagedKV
from nanovllm.kv.layout import CacheLayout

MAX_HEAD_SIZE = 256
DecodeKernel = ModuleType  # with the functions of nanovllm_kernels.paged_decode, meaning the same
CUTE_ROWS = range(9, 129)  # for which the CuTe DSL kernel is the faster one


class TritonPaged:
    name = "triton"

    def __init__(self, caches: tuple[PagedKV, ...], decode: DecodeKernel = triton_decode) -> None:
        self.caches = caches
        self.decode = decode

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Why not, or None."""
        if device.type != "cuda" and not INTERPRETED:
            return f"Triton's kernels run on a GPU, not on {device.type}"
        if len({(group.num_heads, group.k_size, group.v_size) for group in layout.paged}) != 1:
            return "one plan serves all layers, so their caches must have one shape"
        group = layout.paged[0]
        if group.k_size != group.v_size or group.k_size > MAX_HEAD_SIZE:
            return f"keys and values must be equally wide, at most {MAX_HEAD_SIZE}"
        return None

    def bind(self, batch: Batch) -> Attend:
        return bind_rows(self.caches, batch, partial(TritonPrefill, self.caches), self.decode)


def bind_rows(
    caches: tuple[PagedKV, ...],
    batch: Batch,
    bind_chunks: Callable[[Batch], Attend],
    kernel: DecodeKernel,
) -> Attend:
    """Decode rows to our own kernel, prompt chunks to the backend's."""
    at = batch.num_decodes
    if at == 0:
        return bind_chunks(batch)
    rows = batch.rows(0, at)
    kernel = kernel if at in CUTE_ROWS else triton_decode
    decode = Decode(caches, rows, kernel, kernel.plan_decode(rows.lengths_R, caches[0].k_PSGA))
    if at == batch.num_rows:
        return decode
    return Both(decode, bind_chunks(batch.rows(at, batch.num_rows)))


@dataclass(frozen=True, slots=True)
class Decode:
    caches: tuple[PagedKV, ...]
    batch: Batch
    kernel: DecodeKernel
    plan: Any

    def __call__(self, layer: int, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        cache, batch = self.caches[layer], self.batch
        rows = batch.page_table_RM, batch.lengths_R, self.plan
        o_THA: Tensor = self.kernel.paged_decode(q_THA, cache.k_PSGA, cache.v_PSGA, *rows, out_THA)
        return o_THA


@dataclass(frozen=True, slots=True)
class Both:
    """Of a step with decode rows, which come first, and prompt chunks."""

    decode: Decode
    chunks: Attend

    def __call__(self, layer: int, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        o_THA = self.chunks(layer, q_THA, out_THA)
        at = self.decode.batch.num_rows
        self.decode(layer, q_THA[:at], o_THA[:at])
        return o_THA


@dataclass(frozen=True, slots=True)
class TritonPrefill:
    caches: tuple[PagedKV, ...]
    batch: Batch

    def __call__(self, layer: int, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        cache, batch = self.caches[layer], self.batch
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
