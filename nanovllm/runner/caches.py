"""Keys and values on the device, and the operations of a plan on whole pages.

Decision: all layers of a group are in one tensor, so that one launch fills or copies a page of all
layers. A layer's view of it is contiguous, as attention requires.
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
    by_layer: dict[int, PagedKV]  # the layers' views of `tensors`

    def apply(self, plan: StepPlan) -> None:
        """Zero the pages of plan.clean, then do plan.copies, all of which read before any writes.

        Earlier reads of these pages are already in the stream. Do not wait.
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
    """Return zero-filled caches of `num_pages` pages and the padding page 0.

    A bulk load of a request's last page also reads tokens after its end, with a weight of 0, and 0
    times NaN is NaN. Hence the zeros, and hence pages that may contain NaN are zeroed before reuse.
    """
    tensors: list[Tensor] = []
    caches: dict[int, PagedKV] = {}
    for group in layout.paged:
        made, by_layer = caches_of(group, num_pages + 1, page_tokens, dtype, device=device)
        tensors += made
        caches |= by_layer
    return Caches(tuple(tensors), caches)
