"""Slots, and the tensors of one step from its plan and the slots. Independent of models.

Slots are the requests' state on the device: one row per slot, and a padding slot after the last.
Padding rows of a graph use the padding slot, whose length stays 0 and whose pages are page 0.

Decision: the host sends only slots and counts, and the slots of decode rows only when they change.
Token ids, positions, slot mappings and page tables are gathered from the slots on the device. A
steady decode step uploads nothing, and a CUDA graph includes the gathering.
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
from nanovllm.sampling.columns import upload

GATHER = {
    "torch": "nanovllm_kernels.sampling.batch_reference:gather_rows",
    "triton": "nanovllm_kernels.sampling.batch_prep:gather_rows",
}
WRITE_BACK = {
    "torch": "nanovllm_kernels.sampling.batch_reference:write_back",
    "triton": "nanovllm_kernels.sampling.batch_prep:write_back",
}


class Slots:
    """Tokens, lengths and page tables by slot. N slots + 1, L positions, M pages of a request."""

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        page_tokens: int,
        device: torch.device,
        num_drafts: int = 0,
    ) -> None:
        """`num_drafts` is the number of drafts stored after the latest token of a slot."""
        self.device = device
        self.max_tokens = max_tokens
        self.padding = num_slots
        self.page_tokens = page_tokens
        self.max_pages = -(-max_tokens // page_tokens)
        rows = num_slots + 1
        width = max_tokens + 1 + num_drafts
        self.tokens_NL = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.pages_NM = torch.zeros(rows, self.max_pages, dtype=torch.int32, device=device)
        self.lengths_N = torch.zeros(rows, dtype=torch.int32, device=device)  # computed tokens
        self.prompt_lengths_N = torch.zeros(rows, dtype=torch.int32, device=device)
        assert self.tokens_NL.numel() < 1 << 31, "flat positions must fit int32"

    def apply(self, plan: StepPlan) -> None:
        """Write the tokens, page tables and lengths of admissions and grants."""
        if not plan.admits and not plan.grants:
            return
        width = self.tokens_NL.shape[1]
        slots = np.array([a.slot for a in plan.admits], np.int32)
        known = [np.frombuffer(a.tokens, np.int32) for a in plan.admits]
        token_at = [
            a.slot * width + arange(len(k)) for a, k in zip(plan.admits, known, strict=True)
        ]
        held = [(a.slot, 0, a.pages) for a in plan.admits]
        held += [(g.slot, g.at, g.pages) for g in plan.grants]
        page_at = [slot * self.max_pages + at + arange(len(pages)) for slot, at, pages in held]
        cached = np.array([a.num_cached for a in plan.admits], np.int32)
        prompts = np.array([a.num_prompt for a in plan.admits], np.int32)
        pages = np.array([page for _, _, pages in held for page in pages], np.int32)
        uploaded = upload_together(
            [slots, cached, prompts, joined(token_at), joined(known), joined(page_at), pages],
            self.device,
        )
        slots_N, cached_N, prompts_N, token_at_T, tokens_T, page_at_P, pages_P = uploaded
        if plan.admits:
            at_N = slots_N.long()
            # Drafts may be computed beyond the pages of a slot: in the padding page.
            self.pages_NM.index_fill_(0, at_N, 0)
            self.tokens_NL.view(-1).index_copy_(0, token_at_T.long(), tokens_T)
            self.lengths_N.index_copy_(0, at_N, cached_N)
            self.prompt_lengths_N.index_copy_(0, at_N, prompts_N)
        self.pages_NM.view(-1).index_copy_(0, page_at_P.long(), pages_P)


def arange(count: int) -> Int32:
    return np.arange(count, dtype=np.int32)


def joined(arrays: list[Int32]) -> Int32:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def upload_together(arrays: Sequence[Int32], device: torch.device) -> list[Tensor]:
    """Return the arrays as int32 device tensors, in order.

    They are copied in one pinned, asynchronous transfer. Do not wait.
    """
    sizes = [len(array) for array in arrays]
    return list(torch.split(upload(np.concatenate(arrays), device), sizes))


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one step, decodes first, and the positions that are sampled.

    All tokens of a decode row are sampled, and the last token of a prompt's last chunk.
    """

    slots_R: Tensor  # int64
    counts_R: Tensor | None  # int32 tokens per row; None = one each
    sampled_at: Tensor | None  # int64: indices in T of sampled tokens, at least one; None = all
    samples_R1: Tensor | None  # int32: first index in S of each row; None = same as in T
    sampling_rows: Int32 | None  # indices of the rows that sample, on the host; None = all
    num_sampled: Int32  # sampled tokens of each of these rows
    host_slots: Int32  # slots of the sampled tokens, on the host
    num_decodes: int
    num_decode_tokens: int  # tokens of decode rows, the first ones of the step
    width: int  # maximum tokens of a decode row in this kind of step
    num_tokens: int
    max_new: int
    max_length: int
    chunks: Sequence[Chunk] = ()
    proposes: bool = True  # as in plan.StepPlan
    adapted: bool = False  # a row of the step has an adapter

    @property
    def is_decode(self) -> bool:
        """True if there are only decode rows, so that one graph may contain the whole step."""
        return self.sampled_at is None

    def samples_of(self, rows: list[int]) -> list[int]:
        """Return the indices in S of the tokens of these sampling rows."""
        ends = np.cumsum(self.num_sampled)
        return [at for row in rows for at in range(ends[row] - self.num_sampled[row], ends[row])]


