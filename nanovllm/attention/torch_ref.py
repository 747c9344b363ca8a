"""Paged attention in plain torch: the reference of all other backends, and the backend on a CPU.

Cached tokens after a row's end are read but have no effect, even if they are NaN. Unlike other
backends, this one reads the values of the batch, so that no CUDA graph can capture it.

Decision: rows are computed together if they have equally many tokens and contexts of similar
length. A group reads the length of its longest context for each row; one row of 4,000 tokens among
eight short ones made a step twenty times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from nanovllm_kernels.attention.latent_reference import dequantised
from nanovllm_kernels.fp8_reference import FP8
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.latent import Latents, attend_latents
from nanovllm.kv.layout import CacheLayout

SPARE_TOKENS = 256  # unused tokens per row that cost less than one more group


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows with N tokens each and contexts of similar lengths.

    C is the number of cached tokens: the group's longest context, rounded up to whole pages.
    """

    tokens_X: Tensor  # int64: indices of the rows' tokens in the step, row by row
    num_rows: int
    num_new: int  # N
    pages_X: Tensor  # row by row, up to the group's longest context
    seen_R1NC: Tensor  # bool: the attention mask
    # (row, token) indices of cached tokens after the rows' ends, which are undefined. Indices,
    # because filling through a mask took a quarter of a decode step.
    dirt: tuple[Tensor, ...]


class TorchPaged:
    def __init__(self, like: PagedKV) -> None:
        """`like` is a cache whose pages are as long as those of every layer."""
        self.page_tokens = like.k_PSGA.shape[1]
        self.copies = Buffer(), Buffer()

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Return None: it can always be used, but a GPU waits for the host in every step."""
        return None

    def bind(self, batch: Batch) -> TorchAttend:
        return TorchAttend(tuple(groups_of(batch, self.page_tokens)), self.copies)


@dataclass(slots=True)
class Buffer:
    """Buffer for copies of keys or values, reused in all steps.

    A new allocation of this size would come from the system, and its page faults took as long as
    the attention itself.
    """

    flat_X: Tensor = field(default_factory=lambda: torch.empty(0))

    def of(self, pages_PSGA: Tensor, chosen_X: Tensor) -> Tensor:
        """Return a contiguous copy of these pages. The next call may overwrite it."""
        if pages_PSGA.dtype == FP8:  # as bytes, since torch cannot index fp8 tensors
            return pages_PSGA.view(torch.uint8)[chosen_X].view(FP8)
        shape = len(chosen_X), *pages_PSGA.shape[1:]
        if len(self.flat_X) < math.prod(shape):
            self.flat_X = pages_PSGA.new_empty(math.prod(shape))
        copied_PSGA = self.flat_X[: math.prod(shape)].view(shape)
        return torch.index_select(pages_PSGA, 0, chosen_X, out=copied_PSGA)


def alike(counts: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Yield groups of rows that are computed together. Rows without tokens are in none."""
    group: list[int] = []
    feeding = [row for row, count in enumerate(counts) if count]
    for row in sorted(feeding, key=lambda row: (counts[row], lengths[row])):
        if group:
            longest = 2 * lengths[group[0]] + SPARE_TOKENS
            if counts[row] != counts[group[0]] or lengths[row] > longest:
                yield group
                group = []
        group.append(row)
    if group:
        yield group


def groups_of(batch: Batch, page_tokens: int) -> Iterator[RowGroup]:
    counts, lengths = batch.starts_R1.diff().tolist(), batch.lengths_R.tolist()
    for members in alike(counts, lengths):
        rows = torch.tensor(members, device=batch.lengths_R.device)
        new, lengths_R = counts[members[0]], batch.lengths_R[rows]
        num_pages = -(-lengths[members[-1]] // page_tokens)
        tokens_C = torch.arange(num_pages * page_tokens, device=lengths_R.device)
        queries_N = torch.arange(new, device=lengths_R.device)
        last_seen_RN = (lengths_R - new)[:, None] + queries_N
        yield RowGroup(
            tokens_X=(batch.starts_R1[rows][:, None] + queries_N).flatten(),
            num_rows=len(members),
            num_new=new,
            pages_X=batch.page_table_RM[rows, :num_pages].flatten(),
            seen_R1NC=(tokens_C <= last_seen_RN[:, :, None])[:, None],
            dirt=(tokens_C >= lengths_R[:, None]).nonzero(as_tuple=True),
        )


@dataclass(frozen=True, slots=True)
class TorchAttend:
    groups: tuple[RowGroup, ...]
    copies: tuple[Buffer, Buffer]

    def __call__(
        self, cache: PagedKV | Latents, q_THA: Tensor, out_THA: Tensor | None = None
    ) -> Tensor:
        attend_rows: Any = attend_in_latents if isinstance(cache, Latents) else attend
        if out_THA is None:
            out_THA = q_THA.new_empty(*q_THA.shape[:2], cache.width)
        for group in self.groups:
            out_THA[group.tokens_X] = attend_rows(group, q_THA[group.tokens_X], cache, self.copies)
        return out_THA


def attend_in_latents(
    group: RowGroup, q_THA: Tensor, cache: Latents, copies: tuple[Buffer, Buffer]
) -> Tensor:
    """Return the attention of a group's tokens over latents, row by row."""
    copied_PSX = copies[0].of(cache.pages_PSX, group.pages_X)
    rank, rotated = cache.key_HAX.shape[2], q_THA.shape[2] - cache.key_HAX.shape[1]
    rows_RCX = copied_PSX.view(group.num_rows, -1, copied_PSX.shape[2])
    latents_RCX = dequantised(rows_RCX, rank, rotated, q_THA.dtype)
    latents_RCX[group.dirt] = 0
    q_RNHA = q_THA.reshape(group.num_rows, group.num_new, *q_THA.shape[1:])
    return attend_latents(q_RNHA, latents_RCX, group.seen_R1NC, cache).flatten(0, 1)


def attend(group: RowGroup, q_THA: Tensor, cache: PagedKV, copies: tuple[Buffer, Buffer]) -> Tensor:
    """Return the attention of a group's tokens, row by row."""

    def context(pages_PSGA: Tensor, copy: Buffer, nth: int) -> Tensor:
        copied_PSGA = copy.of(pages_PSGA, group.pages_X)
        if cache.scales_2G is not None:
            copied_PSGA = (copied_PSGA.float() * cache.scales_2G[nth, :, None]).to(q_THA.dtype)
        context_RCGA = copied_PSGA.view(group.num_rows, -1, *pages_PSGA.shape[2:])
        context_RCGA[group.dirt] = 0
        return context_RCGA.transpose(1, 2)

    q_RNHA = q_THA.reshape(group.num_rows, group.num_new, *q_THA.shape[1:])
    o_RHNA = F.scaled_dot_product_attention(
        q_RNHA.transpose(1, 2),
        context(cache.k_PSGA, copies[0], 0),
        context(cache.v_PSGA, copies[1], 1),
        attn_mask=group.seen_R1NC,
        enable_gqa=True,
    )
    return o_RHNA.transpose(1, 2).flatten(0, 1)
