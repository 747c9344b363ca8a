"""Plain torch reference of ngram: drafts of a row, looked up in its own text.

The shapes are those of batch_reference: N slots + 1, L positions, R rows, D drafts, X = 1 + D.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def ngram(
    slots_R: Tensor,
    lengths_N: Tensor,
    tokens_NL: Tensor,
    num_drafts: int,
    min_match: int,
    max_match: int,
) -> Tensor:
    """Return the tokens that followed the last occurrence of each slot's suffix.

    The result is int32 [R, 1 + num_drafts]. Slot n has the tokens t[0] to t[p], p = lengths_N[n].
    The match is the rightmost earlier place where its last `max_match` tokens occur, or
    else one fewer, and so on down to `min_match`. It ends at some e < p. The drafts are
    t[e + 1] and the tokens after it. Past p they repeat from t[e + 1] on, as a text of period p - e
    would. Column 0 of the result is the number of drafts, all or none. A row without a match has
    t[p] in place of its drafts.

    All drafts are also written in place after t[p], where the slot must have room. For the padding
    slot, which has only zeros, they are zeros.
    """
    num_positions = tokens_NL.shape[1]
    assert 1 <= min_match <= max_match and (max_match + 1) * (num_positions + 1) < 1 << 31
    text_RL, newest_R1 = tokens_NL[slots_R], lengths_N[slots_R, None].long()
    at_L = torch.arange(num_positions, dtype=torch.int32, device=slots_R.device)
    ahead = max_match - 1  # number of tokens before the text that match no token
    padded_RL = functional.pad(text_RL, (ahead, 0), value=-1)
    steps_M = torch.arange(max_match, device=slots_R.device)
    last_RM = padded_RL.take_along_dim(newest_R1 + steps_M, 1)
    same_RL = at_L < newest_R1
    matched_RL = torch.zeros_like(text_RL)
    for first in range(ahead, -1, -1):
        same_RL &= padded_RL[:, first : first + num_positions] == last_RM[:, first, None]
        matched_RL += same_RL
    scores_RL = (matched_RL * (num_positions + 1) + at_L).where(matched_RL >= min_match, 0)
    best_R1 = scores_RL.amax(1, keepdim=True)
    end_R1 = (best_R1 % (num_positions + 1)).where(best_R1 > 0, newest_R1 - 1)
    steps_D = torch.arange(num_drafts, device=slots_R.device)
    drafts_RD = text_RL.take_along_dim(end_R1 + 1 + steps_D % (newest_R1 - end_R1), 1)
    tokens_NL[slots_R[:, None], newest_R1 + 1 + steps_D] = drafts_RD
    return torch.cat(((best_R1 > 0).to(torch.int32) * num_drafts, drafts_RD), 1)
