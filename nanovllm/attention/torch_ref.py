"""Paged attention in plain torch: the definition of every other backend, and the CPU's.

Cached tokens past a row's end are read but never counted, whatever they hold: a NaN there must not
scream.
Unlike other backends this one reads the batch's values, so no CUDA graph can capture it.

Decision: rows are computed together where they feed equally many tokens and their contexts are of
similar length: a group reads as many tokens for each row as for its longest, and one row of 4,000
tokens among eight short ones made the step twenty times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from nanovllm_kernels.fp8_reference import FP8
from nanovllm_kernels.latent_reference import dequantised
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.attention.grouped import PagedKV
from nanovllm.attention.latent import Latents, attend_latents
from nanovllm.kv.layout import CacheLayout

SPARE_TOKENS = 256  # of a row: fewer cost less than a group more


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that feed equally many tokens, N each, over contexts of similar lengths.

    C counts cached tokens: the group's longest context, rounded up to whole pages.
    """

    tokens_X: Tensor  # int64: the rows' tokens in the step, N of one row after N of another
    num_rows: int
    num_new: int  # tokens each row feeds
    pages_X: Tensor  # row by row, cut to the group's longest context
    seen_R1NC: Tensor  # bool: what each query may look at
    # Rows and tokens past their ends, of undefined contents. As indices: filling through a mask
    # took a quarter of a decode step.
    dirt: tuple[Tensor, ...]


class TorchPaged:
    def __init__(self, like: PagedKV) -> None:
        """`like`: a cache of any pages, which are as long as every layer's."""
        self.page_tokens = like.k_PSGA.shape[1]
        self.copies = Buffer(), Buffer()

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Always, but a GPU waits for the host at every step."""
        return None

    def bind(self, batch: Batch) -> TorchAttend:
        return TorchAttend(tuple(groups_of(batch, self.page_tokens)), self.copies)


@dataclass(slots=True)
class Buffer:
    """Where contexts are copied to, keys or values.

    Kept from step to step: for memory of this size malloc asks the system, whose page faults took
    as long as attention.
    """

    flat_X: Tensor = field(default_factory=lambda: torch.empty(0))

    def of(self, pages_PSGA: Tensor, chosen_X: Tensor) -> Tensor:
        """These pages, one behind another. The next call may overwrite them."""
        if pages_PSGA.dtype == FP8:  # as bytes, since torch indexes no numbers of 8 bits
            return pages_PSGA.view(torch.uint8)[chosen_X].view(FP8)
        shape = len(chosen_X), *pages_PSGA.shape[1:]
        if len(self.flat_X) < math.prod(shape):
            self.flat_X = pages_PSGA.new_empty(math.prod(shape))
        copied_PSGA = self.flat_X[: math.prod(shape)].view(shape)
        return torch.index_select(pages_PSGA, 0, chosen_X, out=copied_PSGA)


def alike(counts: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Rows that are computed together: each that feeds a token is in one group."""
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
    """What the tokens of a group's rows attend to in latents, one row's after another's."""
    copied_PSX = copies[0].of(cache.pages_PSX, group.pages_X)
    rank, rotated = cache.key_HAX.shape[2], q_THA.shape[2] - cache.key_HAX.shape[1]
    rows_RCX = copied_PSX.view(group.num_rows, -1, copied_PSX.shape[2])
    latents_RCX = dequantised(rows_RCX, rank, rotated, q_THA.dtype)
    latents_RCX[group.dirt] = 0
    q_RNHA = q_THA.reshape(group.num_rows, group.num_new, *q_THA.shape[1:])
    return attend_latents(q_RNHA, latents_RCX, group.seen_R1NC, cache).flatten(0, 1)


def attend(group: RowGroup, q_THA: Tensor, cache: PagedKV, copies: tuple[Buffer, Buffer]) -> Tensor:
    """What the tokens of a group's rows attend to, one row's after another's."""

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
