"""Log-probabilities of drawn tokens and of the best alternatives.

They are the log-softmax of the model's logits, before any feature and before the temperature. Only
a grammar's mask is applied first (Sampler.apply_mask), so the allowed tokens share the probability.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.base import PerSlot, SampledLogprobs, SampleRows, Wanted
from nanovllm.sampling.columns import Fields, upload
from nanovllm.sampling.shards import MOST_ROWS


class Logprobs:
    # 1 + number of alternatives; 0 without logprobs.
    FIELDS: Fields = (("num_logprobs", "i4"),)

    def __init__(self, per_slot: PerSlot) -> None:
        self.host, self.shard = per_slot.columns.host, per_slot.shard

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            self.host["num_logprobs"][admit.slot] = admit.sampling.logprobs + 1

    def wanted(self, host_slots: Int32) -> Wanted:
        return self.host["num_logprobs"][host_slots] > 0

    def of(self, logits_SV: Tensor, tokens_S: Tensor, rows: SampleRows) -> SampledLogprobs | None:
        wanted = np.flatnonzero(self.wanted(rows.host_slots)).astype(np.int32)
        if not len(wanted):
            return None
        counts = self.host["num_logprobs"][rows.host_slots[wanted]] - 1
        at_W = upload(wanted, logits_SV.device).long()
        parts = [
            self._of_some(logits_SV, tokens_S, some_W, int(counts.max()))
            for some_W in at_W.split(MOST_ROWS)
        ]
        chosen_W, top_ids_WK, top_logprobs_WK = map(torch.cat, zip(*parts, strict=True))
        return SampledLogprobs(
            at=[int(at) for at in wanted],
            counts=[int(count) for count in counts],
            chosen_W=chosen_W,
            top_ids_WK=top_ids_WK,
            top_logprobs_WK=top_logprobs_WK,
        )

    def _of_some(
        self, logits_SV: Tensor, tokens_S: Tensor, at_W: Tensor, most: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last three fields of SampledLogprobs for the rows at_W."""
        logits_WV = self.shard.whole_rows(logits_SV, at_W).float()
        top_ids_WK = best_ids(logits_WV, most)
        logprobs_WV = logits_WV.log_softmax(-1)  # logsumexp divides a row by the number of rows
        tokens_W1 = tokens_S[at_W, None].clamp(min=0)  # corrupted rows are dropped later
        chosen_W = logprobs_WV.take_along_dim(tokens_W1, 1)[:, 0]
        return chosen_W, top_ids_WK, logprobs_WV.take_along_dim(top_ids_WK, 1)


def best_ids(logits_WV: Tensor, count: int) -> Tensor:
    """Return the ids of the largest logits, in descending order. Of equal ones the first is best.

    torch.topk alone returns any of several equal numbers, and which depends on the number of rows.
    So it gets unique keys: the bits of a float32 in the order of its values, then the id.
    """
    bits_WV = logits_WV.view(torch.int32)
    ordered_WV = (bits_WV >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits_WV)
    last = logits_WV.shape[1] - 1
    ids_V = torch.arange(last, -1, -1, device=logits_WV.device)
    keys_WV = ordered_WV.long().bitwise_left_shift_(32).add_(ids_V)  # in place, to save memory
    return last - (keys_WV.topk(count, -1).values & 0xFFFFFFFF)