class RowBuilder:
    """Builder of StepRows. Keeps the decode rows of the last plan on the device."""

    def __init__(self, most_rows: int, padding_slot: int, width: int, device: torch.device) -> None:
        """`width` is the maximum number of tokens of a decode row, with its drafts."""
        self.device = device
        self.padding_slot = padding_slot
        self.width = width
        self.decode_slots = np.zeros(0, np.int32)
        # Static buffers, of which graphs read the first n. Rows after those of the plan are
        # padding: with drafts they have no tokens, otherwise one.
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
        return decode_rows(
            slots_R,
            counts_R=self._take_counts(counts) if plan.drafts else None,
            host_slots=np.repeat(host, counts) if plan.drafts else host,
            num_sampled=counts,
            num_tokens=int(counts.sum()),
            width=width,
            max_length=plan.max_length,
            proposes=plan.proposes,
        )

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
            proposes=plan.proposes,
        )

    def padded(
        self, num_tokens: int, width: int, max_length: int, num_rows: int | None = None
    ) -> StepRows:
        """Return the first static rows for a capture, without values on the host.

        There are `num_rows` rows, by default one per token.
        """
        most = num_tokens if num_rows is None else num_rows
        slots_R, counts_R = self.static_slots_R[:most], self.static_counts_R[:most]
        nothing = np.zeros(0, np.int32)
        return decode_rows(
            slots_R,
            counts_R=counts_R if width > 1 else None,
            host_slots=nothing,
            num_sampled=nothing,
            num_tokens=num_tokens,
            width=width,
            max_length=max_length,
        )

    def _take(self, slots: Int32) -> None:
        """Store new decode rows. Rows that remain of the former ones become padding."""
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
    proposes: bool = True,
) -> StepRows:
    """Return the rows of a step without chunks. All tokens are sampled."""
    return StepRows(
        slots_R=slots_R,
        counts_R=counts_R,
        sampled_at=None,
        samples_R1=None,
        sampling_rows=None,
        num_sampled=num_sampled,
        host_slots=host_slots,
        num_decodes=len(slots_R),
        num_decode_tokens=num_tokens,
        width=width,
        num_tokens=num_tokens,
        max_new=width,
        max_length=max_length,
        proposes=proposes,
    )


class BatchPrep:
    """Copies of slots to a step's tensors, and of sampled tokens back to the slots.

    `kernel` is "torch" or "triton".
    """

    def __init__(self, slots: Slots, kernel: str) -> None:
        self.slots = slots
        self._gather: Callable[..., tuple[Tensor, ...]] = resolve(GATHER, kernel)
        self._write_back: Callable[..., Tensor] = resolve(WRITE_BACK, kernel)

    def gather(self, rows: StepRows) -> Batch:
        """Gather the step's tensors on the device. For decode rows, a CUDA graph can capture it."""
        slots = self.slots
        num_pages = min(-(-rows.max_length // slots.page_tokens), slots.max_pages)
        if rows.is_decode:
            gathered = self._gather(
                slots_R=rows.slots_R,
                counts_R=rows.counts_R,
                lengths_N=slots.lengths_N,
                tokens_NL=slots.tokens_NL,
                pages_NM=slots.pages_NM,
                page_tokens=slots.page_tokens,
                num_pages=num_pages,
                num_tokens=rows.num_tokens,
                width=rows.width,
            )
        else:
            gathered = gather_chunks(rows, slots, num_pages)
        ids_T, positions_T, slot_mapping_T, slots_T, starts_R1, lengths_R, table_RM = gathered
        return Batch(
            token_ids_T=ids_T,
            positions_T=positions_T,
            slot_mapping_T=slot_mapping_T,
            slots_T=slots_T,
            slots_R=rows.slots_R,
            starts_R1=starts_R1,
            lengths_R=lengths_R,
            page_table_RM=table_RM,
            sampled_at=rows.sampled_at,
            num_decodes=rows.num_decodes,
            num_decode_tokens=rows.num_decode_tokens,
            decode_width=rows.width,
            max_new=rows.max_new,
            max_length=rows.max_length,
            planned=rows.chunks,
        )

    def write_back(
        self, rows: StepRows, batch: Batch, tokens_S: Tensor, accept: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Write drawn tokens to the slots. Return tokens_RW, int32: each row's new tokens, then -1.

        `accept` replaces the comparison of drafts; see spec.base. The batch of a graph may have
        more rows than the step.
        """
        num_rows, slots, samples_R1 = len(rows.slots_R), self.slots, rows.samples_R1
        if samples_R1 is None and rows.counts_R is not None:
            samples_R1 = batch.starts_R1[: num_rows + 1]
        return self._write_back(
            slots_R=rows.slots_R,
            lengths_R=batch.lengths_R[:num_rows],
            samples_R1=samples_R1,
            tokens_S=tokens_S,
            lengths_N=slots.lengths_N,
            tokens_NL=slots.tokens_NL,
            width=rows.width,
            accept=accept,
        )


def rowless(inputs_4T: Tensor, sampled_at: Tensor) -> Batch:
    """Return a batch that has tokens and no rows, for a piecewise capture.

    `inputs_4T` are token ids, positions, slot mappings and slots.
    """
    ids_T, positions_T, slot_mapping_T, slots_T = inputs_4T
    none = torch.empty(0, dtype=torch.int32, device=inputs_4T.device)
    return Batch(
        token_ids_T=ids_T,
        positions_T=positions_T,
        slot_mapping_T=slot_mapping_T,
        slots_T=slots_T,
        slots_R=none,
        starts_R1=none,
        lengths_R=none,
        page_table_RM=none,
        sampled_at=sampled_at,
        num_decodes=0,
        num_decode_tokens=0,
        decode_width=1,
        max_new=0,
        max_length=0,
    )


def gather_chunks(rows: StepRows, slots: Slots, num_pages: int) -> tuple[Tensor, ...]:
    """Gather the same tensors as the kernel for decode rows, for rows of any length."""
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
