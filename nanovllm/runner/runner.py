"""Runner: executes the plan of one step on one device.

Implements engine.executor.Executor. All work is enqueued on one stream, in the order of plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.attention.base import AttentionBackend, Batch, ForwardContext
from nanovllm.experts import ExpertLoad
from nanovllm.kv.below import Below
from nanovllm.models.decoder import Decoder
from nanovllm.plan import AdapterContent, AdapterDone, Masks, Moved, Moves, StepPlan, mode_key
from nanovllm.runner.adapters import AdapterBank
from nanovllm.runner.batch import BatchPrep, RowBuilder, StepRows
from nanovllm.runner.caches import Caches, NoStates, States
from nanovllm.runner.expert_load import ExpertCounter
from nanovllm.runner.graph_set import GraphSet, StepGraphs
from nanovllm.runner.graphs import DecodeGraphs, PiecewiseGraphs, borrowed, largest_graph
from nanovllm.runner.peers_and_disk import PeersAndDisk
from nanovllm.runner.results import DeviceClock, Handle, StepCopy, start_copy
from nanovllm.runner.transfer import Mover, NoTiers
from nanovllm.sampling.base import Sampled, SampleRows
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.vetting import Vetting
from nanovllm.spec.base import Drafter, DraftStep
from nanovllm.spec.model_base import DraftModel, StreamTaps
from nanovllm.transfer.device_pages import OfferedMemory
from nanovllm.transfer.lender import Lender
from nanovllm.transfer.remote_pages import RemotePages
from nanovllm.wire import Generate


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Output of a forward pass. Under a graph, tensors are static and may be padded."""

    batch: Batch
    hidden_SD: Tensor  # normalised; at least one token's, even if no row samples
    logits_SV: Tensor | None  # None if no row samples in this step
    given_TX: Tensor | None = None  # of all tokens: input of a draft model, see spec.model_base
    lane_tokens: int = 0  # as in plan.StepPlan; 0 under a graph


class Written(NamedTuple):
    """Sampled tokens and new drafts, both int32. Under a graph, they are static and may be padded.

    `drafts_RX` is that of plan.StepResult, and None if no drafter has run.
    """

    tokens_RW: Tensor  # each row's new tokens, then -1
    drafts_RX: Tensor | None


