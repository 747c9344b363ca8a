"""logit_bias: numbers added to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.base import PerSlot, SampleRows, Wanted
from nanovllm.sampling.columns import Fields, TokenLists


class LogitBias:
    FIELDS: Fields = ()

    def __init__(self, per_slot: PerSlot) -> None:
        num_lines, self.shard = len(per_slot.tokens_NL), per_slot.shard
        self.biases = TokenLists(num_lines, self.shard.span.full, per_slot.tokens_NL.device)

    def admit(self, admits: Sequence[Admit]) -> None:
        slots = np.array([admit.slot for admit in admits], np.int32)
        self.biases.put(slots, [admit.sampling.logit_bias for admit in admits])

    def wanted(self, host_slots: Int32) -> Wanted:
        return self.biases.lengths[host_slots] > 0

    def apply(self, logits_SV: Tensor, rows: SampleRows) -> None:
        tokens_SK = self.biases.tokens_NK[rows.slots_S].long()
        logits_SV.scatter_add_(1, *self.shard.own(tokens_SK, self.biases.values_NK[rows.slots_S]))
