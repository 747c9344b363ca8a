"""min_tokens: mask stop tokens until the request has enough output tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.base import PerSlot, SampleRows, Wanted
from nanovllm.sampling.columns import Fields


class MinTokens:
    FIELDS: Fields = (("may_stop_at", "i4"),)  # first position where a stop token is possible

    def __init__(self, per_slot: PerSlot) -> None:
        self.stops = per_slot.lists()
        self.host = per_slot.columns.host
        self.may_stop_at_N = per_slot.columns.on_device("may_stop_at")

    def admit(self, admits: Sequence[Admit]) -> None:
        lists: list[dict[int, float]] = []
        for admit in admits:
            wait = admit.sampling.min_tokens
            self.host["may_stop_at"][admit.slot] = admit.num_prompt + wait
            lists.append(dict.fromkeys(admit.stop_ids if wait > 0 else (), -torch.inf))
        self.stops.put(admits, lists)

    def wanted(self, host_slots: Int32) -> Wanted:
        return self.stops.lengths[host_slots] > 0

    def apply(self, logits_SV: Tensor, rows: SampleRows) -> None:
        too_short_S = rows.positions_S < self.may_stop_at_N[rows.slots_S]
        columns_SK, bans_SK = self.stops.of(rows.slots_S)
        logits_SV.scatter_add_(1, columns_SK, bans_SK.where(too_short_S[:, None], 0.0))
