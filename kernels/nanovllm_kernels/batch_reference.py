"""What batch_prep means, in plain torch: a step's inputs from slots, and its outcome back."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_decode(
    slots_R: Tensor,
    lengths_N: Tensor,
    tokens_NL: Tensor,
    pages_NM: Tensor,
    page_tokens: int,
    num_pages: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(token ids, positions, slot mapping) int64, (lengths, `num_pages` columns of pages) int32."""
    before_R = lengths_N[slots_R]
    positions_R = before_R.long()
    pages_R = pages_NM[slots_R, positions_R // page_tokens].long()
    return (
        tokens_NL[slots_R, positions_R].long(),
        positions_R,
        pages_R * page_tokens + positions_R % page_tokens,
        before_R + 1,
        pages_NM[slots_R, :num_pages],
    )


def write_back(
    slots_R: Tensor,
    lengths_R: Tensor,
    slots_S: Tensor,
    positions_S: Tensor,
    tokens_S: Tensor,
    lengths_N: Tensor,
    tokens_NL: Tensor,
) -> None:
    """In place: the rows' new lengths, and each sampled token at its position, 0 if CORRUPTED.

    The last slot is for padding: it stays all zeros, whatever its rows, which only pad a graph,
    drew.
    """
    lengths_N.index_copy_(0, slots_R, lengths_R)
    at_S = slots_S * tokens_NL.shape[1] + positions_S
    tokens_NL.view(-1).index_copy_(0, at_S, tokens_S.clamp(min=0).to(torch.int32))
    lengths_N[-1].zero_()
    tokens_NL[-1].zero_()
