"""logit_bias: add numbers to the logits of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.base import PerSlot, SampleRows, Wanted
from nanovllm.sampling.columns import Fields


class LogitBias:
    FIELDS: Fields = ()

    def __init__(self, per_slot: PerSlot) -> None:
        self.biases = per_slot.lists()

    def admit(self, admits: Sequence[Admit]) -> None:
        self.biases.put(admits, [admit.sampling.logit_bias for admit in admits])

    def wanted(self, host_slots: Int32) -> Wanted:
        return self.biases.lengths[host_slots] > 0

    def apply(self, logits_SV: Tensor, rows: SampleRows) -> None:
        logits_SV.scatter_add_(1, *self.biases.of(rows.slots_S))
