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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import Batch, PagedKV
from nanovllm.kv.layout import CacheLayout

SPARE_CELLS = 256  # of a row: fewer cost less than a group more


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
    name = "torch"

    def __init__(self, caches: tuple[PagedKV, ...]) -> None:
        self.caches = caches
        self._copies_2X = torch.empty(2, 0)

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Always, but a GPU waits for the host at every step."""
        return None

    def bind(self, batch: Batch) -> TorchAttend:
        page_tokens = self.caches[0].k_PSGA.shape[1]
        groups = tuple(groups_of(batch, page_tokens))
        most_pages = max(len(group.pages_X) for group in groups)
        page_size = max(max(c.k_PSGA[0].numel(), c.v_PSGA[0].numel()) for c in self.caches)
        if self._copies_2X.shape[1] < most_pages * page_size:
            self._copies_2X = self.caches[0].k_PSGA.new_empty(2, most_pages * page_size)
        return TorchAttend(self.caches, groups, self._copies_2X)


def alike(counts: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Rows that are computed together."""
    group: list[int] = []
    for row in sorted(range(len(counts)), key=lambda row: (counts[row], lengths[row])):
        if group:
            longest = 2 * lengths[group[0]] + SPARE_CELLS
            if counts[row] != counts[group[0]] or lengths[row] > longest:
                yield group
                group = []
        group.append(row)
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
    caches: tuple[PagedKV, ...]
    groups: tuple[RowGroup, ...]
    # Where contexts are copied to, keys and values. Kept from step to step: for memory of this
    # size malloc asks the system, whose page faults took as long as attention.
    copies_2X: Tensor

    def __call__(self, layer: int, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        cache = self.caches[layer]
        o_THA = torch.empty_like(q_THA) if out_THA is None else out_THA
        for group in self.groups:
            o_THA[group.tokens_X] = attend(group, q_THA[group.tokens_X], cache, self.copies_2X)
        return o_THA


def attend(group: RowGroup, q_THA: Tensor, cache: PagedKV, copies_2X: Tensor) -> Tensor:
    def context(pages_PSGA: Tensor, copy_X: Tensor) -> Tensor:
        shape = len(group.pages_X), *pages_PSGA.shape[1:]
        copied_PSGA = copy_X[: math.prod(shape)].view(shape)
        torch.index_select(pages_PSGA, 0, group.pages_X, out=copied_PSGA)
        context_RCGA = copied_PSGA.view(group.num_rows, -1, *shape[2:])
        context_RCGA[group.dirt] = 0
        return context_RCGA.transpose(1, 2)

    q_RNHA = q_THA.reshape(group.num_rows, group.num_new, *q_THA.shape[1:])
    o_RHNA = F.scaled_dot_product_attention(
        q_RNHA.transpose(1, 2),
        context(cache.k_PSGA, copies_2X[0]),
        context(cache.v_PSGA, copies_2X[1]),
        attn_mask=group.seen_R1NC,
        enable_gqa=True,
    )
    return o_RHNA.transpose(1, 2).flatten(0, 1)
