"""What batch_prep means, in plain torch: a step's inputs from slots, and its outcome back.

Shapes: N slots + 1 (the last one is for padding and stays all zeros), L positions of a slot, R rows
of the step, T its tokens, S its draws, W the most tokens a decode row feeds: its newest known one
and D drafts. Of slot n, lengths_N[n] tokens are in the cache; the newest known one is
tokens_NL[n, lengths_N[n]], and its drafts are what stands behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.sampling_reference import BLOCK_INDEX, CORRUPTED, stream_keys, uniforms

COIN_INDEX = 2 * BLOCK_INDEX  # of a position's stream, whose elements before it draw the token


def gather_rows(
    slots_R: Tensor,
    counts_R: Tensor | None,
    lengths_N: Tensor,
    tokens_NL: Tensor,
    pages_NM: Tensor,
    page_tokens: int,
    num_pages: int,
    num_tokens: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The inputs of decode rows, each of which feeds its slot's next counts_R (0..width) tokens.

    Returns (token ids, positions, slot mapping, slots) of `num_tokens` tokens, int64, and
    (starts_R1, lengths_R, `num_pages` columns of pages), int32. counts_R is int32, its zeros are at
    the tail; None means one token each. lengths_R includes this step's tokens, and is 0 of a row
    that feeds none. Tokens past the rows' sum are zeros of the padding slot.
    """
    num_rows, device = len(slots_R), slots_R.device
    before_R = lengths_N[slots_R]
    if counts_R is None:
        assert (num_tokens, width) == (num_rows, 1), (num_tokens, width, num_rows)
        counts_R = torch.ones_like(before_R)
    starts_R1 = functional.pad(counts_R.cumsum(0, dtype=torch.int32), (1, 0))
    steps_T = torch.arange(num_tokens, dtype=torch.int32, device=device)
    row_T = torch.searchsorted(starts_R1[1:], steps_T, right=True)  # num_rows: nobody's
    slots_T = functional.pad(slots_R, (0, 1), value=len(lengths_N) - 1)[row_T]
    positions_T = lengths_N[slots_T].long() + steps_T - starts_R1[row_T]
    positions_T = positions_T.where(row_T < num_rows, 0)
    pages_T = pages_NM[slots_T, positions_T // page_tokens].long()
    return (
        tokens_NL[slots_T, positions_T].long(),
        positions_T,
        pages_T * page_tokens + positions_T % page_tokens,
        slots_T,
        starts_R1,
        (before_R + counts_R).where(counts_R > 0, 0),
        pages_NM[slots_R, :num_pages],
    )


def write_back(
    slots_R: Tensor,
    lengths_R: Tensor,
    samples_R1: Tensor | None,
    tokens_S: Tensor,
    lengths_N: Tensor,
    tokens_NL: Tensor,
    width: int,
    accept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The step's outcome into the slots, in place, and the tokens that came out, int32 [R, width].

    Row r fed its slot's tokens up to lengths_R[r], and drew tokens_S[samples_R1[r] :
    samples_R1[r + 1]], 0 to `width` of them, one behind each of its last tokens; samples_R1 None
    means one draw each. A draw stands if all before it equal the drafts that were fed in their
    places; what follows the first other one is forgotten, length and all. A line holds the draws
    that stand, then -1. A row whose first draw is CORRUPTED has that in its line and 0 as its
    newest token; a later CORRUPTED draw does not stand, so that the next step meets it first.
    Rows of length 0 and those of the padding slot write nothing.

    `accept`, which is (rates_D float32, seeds_N int64), replaces the comparison: the j-th draft
    comes out, right or wrong, if a coin of its slot's seed and its position is below rates_D[j].
    """
    padding, steps_W = len(lengths_N) - 1, torch.arange(width, device=slots_R.device)
    if samples_R1 is None:
        samples_R1 = torch.arange(len(slots_R) + 1, device=slots_R.device)
    counts_R1 = (samples_R1.diff() * (lengths_R > 0))[:, None]
    before_R1 = lengths_R[:, None] - counts_R1
    drawn_RW = functional.pad(tokens_S, (0, width))[samples_R1[:-1, None] + steps_W]
    at_RW = (before_R1 + 1 + steps_W).clamp(max=tokens_NL.shape[1] - 1)
    draft_RW = tokens_NL[slots_R[:, None], at_RW]
    if accept is None:
        right_RW = drawn_RW == draft_RW
    else:
        rates_D, seeds_N = accept
        keys_RW = stream_keys(seeds_N[slots_R, None], at_RW)
        coins_RW = uniforms(keys_RW, torch.full_like(keys_RW, COIN_INDEX))
        right_RW = coins_RW < functional.pad(rates_D, (0, 1))[:width]
    right_RW &= (drawn_RW >= 0) & (drawn_RW.roll(-1, 1) != CORRUPTED) & (steps_W < counts_R1 - 1)
    kept_R1 = right_RW.long().cumprod(1).sum(1, keepdim=True)  # drafts that come out
    out_R1 = (kept_R1 + 1).minimum(counts_R1)  # tokens that do: these and one draw
    lines_RW = draft_RW.where(steps_W < kept_R1, drawn_RW).where(steps_W < out_R1, -1)
    newest_R = drawn_RW.take_along_dim(kept_R1, 1)[:, 0].clamp(min=0)
    after_R = (before_R1 + out_R1)[:, 0]
    lengths_N[slots_R.where(lengths_R > 0, padding)] = after_R.to(torch.int32)
    drawing_R = slots_R.where(counts_R1[:, 0] > 0, padding)
    tokens_NL[drawing_R, after_R.long()] = newest_R.to(torch.int32)
    lengths_N[-1].zero_()
    tokens_NL[-1].zero_()
    return lines_RW.to(torch.int32)
