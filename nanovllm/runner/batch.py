"""Plan and slots into the tensors of one step. Knows nothing of models.

Decision: the host sends slots and counts only, and sends the decode rows' slots only when they
change. Token ids, positions, cells and page tables are gathered from the slots on the device, so a
steady decode step uploads nothing, and under a CUDA graph the gathering is part of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.plan import Int32, StepPlan
from nanovllm.runner.slots import Slots
from nanovllm.runner.upload import upload


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, decodes first."""

    slots_R: Tensor  # int64
    counts_R: Tensor | None  # int32 tokens per row; None = one each
    sampled_rows_S: Tensor | None  # int64 indices of the rows that sample; None = all
    sampled_slots: Int32  # the same rows' slots, on the host
    num_tokens: int
    max_new: int
    max_length: int


class RowBuilder:
    """Keeps the decode rows of the last plan on the device."""

    def __init__(self, num_slots: int, dead_slot: int, device: torch.device) -> None:
        self.device = device
        self.dead_slot = dead_slot
        self.decode_slots = np.zeros(0, np.int32)
        # Static: graphs read the first n of these. Rows past the plan's are dead.
        self.static_slots_R = torch.full((num_slots,), dead_slot, dtype=torch.int64, device=device)

    def rows(self, plan: StepPlan) -> StepRows:
        if plan.decodes is not None:
            self._take(np.frombuffer(plan.decodes, np.int32))
        num_decodes, max_length = plan.num_decodes, plan.max_length
        decodes_R = self.static_slots_R[:num_decodes]
        if not plan.chunks:
            return StepRows(decodes_R, None, None, self.decode_slots, num_decodes, 1, max_length)
        chunk_slots = np.array([c.slot for c in plan.chunks], np.int32)
        chunk_counts = np.array([c.num_tokens for c in plan.chunks], np.int32)
        ends = np.array([c.samples for c in plan.chunks], bool)
        counts = np.concatenate((np.ones(num_decodes, np.int32), chunk_counts))
        sampled = np.flatnonzero(np.concatenate((np.ones(num_decodes, bool), ends))).astype(
            np.int32
        )
        chunk_slots_R, counts_R, sampled_S = upload([chunk_slots, counts, sampled], self.device)
        return StepRows(
            slots_R=torch.cat((decodes_R, chunk_slots_R.long())),
            counts_R=counts_R,
            sampled_rows_S=None if len(sampled) == len(counts) else sampled_S.long(),
            sampled_slots=np.concatenate((self.decode_slots, chunk_slots[ends])),
            num_tokens=int(counts.sum()),
            max_new=int(counts.max()),
            max_length=max_length,
        )

    def _take(self, slots: Int32) -> None:
        """New decode rows; what is left of the old ones becomes dead."""
        most = max(len(slots), len(self.decode_slots))
        padded = np.full(most, self.dead_slot, np.int32)
        padded[: len(slots)] = slots
        (sent_R,) = upload([padded], self.device)
        self.static_slots_R[:most].copy_(sent_R)
        self.decode_slots = slots


def gather(rows: StepRows, slots: Slots) -> Batch:
    """Device work only: capturable when every row feeds one token."""
    size = slots.page_tokens
    before_R = slots.lengths_N[rows.slots_R]
    num_rows = len(rows.slots_R)
    steps = torch.arange(num_rows + 1, dtype=torch.int32, device=slots.device)
    if rows.counts_R is None:
        slots_T, positions_T = rows.slots_R, before_R.long()
        starts_R1, lengths_R = steps, before_R + 1
        ends_R = steps[:-1].long()
    else:
        starts_R1 = torch.zeros_like(steps)
        torch.cumsum(rows.counts_R, 0, dtype=torch.int32, out=starts_R1[1:])
        row_T = torch.repeat_interleave(
            torch.arange(num_rows, device=slots.device), rows.counts_R, output_size=rows.num_tokens
        )
        slots_T = rows.slots_R[row_T]
        offsets_T = torch.arange(rows.num_tokens, device=slots.device) - starts_R1[row_T]
        positions_T = before_R[row_T] + offsets_T
        lengths_R = before_R + rows.counts_R
        ends_R = starts_R1[1:].long() - 1
    num_pages = min(-(-rows.max_length // size), slots.max_pages)
    pages_T = slots.pages_NM[slots_T, positions_T // size].long()
    return Batch(
        token_ids_T=slots.tokens_NL[slots_T, positions_T].long(),
        positions_T=positions_T,
        cells_T=pages_T * size + positions_T % size,
        starts_R1=starts_R1,
        lengths_R=lengths_R,
        page_table_RM=slots.pages_NM[rows.slots_R, :num_pages],
        sampled_at=ends_R if rows.sampled_rows_S is None else ends_R[rows.sampled_rows_S],
        num_rows=num_rows,
        max_new=rows.max_new,
        max_length=rows.max_length,
    )