class Runner:
    """A model on its device, with the state of its steps: slots, caches, states, graphs."""

    def __init__(
        self,
        model: Decoder,
        prep: BatchPrep,
        sampler: Sampler,
        caches: Caches,
        backend: AttentionBackend,
        drafter: Drafter | None = None,
        states: States | None = None,
        draft_model: DraftModel | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        """`draft_model` is the one that `drafter` runs, whose layers follow those of `model`."""
        self.adapters = adapters
        self.drafter = drafter
        self.draft_model = draft_model
        self.num_drafts = drafter.num_drafts if drafter is not None else 0
        self.model = model
        self.prep = prep
        self.slots = prep.slots
        self.sampler = sampler
        self.caches = caches
        self.states = states or NoStates()
        self.mover: Mover | NoTiers = NoTiers()  # set by build for cache.host_gib
        self.lender: Lender | None = None  # set by build for transfer.role prefill
        self.offered: OfferedMemory | None = None  # likewise; registered as long as this exists
        own, by_layer = len(model.layers), {**caches.by_layer, **self.states.by_layer}
        model.bind_caches({n: cache for n, cache in by_layer.items() if n < own})
        if draft_model is not None:
            draft_model.bind_caches({n - own: c for n, c in by_layer.items() if n >= own})
        self.backend = backend
        self.device = self.slots.device
        counted: list[Any] = [model]
        if draft_model is not None and draft_model.lag == 1:
            counted.append(draft_model)  # a head's layers follow the model's
        self.experts = ExpertCounter(nn.ModuleList(counted), self.device)
        num_slots, width = self.slots.padding, 1 + self.num_drafts
        most_rows = largest_graph(num_slots, width)
        self.builder = RowBuilder(most_rows, num_slots, width, self.device)
        self.graphs = GraphSet(self._graphs(adapted=False), self._graphs(adapted=True))
        self.clock = DeviceClock(self.device)
        self.steps_by_mode: Counter[str] = Counter()
        self.padded_tokens = 0
        self.vetting = Vetting(sampler.vocab_size)

    def _graphs(self, *, adapted: bool) -> StepGraphs:
        """Return graphs that are not captured yet, for steps with or without adapters."""
        builder = self.builder
        forward = partial(self.forward, adapted=adapted)
        hidden = partial(self.hidden, adapted=adapted)
        draw = partial(self.draw_plain, adapted=adapted)
        # Rows have 1 to `width` tokens. With drafts, most have 2 or all.
        per_row = sorted({1, min(2, builder.width), builder.width}, reverse=True)
        without_drafts = None
        if self.draft_model is not None:
            without_drafts = DecodeGraphs(partial(draw, proposes=False), builder)
        return StepGraphs(
            decode=DecodeGraphs(forward, builder, share_outputs),
            mixed=PiecewiseGraphs(hidden, self.slots.padding * builder.width, self.device),
            draw=[DecodeGraphs(draw, builder, tokens_per_row=n) for n in per_row],
            draw_without_drafts=without_drafts,
        )

    def vet(self, request: Generate) -> None:
        """Raise if admission of the request would fail because of its sampling parameters."""
        self.vetting.vet(request)

    @property
    def first_adapters(self) -> Mapping[str, AdapterContent]:
        """The adapters of the start by name."""
        return {} if self.adapters is None else self.adapters.first

    def read_adapter(self, number: int, folder: str, done: AdapterDone) -> None:
        """Start to read an adapter. See engine.executor.AdapterStore."""
        assert self.adapters is not None
        self.adapters.read(number, folder, done)

    def commit_adapter(self, number: int) -> bool:
        """Return True if all ranks have read the adapter. Block until then."""
        assert self.adapters is not None
        return self.adapters.commit(number)

    def drop_adapters(self, numbers: Sequence[int]) -> None:
        """Free the host memory of adapters."""
        assert self.adapters is not None
        self.adapters.drop(numbers)

    def expert_load(self, *, wait: bool) -> ExpertLoad | None:
        """Return the latest load of experts that is available, or with `wait` the present one."""
        return self.experts.newest(wait=wait)

    @property
    def remote(self) -> RemotePages | None:
        """The pages of other engines, on a decode server."""
        below = self.mover.disk
        if isinstance(below, PeersAndDisk):
            return below.remote
        return below if isinstance(below, RemotePages) else None

    @property
    def disk(self) -> Below | None:
        """The tier below host memory, if there is one."""
        return self.mover.disk

    def move(self, moves: Moves) -> None:
        """Start transfers between tiers, after all launched plans."""
        self.mover.move(moves)

    def moved(self) -> list[Moved]:
        """Return the transfers that have ended since the last call."""
        return self.mover.moved()

    def call_when_moved(self, wake: Callable[[], object]) -> None:
        """Call `wake` from any thread after the end of each transfer."""
        self.mover.call_when_moved(wake)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        """Enqueue one step. Do not wait for the device."""
        self.states.apply(plan)
        self.caches.apply(plan)
        self.slots.apply(plan)
        self.sampler.admit(plan.admits)
        rows = self.builder.rows(plan)
        if self.adapters is not None:
            self.adapters.apply(plan)
            rows = replace(rows, adapted=self.adapters.is_used(plan, self.builder.decode_slots))
        gap = self.clock.begin()
        forwarded, graph = self._run(rows, plan.lane_tokens)
        mode = mode_key(graph, plan)
        self.steps_by_mode[mode] += 1
        finish = partial(self.finish, rows, forwarded, plan.masked)
        handle = Handle(plan.step, self.clock, gap, finish, mode=mode)
        if plan.masked or plan.draws_late:
            self.clock.end()
        else:
            handle.sample(None)
        return handle

    @torch.inference_mode()
    def finish(
        self, rows: StepRows, forwarded: Forwarded, masked: list[int], masks: Masks | None
    ) -> StepCopy:
        """Sample, write the tokens to the slots, and start the copy to the host."""
        batch, logits_SV = forwarded.batch, forwarded.logits_SV
        if masked and masks is not None and logits_SV is not None:
            self.sampler.apply_mask(logits_SV, rows.samples_of(masked), masks)
        size = len(batch.token_ids_T), rows.width
        graphs = self.graphs.of(adapted=rows.adapted)
        num_rows = len(rows.slots_R)
        draw = graphs.draw_after(size, forwarded, num_rows=num_rows, proposes=rows.proposes)
        if draw is not None and self.sampler.plain(rows.host_slots):
            written: Written = draw.replay(size)
            return start_copy(rows, written.tokens_RW, written.drafts_RX)
        num_samples = len(rows.host_slots)
        sampled = Sampled(batch.slots_T[:0], None)
        if logits_SV is not None:
            sample_rows = SampleRows(
                batch.sampled(batch.slots_T)[:num_samples],
                batch.sampled(batch.positions_T)[:num_samples] + 1,
                rows.host_slots,
                rows.max_length,
            )
            sampled = self.sampler.sample(logits_SV[:num_samples], sample_rows)
        written = self._write_back(rows, forwarded, sampled.tokens_S)
        return start_copy(rows, written.tokens_RW, written.drafts_RX, sampled.logprobs)

    def draw_plain(
        self, rows: StepRows, *, proposes: bool = True, adapted: bool = False
    ) -> Written:
        """After a replayed forward pass, draw by seed and temperature and write the tokens back.

        Captured as well, because its launches take the host as long as those of the forward pass.
        """
        graphs = self.graphs.of(adapted=adapted).decode
        forwarded = graphs.captured[rows.num_tokens, rows.width].output
        assert isinstance(forwarded, Forwarded) and forwarded.logits_SV is not None
        batch = forwarded.batch
        tokens_S = self.sampler.draw(forwarded.logits_SV, batch.slots_T, batch.positions_T + 1)
        return self._write_back(replace(rows, proposes=proposes), forwarded, tokens_S)

    def _write_back(self, rows: StepRows, forwarded: Forwarded, tokens_S: Tensor) -> Written:
        """Write the drawn tokens to the slots, and let the drafter propose the next ones."""
        drafter, batch = self.drafter, forwarded.batch
        accept = drafter.accept if drafter is not None else None
        tokens_RW = self.prep.write_back(rows, batch, tokens_S, accept)
        if drafter is None or not (rows.proposes or self.draft_model):
            return Written(tokens_RW, None)
        slots, has_lanes = self.slots, self.sampler.shard.mesh.lanes > 1
        # The tokens of a graph are those of all lanes.
        most = max(forwarded.lane_tokens, len(batch.token_ids_T))
        step = DraftStep(
            slots_R=rows.slots_R.where(tokens_RW[:, 0] >= 0, slots.padding),
            rows_R=rows.slots_R,
            lengths_N=slots.lengths_N,
            tokens_NL=slots.tokens_NL,
            pages_NM=slots.pages_NM,
            batch=batch,
            num_tokens=rows.num_tokens,
            proposes=rows.proposes and (forwarded.logits_SV is not None or has_lanes),
            lane_tokens=most if has_lanes else 0,
            given_TX=forwarded.given_TX,
        )
        return Written(tokens_RW, drafter.propose(step))

    def _run(self, rows: StepRows, lane_tokens: int = 0) -> tuple[Forwarded, str]:
        """Replay a graph if one fits, else run eagerly. Return the mode: FULL, PIECEWISE or NONE.

        `lane_tokens` is that of the plan, so that all lanes choose the same mode.
        """
        graphs = self.graphs.of(adapted=rows.adapted)
        size = graphs.fit(rows, max(rows.num_tokens, lane_tokens))
        if not size:
            return self.forward(rows, lane_tokens=lane_tokens), "NONE"
        self.padded_tokens += size - rows.num_tokens
        if rows.is_decode:
            return graphs.decode.replay((size, rows.width)), "FULL"
        return self.forward(rows, size, lane_tokens), "PIECEWISE"

    def forward(
        self, rows: StepRows, size: int = 0, lane_tokens: int = 0, *, adapted: bool = False
    ) -> Forwarded:
        """Run the model with the mixed graph of this size, or eagerly if it is 0.

        `adapted`: also for rows that are not known on the host, as in a capture.
        """
        batch, adapted = self.prep.gather(rows), adapted or rows.adapted
        if (parts := self.states.parts_of(batch)) is not None:
            batch = replace(batch, state_parts=parts)
        ctx = ForwardContext(batch, self.backend.bind(batch), lane_tokens=lane_tokens)
        if size:
            hidden_SD, *inputs = self.graphs.of(adapted=rows.adapted).mixed.replay(size, ctx)
        else:
            hidden_SD, *inputs = self.hidden(ctx, adapted=adapted)
        samples = rows.is_decode or len(rows.host_slots)
        return Forwarded(
            batch=batch,
            hidden_SD=hidden_SD,
            logits_SV=self.model.logits(hidden_SD) if samples else None,
            given_TX=inputs[0] if inputs else None,
            lane_tokens=lane_tokens,
        )

    def hidden(self, ctx: ForwardContext, *, adapted: bool = False) -> tuple[Tensor, ...]:
        """Return hidden_SD, and given_TX for a draft model that takes values of the target.

        Tokens that are not sampled are computed after the last layer's attention only if the draft
        model takes the final hidden states, or the stream after the last layer.
        """
        if adapted and self.adapters is not None:
            ctx = replace(ctx, adapters=self.adapters.rows(ctx.batch))
        ids_T, drafts = ctx.batch.token_ids_T, self.draft_model
        if drafts is None or not drafts.takes_hidden:
            return (self.model(ids_T, ctx),)
        taps, of_all = StreamTaps(drafts.taps), not drafts.taps
        of_all = of_all or drafts.taps[-1] == len(self.model.layers)
        x = self.model(ids_T, replace(ctx, all_hidden=of_all, taps=taps))
        return ctx.batch.sampled(x) if of_all else x, drafts.given(x, taps.streams)


def share_outputs(forwarded: Forwarded) -> Forwarded:
    """Let graphs of all sizes share the memory of outputs, since only one step's are in use."""
    assert forwarded.logits_SV is not None
    return replace(
        forwarded,
        hidden_SD=borrowed(forwarded.hidden_SD),
        logits_SV=borrowed(forwarded.logits_SV),
        given_TX=None if forwarded.given_TX is None else borrowed(forwarded.given_TX),
    )
