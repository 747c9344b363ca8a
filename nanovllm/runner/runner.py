"""Runner: the order of one step on one device, and nothing else.

Implements engine.executor.Executor. Everything runs on one stream, in the order of the plans.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, Batch, ForwardContext, PagedKV
from nanovllm.models.decoder import Decoder
from nanovllm.plan import StepPlan
from nanovllm.runner.batch import BatchPrep, RowBuilder, StepRows
from nanovllm.runner.graphs import DecodeGraphs
from nanovllm.runner.results import Handle, start_copy
from nanovllm.runner.slots import Slots
from nanovllm.sampling.base import Sampled, SampleRows
from nanovllm.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a forward pass leaves for sampling. Under a graph: static, possibly padded."""

    batch: Batch
    logits_SV: Tensor | None  # None: no row samples in this step


class Runner:
    def __init__(
        self,
        model: Decoder,
        slots: Slots,
        prep: BatchPrep,
        sampler: Sampler,
        caches: tuple[PagedKV, ...],
        backend: AttentionBackend,
        device: torch.device,
    ) -> None:
        self.model = model
        self.slots = slots
        self.prep = prep
        self.sampler = sampler
        self.caches = caches
        self.backend = backend
        self.device = device
        self.builder = RowBuilder(slots.dead, slots.dead, device)
        self.graphs = DecodeGraphs(self.forward, self.builder.static_slots_R)
        self.steps_by_mode: Counter[str] = Counter()
        self.padded_tokens = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        """Enqueue one step. Nothing here waits for the device."""
        self.slots.apply(plan)
        self.sampler.admit(plan.admits)
        rows = self.builder.rows(plan)
        forwarded = self._run(rows)
        lengths_R = forwarded.batch.lengths_R[: len(rows.slots_R)]
        slots_S, lengths_S = rows.slots_R, lengths_R
        if rows.sampled_rows_S is not None:
            slots_S, lengths_S = slots_S[rows.sampled_rows_S], lengths_R[rows.sampled_rows_S]
        drawn = SampleRows(slots_S, lengths_S.long(), rows.sampled_slots, rows.max_length)
        sampled = self._sample(forwarded.logits_SV, drawn)
        self.prep.settle(rows.slots_R, lengths_R, slots_S, drawn.positions_S, sampled.tokens_S)
        return start_copy(plan.step, sampled, self.device)

    def _sample(self, logits_SV: Tensor | None, rows: SampleRows) -> Sampled:
        if logits_SV is None:
            return Sampled(rows.slots_S, None)  # of no rows
        return self.sampler.sample(logits_SV[: len(rows.slots_S)], rows)

    def _run(self, rows: StepRows) -> Forwarded:
        """Replay a graph where one fits, else run eagerly."""
        decode = rows.counts_R is None
        size = self.graphs.fit(len(rows.slots_R)) if decode else None
        mode = "NONE" if size is None else "FULL"
        self.steps_by_mode[f"{mode}/{'decode' if decode else 'mixed'}"] += 1
        if size is None:
            return self.forward(rows)
        self.padded_tokens += size - len(rows.slots_R)
        replayed = self.graphs.replay(size)
        assert isinstance(replayed, Forwarded)
        return replayed

    def forward(self, rows: StepRows) -> Forwarded:
        batch = self.prep.gather(rows)
        ctx = ForwardContext(batch, self.caches, self.backend.bind(batch))
        hidden_TD = self.model(batch.token_ids_T, ctx)
        logits_SV = self.model.logits(hidden_TD, ctx) if len(batch.sampled_at) else None
        return Forwarded(batch, logits_SV)
