"""Shares of P's pages for a decode server with any number of ranks.

A rank of D has some of the key/value heads. If D has as many ranks as P, its share is the page of
the same rank of P. Otherwise rank 0 of P takes the heads of the share from its ranks' pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.kv.split import HOST_ALIGNED
from nanovllm.parallel.mesh import Mesh
from nanovllm.runner.transfer import HostPages
from nanovllm.transfer.shares import OtherRank


class PageReader:
    """Reader of this rank's pages and states from the device, for threads of a page server."""

    def __init__(self, pages: HostPages) -> None:
        self._pages = pages

    @torch.inference_mode()
    def page(self, page: int) -> memoryview:
        """Return the bytes of a page whose content does not change any more."""
        pages = self._pages
        row = torch.zeros(pages.page_bytes, dtype=torch.uint8, device=pages.device)
        for own, part in pages.parts(row, page):
            own.copy_(part)
        return memoryview(row.cpu().numpy().data)

    @torch.inference_mode()
    def state(self, checkpoint: int, part: int) -> memoryview:
        """Return one part of a state that does not change any more, as long as a page."""
        row = torch.zeros(self._pages.page_bytes, dtype=torch.uint8)
        own = self._pages.state_part(checkpoint, part)
        row[: len(own)].copy_(own)
        return memoryview(row.numpy().data)


@dataclass(frozen=True, slots=True)
class PageShares:
    """Reader of any share. `others` are the pages of ranks 1, 2, ... of P.

    `num_heads` are the model's heads in each of the caches' tensors that have bytes.
    """

    pages: HostPages
    num_heads: Sequence[int]
    others: Sequence[OtherRank] = ()

    def page(self, page: int, share: int, shares: int) -> memoryview:
        """Return the bytes of a page for rank `share` of `shares`. Raise OSError without a rank."""
        if shares == 1 + len(self.others):
            return self._rank(share).page(page)
        rows: dict[int, memoryview] = {}
        parts, start = [], 0
        for tensor, whole in zip(self.pages.tensors, self.num_heads, strict=True):
            layers, _, tokens, own, size = tensor.shape
            num_bytes = layers * tokens * own * size * tensor.itemsize
            heads = []
            for rank, at in self._places(share, shares, whole):
                if rank not in rows:
                    rows[rank] = self._rank(rank).page(page)
                part = np.frombuffer(rows[rank], np.uint8, num_bytes, start)
                heads.append(part.reshape(layers * tokens, own, -1)[:, at])
            parts.append(np.stack(heads, 1).reshape(-1))
            start += num_bytes
        row = np.concatenate(parts)
        return memoryview(np.pad(row, (0, -len(row) % HOST_ALIGNED)).data)

    def state(self, checkpoint: int, part: int, share: int, shares: int) -> memoryview:
        """Return the bytes of a checkpoint's part, of a share that one rank of P has."""
        assert shares == 1 + len(self.others)  # the layouts differ otherwise
        return self._rank(share).state(checkpoint, part)

    def _rank(self, rank: int) -> PageReader | OtherRank:
        return self.others[rank - 1] if rank else PageReader(self.pages)

    def _places(self, share: int, shares: int, whole: int) -> list[tuple[int, int]]:
        """Return the rank of P, and the place among its heads, for each head of a share."""
        ranks = 1 + len(self.others)
        spans = [heads_of(rank, ranks, whole) for rank in range(ranks)]
        return [
            next((rank, span.index(head)) for rank, span in enumerate(spans) if head in span)
            for head in heads_of(share, shares, whole)
        ]


def heads_of(rank: int, ranks: int, whole: int) -> range:
    """Return the heads of a rank. Raise ConfigError if the ranks cannot share them."""
    span = Mesh(rank, ranks).span_or_copy("num_key_value_heads", whole)
    return range(span.start, span.start + span.count)
