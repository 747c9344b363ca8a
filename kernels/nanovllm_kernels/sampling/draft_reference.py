"""Plain torch reference of draft_rows: the inputs of a draft model's passes, from slots.

Shapes: N slots + 1, L positions of a slot, R rows, T tokens of a first pass, X = 1 + the number of
drafts. The last slot is for padding and stays all zeros. After a step's tokens were written back,
slot n has its latest token at tokens_NL[n, lengths_N[n]]. Its drafts follow that token.

The token at index p of a text goes to position p - lag of the draft model. Positions from
`max_tokens` on are beyond the longest request, and `pages_NM` has no column for some of them. Such
a token has the last position instead, and its key and value go to page 0, the padding page.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def first_rows(
    slots_R: Tensor,
    starts_R1: Tensor,
    lengths_R: Tensor,
    lengths_N: Tensor,
    tokens_NL: Tensor,
    pages_NM: Tensor,
    lag: int,
    page_tokens: int,
    max_tokens: int,
    num_pages: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of a first pass, whose rows have 1 - lag more tokens than the step's.

    `slots_R`, `starts_R1` and `lengths_R` are the step's rows: its token starts_R1[r] is at
    position lengths_R[r] - (starts_R1[r + 1] - starts_R1[r]). A first pass feeds the texts' tokens
    from this position + lag on.

    Int64: token ids, positions, slot mapping and slots of `num_tokens` tokens. Int32: starts_R1 and
    lengths_R of the first pass. Int64 [R]: the indices in T of the tokens whose states predict
    draft 1, and the index of draft 1 in its text. Int32: `num_pages` columns of the page table.
    Tokens after the last row are zeros of the padding slot.
    """
    num_rows, device = len(slots_R), slots_R.device
    before_R = lengths_R - starts_R1.diff()
    starts_R1 = starts_R1 + (1 - lag) * torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    token_T = torch.arange(num_tokens, dtype=torch.int32, device=device)
    row_T = torch.searchsorted(starts_R1[1:], token_T, right=True)  # num_rows for padding
    slots_T = functional.pad(slots_R, (0, 1), value=len(lengths_N) - 1)[row_T]
    offsets_T = functional.pad(before_R, (0, 1))[row_T] + token_T - starts_R1[row_T]
    positions_T = offsets_T.where(row_T < num_rows, 0).long()
    latest_R = lengths_N[slots_R]
    sampled_R = starts_R1[:-1] + latest_R - lag - before_R
    return (
        tokens_NL[slots_T, positions_T + lag].long(),
        *placed(slots_T, positions_T, pages_NM, page_tokens, max_tokens),
        slots_T,
        starts_R1,
        (lengths_R + 1 - lag).clamp(max=max_tokens),
        sampled_R.long().clamp(0, num_tokens - 1),  # of no token if the row feeds none
        latest_R.long() + 1,
        pages_NM[slots_R, :num_pages],
    )


def later_rows(
    slots_R: Tensor,
    drawn_R: Tensor,
    nth: int,
    lengths_N: Tensor,
    tokens_NL: Tensor,
    pages_NM: Tensor,
    drafts_RX: Tensor,
    lag: int,
    page_tokens: int,
    max_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Store draft `nth` of each row, and return the inputs of the pass that feeds it.

    The draft is drawn_R, or 0 where that is negative. It is written to tokens_NL after `nth` - 1
    other drafts, except for the padding slot, and to drafts_RX[:, nth]. drafts_RX[:, 0] becomes the
    number of the row's drafts, 0 for the padding slot.

    Int64: token ids, positions and slot mapping of one token a row. Int32: starts_R1 and lengths_R.
    Int64: the index of draft `nth` + 1 in its text.
    """
    num_rows, padding = len(slots_R), len(lengths_N) - 1
    at_R = lengths_N[slots_R].long() + nth
    ids_R = drawn_R.clamp(min=0)
    drafts_RX[:, 0] = nth * (slots_R != padding)
    drafts_RX[:, nth] = ids_R
    tokens_NL[slots_R, at_R] = ids_R.to(torch.int32)
    tokens_NL[-1].zero_()
    positions_R, slot_mapping_R = placed(slots_R, at_R - lag, pages_NM, page_tokens, max_tokens)
    return (
        ids_R,
        positions_R,
        slot_mapping_R,
        torch.arange(num_rows + 1, dtype=torch.int32, device=slots_R.device),
        positions_R.to(torch.int32) + 1,
        at_R + 1,
    )


def placed(
    slots_T: Tensor, positions_T: Tensor, pages_NM: Tensor, page_tokens: int, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the positions that tokens have, and the slot mapping of their keys and values."""
    clamped_T = positions_T.clamp(max=max_tokens - 1)
    pages_T = pages_NM[slots_T, clamped_T // page_tokens].where(positions_T < max_tokens, 0)
    return clamped_T, pages_T.long() * page_tokens + clamped_T % page_tokens
