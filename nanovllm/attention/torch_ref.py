"""Paged attention in plain torch: the definition of every other backend, and the CPU's.

Cells past a row's end are read but never counted, whatever they hold: a NaN there must not scream.
Unlike other backends this one reads the batch's values, so no CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import Batch, PagedKV
from nanovllm.kv.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Neighbouring rows that feed equally many tokens, N each; all decode rows are one group.

    C counts cells: the group's longest context, rounded up to whole pages.
    """

    num_rows: int
    num_new: int  # tokens each row feeds
    pages_RM: Tensor  # int64, cut to the group's longest context
    seen_R1NC: Tensor  # bool: what each query may look at
    # Rows and cells past their ends, of undefined contents. As indices: filling through a mask
    # took a quarter of a decode step.
    dirt: tuple[Tensor, ...]


class TorchPaged:
    name = "torch"

    def __init__(self, caches: tuple[PagedKV, ...]) -> None:
        self.caches = caches

    @staticmethod
    def supports(device: torch.device, layout: CacheLayout, page_tokens: int) -> str | None:
        """Always, but a GPU waits for the host at every step."""
        return None

    def bind(self, batch: Batch) -> TorchAttend:
        page_tokens = self.caches[0].k_PSGA.shape[1]
        return TorchAttend(self.caches, tuple(groups_of(batch, page_tokens)))


def groups_of(batch: Batch, page_tokens: int) -> Iterator[RowGroup]:
    counts_R = batch.starts_R1.diff()
    at = 0
    for new, same in groupby(counts_R.tolist()):
        num_rows = len(list(same))
        rows = slice(at, at + num_rows)
        at += num_rows
        lengths_R = batch.lengths_R[rows]
        num_pages = -(-int(lengths_R.max()) // page_tokens)
        cells_C = torch.arange(num_pages * page_tokens, device=lengths_R.device)
        queries_N = torch.arange(new, device=lengths_R.device)
        last_seen_RN = (lengths_R - new)[:, None] + queries_N
        yield RowGroup(
            num_rows=num_rows,
            num_new=new,
            pages_RM=batch.page_table_RM[rows, :num_pages].long(),
            seen_R1NC=(cells_C <= last_seen_RN[:, :, None])[:, None],
            dirt=(cells_C >= lengths_R[:, None]).nonzero(as_tuple=True),
        )


@dataclass(frozen=True, slots=True)
class TorchAttend:
    caches: tuple[PagedKV, ...]
    groups: tuple[RowGroup, ...]

    def __call__(self, layer: int, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        cache = self.caches[layer]
        queries = torch.split(q_THA, [group.num_rows * group.num_new for group in self.groups])
        pairs = zip(self.groups, queries, strict=True)
        return torch.cat([attend(group, q_THA, cache) for group, q_THA in pairs], out=out_THA)


def attend(group: RowGroup, q_THA: Tensor, cache: PagedKV) -> Tensor:
    def context(pages_PSGA: Tensor) -> Tensor:
        cells_RCGA = pages_PSGA[group.pages_RM].flatten(1, 2)  # a copy
        cells_RCGA[group.dirt] = 0
        return cells_RCGA.transpose(1, 2)

    q_RNHA = q_THA.reshape(group.num_rows, group.num_new, *q_THA.shape[1:])
    o_RHNA = F.scaled_dot_product_attention(
        q_RNHA.transpose(1, 2),
        context(cache.k_PSGA),
        context(cache.v_PSGA),
        attn_mask=group.seen_R1NC,
        enable_gqa=True,
    )
    return o_RHNA.transpose(1, 2).flatten(0, 1)
