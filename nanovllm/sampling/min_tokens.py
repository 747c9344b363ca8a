"""min_tokens: the tokens that would end the request are impossible until it is long enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.base import PerSlot, SampleRows, Wanted
from nanovllm.sampling.columns import Fields, TokenLists


class MinTokens:
    FIELDS: Fields = (("may_stop_at", "i4"),)  # first position where a stop token is possible

    def __init__(self, per_slot: PerSlot) -> None:
        num_lines, self.shard = len(per_slot.tokens_NL), per_slot.shard
        self.stops = TokenLists(num_lines, self.shard.span.full, per_slot.tokens_NL.device)
        self.host = per_slot.columns.host
        self.may_stop_at_N = per_slot.columns.on_device("may_stop_at")

    def admit(self, admits: Sequence[Admit]) -> None:
        slots = np.array([admit.slot for admit in admits], np.int32)
        lists: list[dict[int, float]] = []
        for admit in admits:
            wait = admit.sampling.min_tokens
            self.host["may_stop_at"][admit.slot] = admit.num_prompt + wait
            lists.append(dict.fromkeys(admit.stop_ids if wait > 0 else (), -torch.inf))
        self.stops.put(slots, lists)

    def wanted(self, host_slots: Int32) -> Wanted:
        return self.stops.lengths[host_slots] > 0

    def apply(self, logits_SV: Tensor, rows: SampleRows) -> None:
        too_short_S = rows.positions_S < self.may_stop_at_N[rows.slots_S]
        bans_SK = self.stops.values_NK[rows.slots_S].where(too_short_S[:, None], 0.0)
        tokens_SK = self.stops.tokens_NK[rows.slots_S].long()
        logits_SV.scatter_add_(1, *self.shard.own(tokens_SK, bans_SK))
