"""Truncation by min-p, top-k and top-p: the smallest logit that a row may draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.registry import resolve
from nanovllm.sampling import THRESHOLDS
from nanovllm.sampling.base import PerSlot, SampleRows, Wanted
from nanovllm.sampling.columns import Fields, indices
from nanovllm.sampling.shards import MOST_ROWS


class Truncation:
    FIELDS: Fields = (("top_k", "i4"), ("top_p", "f4"), ("min_p_gap", "f4"), ("truncated", "?"))

    def __init__(self, per_slot: PerSlot, inverse_temperatures_N: Tensor, kernel: str) -> None:
        columns, self.vocab_size = per_slot.columns, per_slot.shard.span.full
        self.shard = per_slot.shard
        self.host = columns.host
        self.find_thresholds: Callable[..., Tensor] = resolve(THRESHOLDS, kernel)
        self.inverse_temperatures_N = inverse_temperatures_N
        self.top_k_N = columns.on_device("top_k")
        self.top_p_N = columns.on_device("top_p")
        self.min_p_gap_N = columns.on_device("min_p_gap")

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            sampling, record = admit.sampling, self.host[admit.slot]
            # The largest logit passes every truncation, so a greedy row needs none.
            on = sampling.temperature > 0 and (
                sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
            )
            record["truncated"] = on
            record["top_k"] = min(max(sampling.top_k, 0), self.vocab_size) if on else 0
            record["top_p"] = sampling.top_p if on else 1.0
            # p >= min_p * max(p), in terms of logits.
            narrow = on and sampling.min_p > 0
            record["min_p_gap"] = (
                sampling.temperature * math.log(sampling.min_p) if narrow else -math.inf
            )

    def wanted(self, host_slots: Int32) -> Wanted:
        return self.host["truncated"][host_slots]

    def thresholds(self, logits_SV: Tensor, rows: SampleRows, wanted: Wanted) -> Tensor:
        """Return thresholds_S, float32. Those of rows that are not `wanted` have no effect."""
        if self.shard.span.is_whole:
            return self._found(logits_SV, rows.slots_S)
        at_W = indices(wanted, logits_SV.device)
        found_W = torch.cat(
            [
                self._found(self.shard.whole_rows(logits_SV, some_W), rows.slots_S[some_W])
                for some_W in at_W.split(MOST_ROWS)
            ]
        )
        return found_W.new_full((len(logits_SV),), -math.inf).index_copy_(0, at_W, found_W)

    def _found(self, logits_WV: Tensor, slots_W: Tensor) -> Tensor:
        return self.find_thresholds(
            logits_WV,
            slots_W,
            self.inverse_temperatures_N,
            self.top_k_N,
            self.top_p_N,
            self.min_p_gap_N,
        )
