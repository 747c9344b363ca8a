"""allowed_token_ids: mask all other tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.base import PerSlot, SampleRows, Wanted
from nanovllm.sampling.columns import Fields, indices


class AllowedTokens:
    FIELDS: Fields = ()

    def __init__(self, per_slot: PerSlot) -> None:
        self.allowed = per_slot.lists()

    def admit(self, admits: Sequence[Admit]) -> None:
        lists = (admit.sampling.allowed_tokens for admit in admits)
        self.allowed.put(admits, [dict.fromkeys(tokens, 1.0) for tokens in lists])

    def wanted(self, host_slots: Int32) -> Wanted:
        return self.allowed.lengths[host_slots] > 0

    def apply(self, logits_SV: Tensor, rows: SampleRows) -> None:
        """Mask the other tokens. Unused entries of a list write to column 0, by amax, so that an
        allowed column 0 stays."""
        at_W = indices(self.wanted(rows.host_slots), logits_SV.device)
        columns_WK, ones_WK = self.allowed.of(rows.slots_S[at_W])
        at_X = (at_W[:, None] * logits_SV.shape[1] + columns_WK).flatten()
        kept_X = logits_SV.view(-1)[at_X].where(ones_WK.flatten() > 0, -torch.inf)
        logits_SV.index_fill_(0, at_W, -torch.inf)
        logits_SV.view(-1).scatter_reduce_(0, at_X, kept_X, "amax")
