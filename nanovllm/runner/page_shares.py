"""Shares of P's pages and recurrent states for a decode server with any number of ranks.

A rank of D has some of the heads. If D has as many ranks as P, its share is the page or state of
the same rank of P. Otherwise rank 0 of P takes the heads of the share from those of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.kv.split import HOST_ALIGNED
from nanovllm.parallel.mesh import Mesh
from nanovllm.runner.state_rows import RowPart, StateRow
from nanovllm.runner.transfer import HostPages, bytes_of_page
from nanovllm.transfer.shares import OtherRank, Span


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
    def state(self, checkpoint: int, spans: Sequence[Span]) -> memoryview:
        """Return the bytes of spans of a state that does not change any more, joined.

        After the end of the state there are zeros.
        """
        state = self._pages.state(checkpoint)
        num_bytes = sum(count for _, count in spans)
        row, at = torch.zeros(num_bytes, dtype=torch.uint8, device=state.device), 0
        for start, count in spans:
            own = state[start : start + count]
            row[at : at + len(own)].copy_(own)
            at += count
        return memoryview(row.cpu().numpy().data)


@dataclass(frozen=True, slots=True)
class PageShares:
    """Reader of any share. `others` are the pages of ranks 1, 2, ... of P.

    `num_heads` are the model's heads in each of the caches' tensors that have bytes. `state_row` is
    the layout of a recurrent state with all heads; None without states.
    """

    pages: HostPages
    num_heads: Sequence[int]
    others: Sequence[OtherRank] = ()
    state_row: StateRow | None = None

    def page(self, page: int, share: int, shares: int) -> memoryview:
        """Return the bytes of a page for rank `share` of `shares`. Raise OSError without a rank."""
        if shares == self.num_ranks:
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

    def page_bytes(self, shares: int) -> int:
        """Return the bytes of a page on each of `shares` ranks."""
        num_heads = [len(heads_of(0, shares, whole)) for whole in self.num_heads]
        return bytes_of_page(self.pages.tensors, num_heads)

    def state_parts(self, shares: int) -> int:
        """Return the number of parts of a state on each of `shares` ranks, each a page's length."""
        if self.state_row is None:
            return 0
        return -(-self.state_row.cut(shares).num_bytes // self.page_bytes(shares))

    def state(self, checkpoint: int, parts: range, share: int, shares: int) -> memoryview:
        """Return the bytes of parts of a checkpoint, joined. Raise OSError without a rank.

        The parts are those of a rank of D, each as long as a page there. Each rank of P is read
        once.
        """
        size = self.page_bytes(shares)
        begin, end = parts.start * size, parts.stop * size
        if shares == self.num_ranks:
            return self._rank(share).state(checkpoint, [(begin, end - begin)])
        assert self.state_row is not None
        pieces: dict[int, list[RowPart]] = {}
        for part in self.state_row.parts(share, shares, self.num_ranks):
            if (piece := part.within(begin, end)) is not None:
                pieces.setdefault(part.rank, []).append(piece)
        row = np.zeros(end - begin, np.uint8)
        for rank, own in pieces.items():
            spans = [(piece.there, piece.num_bytes) for piece in own]
            data, at = np.frombuffer(self._rank(rank).state(checkpoint, spans), np.uint8), 0
            for piece in own:
                start = piece.here - begin
                row[start : start + piece.num_bytes] = data[at : at + piece.num_bytes]
                at += piece.num_bytes
        return memoryview(row.data)

    @property
    def num_ranks(self) -> int:
        return 1 + len(self.others)

    def _rank(self, rank: int) -> PageReader | OtherRank:
        return self.others[rank - 1] if rank else PageReader(self.pages)

    def _places(self, share: int, shares: int, whole: int) -> list[tuple[int, int]]:
        """Return the rank of P, and the place among its heads, for each head of a share."""
        spans = [heads_of(rank, self.num_ranks, whole) for rank in range(self.num_ranks)]
        return [
            next((rank, span.index(head)) for rank, span in enumerate(spans) if head in span)
            for head in heads_of(share, shares, whole)
        ]


def heads_of(rank: int, ranks: int, whole: int) -> range:
    """Return the heads of a rank. Raise ConfigError if the ranks cannot share them."""
    span = Mesh(rank, ranks).span_or_copy("num_key_value_heads", whole)
    return range(span.start, span.start + span.count)
