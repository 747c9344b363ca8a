"""Keys and values on the device, and what a plan asks of whole pages. Knows layouts, no requests.

Decision: all layers of a group lie in one tensor, so that a page of all of them is filled or copied
by one launch. A layer's part of it is contiguous: attention sees no difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.grouped import PagedKV, caches_of
from nanovllm.kv.layout import CacheLayout
from nanovllm.plan import StepPlan
from nanovllm.runner.upload import upload_together


@dataclass(frozen=True, slots=True)
class Caches:
    tensors: tuple[Tensor, ...]  # keys, then values, of each group: [L, P, S, G, A]
    by_layer: dict[int, PagedKV]  # views of these, each to be its layer's own

    def apply(self, plan: StepPlan) -> None:
        """Zeros into the pages of plan.clean, then plan.copies, which all read before any writes.

        Whoever read these pages is behind us on the stream. Never waits.
        """
        if not plan.clean and not plan.copies:
            return
        sources, targets = [src for src, _ in plan.copies], [dst for _, dst in plan.copies]
        lists = [np.array(pages, np.int32) for pages in (plan.clean, sources, targets)]
        sent = upload_together(lists, self.tensors[0].device)
        clean_P, sources_P, targets_P = (pages_P.long() for pages_P in sent)
        for pages_LPSGA in self.tensors:
            if plan.clean:
                pages_LPSGA.index_fill_(1, clean_P, 0)
            if plan.copies:
                pages_LPSGA.index_copy_(1, targets_P, pages_LPSGA.index_select(1, sources_P))


def make_caches(
    layout: CacheLayout,
    num_pages: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Caches:
    """Zero-filled caches with the padding page 0 besides `num_pages`.

    Zeros, because a bulk copy of a request's last page also reads the tokens past its end, and a
    weight of 0 times NaN is NaN. For the same reason a page that may hold NaN is cleaned.
    """
    tensors: list[Tensor] = []
    caches: dict[int, PagedKV] = {}
    for group in layout.paged:
        made, by_layer = caches_of(group, num_pages + 1, page_tokens, dtype, device)
        tensors += made
        caches |= by_layer
    return Caches(tuple(tensors), caches)
