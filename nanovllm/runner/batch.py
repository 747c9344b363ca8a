"""Plan and slots into the tensors of one step. Knows nothing of models.

Decision: the host sends slots and counts only, and sends the decode rows' slots only when they
change. Token ids, positions, slot mappings and page tables are gathered from the slots on the
device: a steady decode step uploads nothing, and under a CUDA graph the gathering is part of the
graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.plan import Int32, StepPlan
from nanovllm.registry import resolve
from nanovllm.runner.slots import Slots
from nanovllm.runner.upload import upload_together
from nanovllm.sampling.columns import upload

GATHER_DECODE = {
    "torch": "nanovllm_kernels.batch_reference:gather_decode",
    "triton": "nanovllm_kernels.batch_prep:gather_decode",
}
WRITE_BACK = {
    "torch": "nanovllm_kernels.batch_reference:write_back",
    "triton": "nanovllm_kernels.batch_prep:write_back",
}


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, decodes first."""

    slots_R: Tensor  # int64
    counts_R: Tensor | None  # int32 tokens per row; None = one each
    sampled_rows_S: Tensor | None  # int64 indices of the rows that sample; None = all
    sampled_slots: Int32  # the same rows' slots, on the host
    num_decodes: int  # so many rows, the first ones, feed one token each
    num_tokens: int
    max_new: int
    max_length: int


class RowBuilder:
    """Keeps the decode rows of the last plan on the device."""

    def __init__(self, num_slots: int, padding_slot: int, device: torch.device) -> None:
        self.device = device
        self.padding_slot = padding_slot
        self.decode_slots = np.zeros(0, np.int32)
        # Static: graphs read the first n of these. Rows past the plan's are padding.
        self.static_slots_R = torch.full(
            (num_slots,), padding_slot, dtype=torch.int64, device=device
        )

    def rows(self, plan: StepPlan) -> StepRows:
        if plan.decodes is not None:
            self._take(np.frombuffer(plan.decodes, np.int32))
        num_decodes, max_length = plan.num_decodes, plan.max_length
        decodes_R = self.static_slots_R[:num_decodes]
        if not plan.chunks:
            shape = num_decodes, num_decodes, 1, max_length
            return StepRows(decodes_R, None, None, self.decode_slots, *shape)
        chunk_slots = np.array([c.slot for c in plan.chunks], np.int32)
        chunk_counts = np.array([c.num_tokens for c in plan.chunks], np.int32)
        ends = np.array([c.samples for c in plan.chunks], bool)
        counts = np.concatenate((np.ones(num_decodes, np.int32), chunk_counts))
        sampled = np.flatnonzero(np.concatenate((np.ones(num_decodes, bool), ends))).astype(
            np.int32
        )
        chunk_slots_R, counts_R, sampled_S = upload_together(
            [chunk_slots, counts, sampled], self.device
        )
        return StepRows(
            slots_R=torch.cat((decodes_R, chunk_slots_R.long())),
            counts_R=counts_R,
            sampled_rows_S=None if len(sampled) == len(counts) else sampled_S.long(),
            sampled_slots=np.concatenate((self.decode_slots, chunk_slots[ends])),
            num_decodes=num_decodes,
            num_tokens=int(counts.sum()),
            max_new=int(counts.max()),
            max_length=max_length,
        )

    def _take(self, slots: Int32) -> None:
        """New decode rows; what is left of the old ones becomes padding."""
        most = max(len(slots), len(self.decode_slots))
        padded = np.full(most, self.padding_slot, np.int32)
        padded[: len(slots)] = slots
        self.static_slots_R[:most].copy_(upload(padded, self.device))
        self.decode_slots = slots


