"""Attention of prompt chunks by flash-attn-4; decode rows go to our own kernel.

Decision: that package has no fp8 caches on Hopper, so for a chunk its rows' pages are widened to 16
bits in a scratch, which all layers share. For 16 prompts of 4,000 tokens, 32 heads over 8, that
moves 0.4 GB a layer, about 0.1 ms of 3.5 ms of attention, which paged_prefill, made for such a
cache, takes twice as long for; for 256 tokens behind 32,768 it is 0.05 of 0.25 ms. The scratch is
bounded: rows go through it some at a time, and to paged_prefill where one row's context could
exceed it. `check-kernels --kernel widen_pages --kernel paged_prefill` measures both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from nanovllm_kernels import paged_decode as triton_decode
from nanovllm_kernels.device import is_hopper
from nanovllm_kernels.paged_prefill import paged_prefill
from nanovllm_kernels.widen_pages import widen_pages
from torch import Tensor

from nanovllm.attention.base import Attend, Batch
from nanovllm.attention.grouped import FP8, PagedKV
from nanovllm.attention.paged import DecodeKernel, RowsAttend, bind_rows, obstacle_of_shapes
from nanovllm.kv.layout import CacheLayout

MAX_HEAD_SIZE = 256
SCRATCH_BYTES = 512 << 20  # 131,072 tokens of 8 key/value heads of 128


class FlashPaged:
    name = "flash"

    def __init__(self, like: PagedKV, decode: DecodeKernel = triton_decode) -> None:
        """`like`: a cache of any pages, of every layer's shape and dtype."""
        self.like = like
        self.decode = decode
        self.scratch: Tensor | None = None  # of an fp8 cache's pages in 16 bits, once it is needed

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Why not, or None."""
        if not is_hopper(device):
            return "flash-attn-4 is used on Hopper GPUs only"
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            return "the package flash-attn-4 is not installed"
        for group in layout.paged:
            if group.bytes_per_element > 2:
                return "flash-attn-4 computes in bfloat16; the cache is wider"
            if max(group.k_size, group.v_size) > MAX_HEAD_SIZE or group.k_size % 16:
                return f"head size {group.k_size} is not a multiple of 16 up to {MAX_HEAD_SIZE}"
        return obstacle_of_shapes(layout)

    def bind(self, batch: Batch) -> Attend:
        return bind_rows(self.like, batch, self._bind_chunks, self.decode)

    def _bind_chunks(self, batch: Batch) -> Attend:
        from nanovllm_kernels.flash_prefill import flash_prefill  # imports CuTe DSL, for seconds

        rows = batch.page_table_RM, batch.starts_R1, batch.lengths_R
        if self.like.k_PSGA.dtype != FP8:
            return RowsAttend(flash_prefill, rows)
        page_shape, device = self.like.k_PSGA.shape[1:], batch.lengths_R.device
        if self.scratch is None:
            num_pages = SCRATCH_BYTES // (2 * 2 * page_shape.numel())
            shape = 2, num_pages, *page_shape
            self.scratch = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        starts_M = torch.arange(
            0, batch.max_length, page_shape[0], dtype=torch.int32, device=device
        )
        at_once = (self.scratch.shape[1] - 1) // len(starts_M)
        if at_once == 0:
            return RowsAttend(paged_prefill, (*rows, batch.max_new))
        # Entries past a row's end are page 0, which nobody writes.
        nth_R = torch.arange(batch.num_rows, dtype=torch.int32, device=device) % at_once
        pages_RM = 1 + nth_R[:, None] * len(starts_M) + starts_M // page_shape[0]
        table_RM = pages_RM.where(starts_M < batch.lengths_R[:, None], 0)
        return WidenedAttend(flash_prefill, self.scratch, table_RM, rows, at_once)


@dataclass(frozen=True, slots=True)
class WidenedAttend:
    """Attention over an fp8 cache by a kernel of 16 bits, of some rows after others."""

    kernel: Callable[..., Tensor]
    scratch_2PSGA: Tensor
    table_RM: Tensor  # of pages in the scratch
    rows: tuple[Tensor, Tensor, Tensor]
    at_once: int  # rows

    def __call__(self, cache: PagedKV, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        o_THA = torch.empty_like(q_THA) if out_THA is None else out_THA
        k_PSGA, v_PSGA, scales_2G = cache
        assert scales_2G is not None
        page_table_RM, starts_R1, lengths_R = self.rows
        num_rows, most_pages = self.table_RM.shape
        for first in range(0, num_rows, self.at_once):
            some = slice(first, first + self.at_once)
            pages = page_table_RM[some, :most_pages], lengths_R[some]
            k, v = widen_pages(k_PSGA, v_PSGA, scales_2G, *pages, self.scratch_2PSGA)
            starts = starts_R1[first : first + self.at_once + 1]
            self.kernel(q_THA, k, v, self.table_RM[some], starts, lengths_R[some], o_THA)
        return o_THA
