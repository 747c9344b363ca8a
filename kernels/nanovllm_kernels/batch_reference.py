"""What batch_prep means, in plain torch: a step's inputs from slots, and its outcome back."""

from __future__ import annotations

import torch


def gather_rows(
    slots_R, counts_R, lengths_N, tokens_NL, pages_NM, page_tokens, num_pages, num_tokens, width
):
    before_R = lengths_N[slots_R]
    if counts_R is None:
        counts_R = torch.ones_like(before_R)
    num_rows = len(slots_R)
    starts_R1 = torch.zeros(num_rows + 1, dtype=torch.int32)
    starts_R1[1:] = counts_R.cumsum(0)
    index_T = torch.arange(num_tokens)
    row_T = torch.searchsorted(starts_R1[1:].contiguous(), index_T.int(), right=True)
    pad_T = row_T >= num_rows
    row_T = row_T.clamp(max=num_rows - 1)
    slots_T = slots_R[row_T].masked_fill(pad_T, len(lengths_N) - 1)
    positions_T = (before_R[row_T] + index_T - starts_R1[row_T]).long().masked_fill(pad_T, 0)
    pages_T = pages_NM[slots_T, positions_T // page_tokens].long()
    return (
        tokens_NL[slots_T, positions_T].long(),
        positions_T,
        pages_T * page_tokens + positions_T % page_tokens,
        slots_T,
        starts_R1,
        torch.where(counts_R > 0, before_R + counts_R, 0).int(),
        pages_NM[slots_R, :num_pages],
    )


def write_back(slots_R, lengths_R, samples_R1, tokens_S, lengths_N, tokens_NL, width, accept=None):
    lines = torch.full((len(slots_R), width), -1, dtype=torch.int32)
    pad = len(lengths_N) - 1
    for r, (slot, length) in enumerate(zip(slots_R.tolist(), lengths_R.tolist())):
        lo, hi = (r, r + 1) if samples_R1 is None else samples_R1[r : r + 2].tolist()
        m, drawn = hi - lo, tokens_S[lo:hi].tolist()
        if length == 0:
            continue
        if m == 0:
            if slot != pad:
                lengths_N[slot] = length
            continue
        b, a = length - m, 1
        while (
            a < m
            and drawn[a - 1] >= 0
            and drawn[a] != -2
            and drawn[a - 1] == int(tokens_NL[slot, b + a])
        ):
            a += 1
        lines[r, :a] = torch.tensor(drawn[:a], dtype=torch.int32)
        if slot != pad:
            lengths_N[slot] = b + a
            tokens_NL[slot, b + a] = max(drawn[a - 1], 0)
    return lines
