"""Plan and slots into the tensors of one step. Knows nothing of models.

Decision: the host sends slots and counts only, and sends the decode rows' slots only when they
change. Token ids, positions, slot mappings and page tables are gathered from the slots on the
device: a steady decode step uploads nothing, and under a CUDA graph the gathering is part of the
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.plan import Chunk, Int32, StepPlan
from nanovllm.registry import resolve
from nanovllm.runner.slots import Slots
from nanovllm.runner.upload import upload_together
from nanovllm.sampling.columns import upload

GATHER = {
    "torch": "nanovllm_kernels.batch_reference:gather_rows",
    "triton": "nanovllm_kernels.batch_prep:gather_rows",
}
WRITE_BACK = {
    "torch": "nanovllm_kernels.batch_reference:write_back",
    "triton": "nanovllm_kernels.batch_prep:write_back",
}


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, decodes first, and which of their tokens are sampled from.

    The last tokens of a row are: all of a decode row's, one of a chunk that ends its prompt.
    """

    slots_R: Tensor  # int64
    counts_R: Tensor | None  # int32 tokens per row; None = one each
    sampled_at: Tensor | None  # int64: where in T rows sample, at least one; None = at all tokens
    samples_R1: Tensor | None  # int32: where in S each row's begin; None = as in T
    sampling_rows: Int32 | None  # indices of the rows that sample, on the host; None = all
    num_sampled: Int32  # tokens that are sampled, of each of these
    host_slots: Int32  # their slots, as often, on the host
    num_decodes: int
    num_decode_tokens: int  # the first ones of the step
    width: int  # most tokens that a decode row of such a step can feed
    num_tokens: int
    max_new: int
    max_length: int
    chunks: Sequence[Chunk] = ()

    @property
    def is_decode(self) -> bool:
        """Whether there are decode rows alone, so that a graph may hold the whole step."""
        return self.sampled_at is None

    def samples_of(self, rows: list[int]) -> list[int]:
        """Where in S the tokens of these sampling rows are."""
        ends = np.cumsum(self.num_sampled)
        return [at for row in rows for at in range(ends[row] - self.num_sampled[row], ends[row])]


class RowBuilder:
    """Keeps the decode rows of the last plan on the device."""

    def __init__(self, most_rows: int, padding_slot: int, width: int, device: torch.device) -> None:
        """`width`: the most tokens of a decode row, its drafts included."""
        self.device = device
        self.padding_slot = padding_slot
        self.width = width
        self.decode_slots = np.zeros(0, np.int32)
        # Static: graphs read the first n of these. Rows past the plan's are padding: of no tokens
        # where rows differ, of one where each has one.
        self.static_slots_R = torch.full((most_rows,), padding_slot, device=device)
        self.static_counts_R = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self._num_counts = 0

    def rows(self, plan: StepPlan) -> StepRows:
        if plan.decodes is not None:
            self._take(np.frombuffer(plan.decodes, np.int32))
        counts = np.ones(plan.num_decodes, np.int32)
        if plan.drafts:
            counts = 1 + np.frombuffer(plan.drafts, np.int32)
            if (n := counts.max() - 1) >= self.width:
                raise ValueError(f"plan {plan.step} has rows of {n} drafts, not {self.width - 1}")
        width = self.width if plan.drafts else 1
        if plan.chunks:
            return self._mixed(plan, counts, width)
        slots_R, host = self.static_slots_R[: plan.num_decodes], self.decode_slots
        if not plan.drafts:
            return decode_rows(slots_R, None, host, counts, plan.num_decodes, 1, plan.max_length)
        counts_R, num_tokens = self._take_counts(counts), int(counts.sum())
        host = np.repeat(host, counts)
        return decode_rows(slots_R, counts_R, host, counts, num_tokens, width, plan.max_length)

    def _mixed(self, plan: StepPlan, decode_counts: Int32, width: int) -> StepRows:
        chunk_slots = np.array([c.slot for c in plan.chunks], np.int32)
        ends = np.array([c.samples for c in plan.chunks], np.int32)
        fed = np.array([c.num_tokens for c in plan.chunks], np.int32)
        counts = np.concatenate((decode_counts, fed))
        sampled = np.concatenate((decode_counts, ends))
        samples_R1 = np.concatenate((np.zeros(1, np.int32), sampled.cumsum(dtype=np.int32)))
        stops = counts.cumsum(dtype=np.int32)
        at = np.arange(samples_R1[-1], dtype=np.int32) + np.repeat(stops - samples_R1[1:], sampled)
        sent = [chunk_slots, counts, at if len(at) else stops - 1, samples_R1]
        chunk_slots_R, counts_R, at_S, samples_R1_sent = upload_together(sent, self.device)
        slots = np.concatenate((self.decode_slots, chunk_slots))
        return StepRows(
            slots_R=torch.cat((self.static_slots_R[: plan.num_decodes], chunk_slots_R.long())),
            counts_R=counts_R,
            sampled_at=at_S.long(),
            samples_R1=samples_R1_sent,
            sampling_rows=None if ends.all() else sampled.nonzero()[0].astype(np.int32),
            num_sampled=sampled[sampled > 0],
            host_slots=np.repeat(slots, sampled),
            num_decodes=plan.num_decodes,
            num_decode_tokens=int(decode_counts.sum()),
            width=width,
            num_tokens=int(stops[-1]),
            max_new=int(counts.max()),
            max_length=plan.max_length,
            chunks=plan.chunks,
        )

    def padded(self, num_tokens: int, width: int, max_length: int) -> StepRows:
        """The first `num_tokens` static rows, as captured: the host knows nothing of them."""
        slots_R, counts_R = self.static_slots_R[:num_tokens], self.static_counts_R[:num_tokens]
        nothing = np.zeros(0, np.int32)
        counts = counts_R if width > 1 else None
        return decode_rows(slots_R, counts, nothing, nothing, num_tokens, width, max_length)

    def _take(self, slots: Int32) -> None:
        """New decode rows; what is left of the old ones becomes padding."""
        most = max(len(slots), len(self.decode_slots))
        padded = np.full(most, self.padding_slot, np.int32)
        padded[: len(slots)] = slots
        self.static_slots_R[:most].copy_(upload(padded, self.device))
        self.decode_slots = slots

    def _take_counts(self, counts: Int32) -> Tensor:
        padded = np.zeros(max(len(counts), self._num_counts), np.int32)
        padded[: len(counts)] = counts
        self.static_counts_R[: len(padded)].copy_(upload(padded, self.device))
        self._num_counts = len(counts)
        return self.static_counts_R[: len(counts)]


