"""Runner: the order of one step on one device, and nothing else.

Implements engine.executor.Executor. Everything runs on one stream, in the order of the plans.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, Batch, ForwardContext
from nanovllm.models.decoder import Decoder
from nanovllm.plan import Masks, StepPlan, mode_key
from nanovllm.runner.batch import BatchPrep, RowBuilder, StepRows
from nanovllm.runner.caches import Caches
from nanovllm.runner.graphs import DecodeGraphs, borrowed
from nanovllm.runner.piecewise import PiecewiseGraphs
from nanovllm.runner.results import Copy, DeviceClock, Handle, start_copy
from nanovllm.runner.slots import Slots
from nanovllm.sampling.base import Sampled, SampleRows
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.vetting import Vetting


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
        caches: Caches,
        backend: AttentionBackend,
        device: torch.device,
    ) -> None:
        self.model = model
        self.slots = slots
        self.prep = prep
        self.sampler = sampler
        self.caches = caches
        model.bind_caches(caches.by_layer)
        self.backend = backend
        self.device = device
        self.builder = RowBuilder(slots.padding, slots.padding, device)
        self.graphs = DecodeGraphs(self.forward, self.builder.static_slots_R, sharing_logits)
        self.tails = DecodeGraphs(self.draw_plainly, self.builder.static_slots_R)
        self.piecewise = PiecewiseGraphs(self.hidden, slots.padding, device)
        self.clock = DeviceClock(device)
        self.steps_by_mode: Counter[str] = Counter()
        self.padded_tokens = 0
        self.vet = Vetting(sampler.vocab_size).vet

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        """Enqueue one step. Nothing here waits for the device."""
        refuse_unknown(plan)
        self.caches.apply(plan)
        self.slots.apply(plan)
        self.sampler.admit(plan.admits)
        rows = self.builder.rows(plan)
        gap = self.clock.begin()
        forwarded, mode = self._run(rows)
        self.steps_by_mode[mode_key(mode, plan)] += 1
        finish = partial(self._finish, rows, forwarded, plan.masked)
        handle = Handle(plan.step, self.clock, gap, finish)
        if plan.masked:
            self.clock.end()
        else:
            handle.sample(None)
        return handle

    @torch.inference_mode()
    def _finish(
        self, rows: StepRows, forwarded: Forwarded, masked: list[int], masks: Masks | None
    ) -> Copy:
        """Sample, and bring the outcome to the slots and on its way to the host."""
        size = forwarded.batch.num_rows
        if masks is not None and forwarded.logits_SV is not None:
            self.sampler.apply_mask(forwarded.logits_SV, masked, masks)
        if (
            rows.counts_R is None
            and size in self.tails.captured
            and self.sampler.plain(rows.sampled_slots)
        ):
            tokens_R = self.tails.replay(size)
            assert isinstance(tokens_R, Tensor)
            return start_copy(Sampled(tokens_R[: len(rows.slots_R)], None))
        lengths_R = forwarded.batch.lengths_R[: len(rows.slots_R)]
        slots_S, lengths_S = rows.slots_R, lengths_R
        if rows.sampled_rows_S is not None:
            slots_S, lengths_S = slots_S[rows.sampled_rows_S], lengths_R[rows.sampled_rows_S]
        drawn = SampleRows(slots_S, lengths_S.long(), rows.sampled_slots, rows.max_length)
        if forwarded.logits_SV is None:
            sampled = Sampled(slots_S, None)  # of no rows
        else:
            logits_SV = forwarded.logits_SV[: len(slots_S)]
            sampled = self.sampler.sample(logits_SV, drawn)
        self.prep.write_back(rows.slots_R, lengths_R, slots_S, drawn.positions_S, sampled.tokens_S)
        return start_copy(sampled)

    def draw_plainly(self, rows: StepRows) -> Tensor:
        """Behind a replayed forward pass: tokens by seed and temperature alone, and written.

        Captured too, because its launches cost the host as much as all of the forward pass.
        """
        forwarded = self.graphs.captured[len(rows.slots_R)].output
        assert isinstance(forwarded, Forwarded) and forwarded.logits_SV is not None
        lengths_R = forwarded.batch.lengths_R
        positions_R = lengths_R.long()
        tokens_R = self.sampler.draw(forwarded.logits_SV, rows.slots_R, positions_R)
        self.prep.write_back(rows.slots_R, lengths_R, rows.slots_R, positions_R, tokens_R)
        return tokens_R.to(torch.int32)

    def _run(self, rows: StepRows) -> tuple[Forwarded, str]:
        """Replay a graph where one fits, else run eagerly. Says which: FULL, PIECEWISE or NONE."""
        decode = rows.counts_R is None
        size = (self.graphs if decode else self.piecewise).fit(rows.num_tokens)
        if size is None:
            return self.forward(rows), "NONE"
        self.padded_tokens += size - rows.num_tokens
        if not decode:
            return self.forward(rows, size), "PIECEWISE"
        replayed = self.graphs.replay(size)
        assert isinstance(replayed, Forwarded)
        return replayed, "FULL"

    def why_eager(self, rows: StepRows) -> str | None:
        """Why a step of these rows replays nothing; None: it does."""
        decode = rows.counts_R is None
        graphs = self.graphs if decode else self.piecewise
        if not graphs.captured:
            return "no graph was captured"
        if graphs.fit(rows.num_tokens) is None:
            count = f"{rows.num_tokens} {'rows' if decode else 'tokens'}"
            return f"{count} are more than the largest graph's {max(graphs.captured)}"
        return None

    def forward(self, rows: StepRows, size: int | None = None) -> Forwarded:
        """Launch by launch, or the piecewise graphs of this size around attention."""
        batch = self.prep.gather(rows)
        ctx = ForwardContext(batch, self.backend.bind(batch))
        hidden_SD = self.piecewise.replay(size, ctx) if size else self.hidden(ctx)
        samples = rows.counts_R is None or len(rows.sampled_slots)
        return Forwarded(batch, self.model.logits(hidden_SD) if samples else None)

    def hidden(self, ctx: ForwardContext) -> Tensor:
        hidden_SD: Tensor = self.model(ctx.batch.token_ids_T, ctx)
        return hidden_SD


def refuse_unknown(plan: StepPlan) -> None:
    """Raises ValueError if the plan asks for what this runner does not do."""
    states = [a.restore_from for a in plan.admits] + [c.save_to for c in plan.chunks]
    if plan.num_drafts or any(state >= 0 for state in states):
        raise ValueError(f"plan {plan.step} has drafts or recurrent states, which do not exist yet")


def sharing_logits(forwarded: Forwarded) -> Forwarded:
    """Graphs of all sizes leave their logits in the same memory: one step's are of use."""
    assert forwarded.logits_SV is not None
    return replace(forwarded, logits_SV=borrowed(forwarded.logits_SV))
