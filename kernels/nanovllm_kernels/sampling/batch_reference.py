"""Plain torch reference of batch_prep: a step's inputs from slots, and its results back to slots.

Shapes: N slots + 1, L positions of a slot, R rows of the step, T its tokens, S its draws, D drafts.
W is the most tokens that a decode row feeds: its latest token and D drafts. The last slot is for
padding and stays all zeros. For slot n, lengths_N[n] tokens are in the cache. Its latest token is
tokens_NL[n, lengths_N[n]], and its drafts follow that token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.sampling.reference import BLOCK_INDEX, CORRUPTED, stream_keys, uniforms

COIN_INDEX = 2 * BLOCK_INDEX  # in a position's stream; the elements before it draw the token


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
    """Return the inputs of decode rows, each of which feeds its slot's next counts_R tokens.

    The first four are token ids, positions, slot mapping and slots of `num_tokens` tokens, int64.
    The others are int32: starts_R1, lengths_R and `num_pages` columns of the page table. The counts
    are int32 and 0..width, with zeros at the end only; None means one token per row. The lengths
    include this step's tokens, and are 0 for rows that feed none. Tokens after the rows' total are
    zeros of the padding slot.
    """
    num_rows, device = len(slots_R), slots_R.device
    before_R = lengths_N[slots_R]
    if counts_R is None:
        assert (num_tokens, width) == (num_rows, 1), (num_tokens, width, num_rows)
        counts_R = torch.ones_like(before_R)
    starts_R1 = functional.pad(counts_R.cumsum(0, dtype=torch.int32), (1, 0))
    steps_T = torch.arange(num_tokens, dtype=torch.int32, device=device)
    row_T = torch.searchsorted(starts_R1[1:], steps_T, right=True)  # num_rows for padding
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
    """Update the slots in place with the step's draws and return the output, int32 [R, width].

    Row r fed its slot's tokens up to lengths_R[r]. Its draws, one after each of its last tokens,
    are tokens_S[samples_R1[r] : samples_R1[r + 1]]. These are 0 to `width` tokens; without
    samples_R1 there is one draw per row. A draw is accepted if all draws before it equal the drafts
    fed in their places. Draws after the first mismatch are discarded, and the slot's length does
    not count their drafts. An output row holds the accepted draws, then -1.

    If a row's first draw is CORRUPTED, so is its output, and its latest token becomes 0. A later
    CORRUPTED draw is not accepted, so that it becomes the first draw of the next step. Rows of
    length 0 and those of the padding slot write nothing.

    `accept`, which is (rates_D float32, seeds_N int64), replaces the comparison. Draft j is then
    accepted, right or wrong, if a coin of its slot's seed and its position is below rates_D[j].
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
    num_accepted_R1 = right_RW.long().cumprod(1).sum(1, keepdim=True)  # number of accepted drafts
    out_R1 = (num_accepted_R1 + 1).minimum(counts_R1)  # number of output tokens: these and one draw
    tokens_RW = draft_RW.where(steps_W < num_accepted_R1, drawn_RW).where(steps_W < out_R1, -1)
    newest_R = drawn_RW.take_along_dim(num_accepted_R1, 1)[:, 0].clamp(min=0)
    after_R = (before_R1 + out_R1)[:, 0]
    lengths_N[slots_R.where(lengths_R > 0, padding)] = after_R.to(torch.int32)
    drawing_R = slots_R.where(counts_R1[:, 0] > 0, padding)
    tokens_NL[drawing_R, after_R.long()] = newest_R.to(torch.int32)
    lengths_N[-1].zero_()
    tokens_NL[-1].zero_()
    return tokens_RW.to(torch.int32)
