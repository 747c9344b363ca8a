"""Repetition penalty (prompt and output), frequency and presence penalties (output only).

Decision: no counts are kept between steps. A request's tokens are on the device anyway, and the
logits of exactly these tokens are changed in place. The cost is proportional to the request's
length instead of the vocabulary, and a preemption leaves nothing to restore.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.base import PerSlot, SampleRows, Wanted
from nanovllm.sampling.columns import Fields, indices

MIN_REPETITION_PENALTY = 1e-6  # least divisor of logits, which keeps them finite


class Penalties:
    FIELDS: Fields = (
        ("repetition", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("penalised", "?"),
    )

    def __init__(self, per_slot: PerSlot) -> None:
        columns, self.shard = per_slot.columns, per_slot.shard
        self.host = columns.host
        self.tokens_NL, self.prompt_lengths_N = per_slot.tokens_NL, per_slot.prompt_lengths_N
        self.repetition_N = columns.on_device("repetition")
        self.presence_N = columns.on_device("presence")
        self.frequency_N = columns.on_device("frequency")

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            sampling, record = admit.sampling, self.host[admit.slot]
            record["repetition"] = max(sampling.repetition_penalty, MIN_REPETITION_PENALTY)
            record["presence"] = sampling.presence_penalty
            record["frequency"] = sampling.frequency_penalty
            additive = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
            record["penalised"] = additive or sampling.repetition_penalty != 1

    def wanted(self, host_slots: Int32) -> Wanted:
        return self.host["penalised"][host_slots]

    def apply(self, logits_SV: Tensor, rows: SampleRows) -> None:
        at_W = indices(self.wanted(rows.host_slots), logits_SV.device)
        slots_W, lengths_W1 = rows.slots_S[at_W], rows.positions_S[at_W, None]
        tokens_WL = self.tokens_NL[slots_W, : rows.max_length].long()
        prompts_W1 = self.prompt_lengths_N[slots_W, None]
        index_L = torch.arange(tokens_WL.shape[1], device=tokens_WL.device)
        columns_WL, known_WL = self.shard.own(tokens_WL, index_L < lengths_W1)
        output_WL = known_WL & (index_L >= prompts_W1)
        logits_X, starts_W1 = logits_SV.view(-1), at_W[:, None] * logits_SV.shape[1]

        at_X, some_X = places(starts_W1, columns_WL, known_WL)
        factors_X = self.repetition_N[slots_W, None].expand_as(tokens_WL).flatten()
        factors_X = factors_X.where(some_X, 1.0)
        old_X = logits_X[at_X]
        logits_X[at_X] = torch.where(old_X > 0, old_X / factors_X, old_X * factors_X)

        at_X, some_X = places(starts_W1, columns_WL, output_WL)
        logits_X.scatter_add_(0, at_X, (output_WL * -self.frequency_N[slots_W, None]).flatten())
        presence_X = self.presence_N[slots_W, None].expand_as(tokens_WL).flatten()
        logits_X[at_X] = logits_X[at_X] - presence_X.where(some_X, 0.0)


def places(starts_W1: Tensor, columns_WL: Tensor, is_meant_WL: Tensor) -> tuple[Tensor, Tensor]:
    """Return flat indices of the selected tokens' logits, and whether their row has any.

    Entries that are not selected repeat a selected one of their row. All entries of one index then
    have the same value, and their order in a scatter does not matter. In a row without selected
    tokens, they point to column 0.
    """
    meant_WL = columns_WL.where(is_meant_WL, -1)
    one_W1 = meant_WL.amax(1, keepdim=True)
    at_WL = starts_W1 + torch.where(is_meant_WL, columns_WL, one_W1.clamp(min=0))
    return at_WL.flatten(), (one_W1 >= 0).expand_as(at_WL).flatten()