class BatchPrep:
    """Slots to a step's tensors, and a step's outcome back. `kernel`: "torch" or "triton"."""

    def __init__(self, slots: Slots, kernel: str) -> None:
        self.slots = slots
        self._gather_decode: Callable[..., tuple[Tensor, ...]] = resolve(GATHER_DECODE, kernel)
        self._write_back: Callable[..., None] = resolve(WRITE_BACK, kernel)

    def gather(self, rows: StepRows) -> Batch:
        """Device work only: capturable when every row feeds one token."""
        slots, num_rows = self.slots, len(rows.slots_R)
        num_pages = min(-(-rows.max_length // slots.page_tokens), slots.max_pages)
        steps_R1 = torch.arange(num_rows + 1, dtype=torch.int32, device=slots.device)
        if rows.counts_R is not None:
            return gather_chunks(rows, rows.counts_R, slots, num_pages)
        ids_R, positions_R, slot_mapping_R, lengths_R, table_RM = self._gather_decode(
            rows.slots_R,
            slots.lengths_N,
            slots.tokens_NL,
            slots.pages_NM,
            slots.page_tokens,
            num_pages,
        )
        return Batch(
            token_ids_T=ids_R,
            positions_T=positions_R,
            slot_mapping_T=slot_mapping_R,
            slots_R=rows.slots_R,
            starts_R1=steps_R1,
            lengths_R=lengths_R,
            page_table_RM=table_RM,
            sampled_at=None,
            num_rows=num_rows,
            num_decodes=num_rows,
            num_decode_tokens=num_rows,
            decode_width=1,
            max_new=1,
            max_length=rows.max_length,
        )

    def write_back(
        self,
        slots_R: Tensor,
        lengths_R: Tensor,
        slots_S: Tensor,
        positions_S: Tensor,
        tokens_S: Tensor,
    ) -> None:
        """Each request's length is now lengths_R; sampled tokens are known, to be fed next."""
        state = self.slots.lengths_N, self.slots.tokens_NL
        self._write_back(slots_R, lengths_R, slots_S, positions_S, tokens_S, *state)


def rowless(inputs_3T: Tensor, sampled_at: Tensor) -> Batch:
    """Token ids, positions and slot mappings of nobody's tokens, for what looks at tokens alone."""
    ids_T, positions_T, slot_mapping_T = inputs_3T
    none = torch.empty(0, dtype=torch.int32, device=inputs_3T.device)
    rows = none.long(), none, none, none
    return Batch(ids_T, positions_T, slot_mapping_T, *rows, sampled_at, 0, 0, 0, 1, 0, 0)


def gather_chunks(rows: StepRows, counts_R: Tensor, slots: Slots, num_pages: int) -> Batch:
    """Rows that feed any number of tokens."""
    size, num_rows, device = slots.page_tokens, len(rows.slots_R), slots.device
    before_R = slots.lengths_N[rows.slots_R]
    starts_R1 = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts_R, 0, dtype=torch.int32, out=starts_R1[1:])
    row_T = torch.repeat_interleave(
        torch.arange(num_rows, device=device), counts_R, output_size=rows.num_tokens
    )
    offsets_T = torch.arange(rows.num_tokens, device=device) - starts_R1[row_T]
    slots_T, positions_T = rows.slots_R[row_T], before_R[row_T] + offsets_T
    pages_T = slots.pages_NM[slots_T, positions_T // size].long()
    sampled_at = starts_R1[1:].long() - 1
    if rows.sampled_rows_S is not None and len(rows.sampled_rows_S):
        sampled_at = sampled_at[rows.sampled_rows_S]
    return Batch(
        token_ids_T=slots.tokens_NL[slots_T, positions_T].long(),
        positions_T=positions_T,
        slot_mapping_T=pages_T * size + positions_T % size,
        slots_R=rows.slots_R,
        starts_R1=starts_R1,
        lengths_R=before_R + counts_R,
        page_table_RM=slots.pages_NM[rows.slots_R, :num_pages],
        sampled_at=sampled_at,
        num_rows=num_rows,
        num_decodes=rows.num_decodes,
        num_decode_tokens=rows.num_decodes,
        decode_width=1,
        max_new=rows.max_new,
        max_length=rows.max_length,
    )