def decode_rows(
    slots_R: Tensor,
    counts_R: Tensor | None,
    host_slots: Int32,
    num_sampled: Int32,
    num_tokens: int,
    width: int,
    max_length: int,
) -> StepRows:
    """The rows of a step without chunks, in which all tokens are sampled from."""
    sizes = len(slots_R), num_tokens, width, num_tokens, width, max_length
    return StepRows(slots_R, counts_R, None, None, None, num_sampled, host_slots, *sizes)


class BatchPrep:
    """Slots to a step's tensors, and a step's outcome back. `kernel`: "torch" or "triton"."""

    def __init__(self, slots: Slots, kernel: str) -> None:
        self.slots = slots
        self._gather: Callable[..., tuple[Tensor, ...]] = resolve(GATHER, kernel)
        self._write_back: Callable[..., Tensor] = resolve(WRITE_BACK, kernel)

    def gather(self, rows: StepRows) -> Batch:
        """Device work only: capturable for decode rows."""
        slots = self.slots
        num_pages = min(-(-rows.max_length // slots.page_tokens), slots.max_pages)
        if rows.is_decode:
            state = slots.lengths_N, slots.tokens_NL, slots.pages_NM, slots.page_tokens, num_pages
            found = self._gather(rows.slots_R, rows.counts_R, *state, rows.num_tokens, rows.width)
        else:
            found = gather_chunks(rows, slots, num_pages)
        ids_T, positions_T, slot_mapping_T, slots_T, starts_R1, lengths_R, table_RM = found
        tensors = ids_T, positions_T, slot_mapping_T, slots_T, rows.slots_R, starts_R1, lengths_R
        sizes = rows.num_decodes, rows.num_decode_tokens, rows.width, rows.max_new, rows.max_length
        return Batch(*tensors, table_RM, rows.sampled_at, *sizes, rows.chunks)

    def write_back(
        self, rows: StepRows, batch: Batch, tokens_S: Tensor, accept: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """lines_RW int32: of each row, its new tokens, which its slot knows now, then -1.

        `accept`: instead of by comparison; see spec.base. A batch of a graph may have more rows.
        """
        num_rows, slots, samples_R1 = len(rows.slots_R), self.slots, rows.samples_R1
        if samples_R1 is None and rows.counts_R is not None:
            samples_R1 = batch.starts_R1[: num_rows + 1]
        drawn = rows.slots_R, batch.lengths_R[:num_rows], samples_R1, tokens_S
        return self._write_back(*drawn, slots.lengths_N, slots.tokens_NL, rows.width, accept)


def rowless(inputs_4T: Tensor, sampled_at: Tensor) -> Batch:
    """Token ids, positions, slot mappings and slots of nobody's tokens, for what looks at tokens
    alone."""
    ids_T, positions_T, slot_mapping_T, slots_T = inputs_4T
    none = torch.empty(0, dtype=torch.int32, device=inputs_4T.device)
    rows = slots_T, none, none, none, none
    return Batch(ids_T, positions_T, slot_mapping_T, *rows, sampled_at, 0, 0, 1, 0, 0)


def gather_chunks(rows: StepRows, slots: Slots, num_pages: int) -> tuple[Tensor, ...]:
    """What the kernel gathers for decode rows, for rows that feed any number of tokens."""
    size, num_rows, device = slots.page_tokens, len(rows.slots_R), slots.device
    before_R, counts_R = slots.lengths_N[rows.slots_R], rows.counts_R
    assert counts_R is not None
    starts_R1 = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts_R, 0, dtype=torch.int32, out=starts_R1[1:])
    row_T = torch.repeat_interleave(
        torch.arange(num_rows, device=device), counts_R, output_size=rows.num_tokens
    )
    offsets_T = torch.arange(rows.num_tokens, device=device) - starts_R1[row_T]
    slots_T, positions_T = rows.slots_R[row_T], before_R[row_T] + offsets_T
    pages_T = slots.pages_NM[slots_T, positions_T // size].long()
    return (
        slots.tokens_NL[slots_T, positions_T].long(),
        positions_T,
        pages_T * size + positions_T % size,
        slots_T,
        starts_R1,
        before_R + counts_R,
        slots.pages_NM[rows.slots_R, :num_pages],
    )
