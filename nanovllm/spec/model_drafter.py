"""Drafts by a model: a first pass over the rows of the step, then passes of one token a row.

Let q be the tokens of a request that were computed before the step, and c the tokens that its row
fed. Its latest token after the step is t[L]. Drafts 1 to D follow at L + 1 to L + D.

    1. first pass   feeds t[q + lag] ... t[q + c]; the state at t[L] predicts draft 1
    2. pass i       feeds draft i at L + i; its state predicts draft i + 1

The host does not need L: it is between q + 1 and q + c, and tokens after it are computed in vain.
Their keys and values are overwritten before anything reads them. The page table of a slot ends with
entries 0. So keys and values that no page has room for go to the padding page. The first pass of a
later step feeds these tokens again.

One kernel prepares each pass. That of pass i + 1 also stores draft i, and runs once more for the
last draft. All passes of a step share one page table, that of all rows. A row that drew no token
has the padding slot in later passes, reads in vain, and writes to the padding page.

Decision: drafts are drawn with the target's own noise, which is a function of seed, position and
token. At equal distributions, the draft then equals the target's draw at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, Batch, ForwardContext
from nanovllm.config import Speculate
from nanovllm.registry import resolve
from nanovllm.sampling.sampler import Sampler
from nanovllm.spec.base import DraftStep, coins
from nanovllm.spec.model_base import DraftModel

FIRST_ROWS = {
    "torch": "nanovllm_kernels.sampling.draft_reference:first_rows",
    "triton": "nanovllm_kernels.sampling.draft_rows:first_rows",
}
LATER_ROWS = {
    "torch": "nanovllm_kernels.sampling.draft_reference:later_rows",
    "triton": "nanovllm_kernels.sampling.draft_rows:later_rows",
}


class ModelDrafter:
    """Implements spec.base.Drafter."""

    def __init__(
        self,
        model: DraftModel,
        backend: AttentionBackend,
        sampler: Sampler,
        *,
        options: Speculate,
        kernel: str,
        page_tokens: int,
        max_tokens: int,
    ) -> None:
        """`kernel` is "torch" or "triton". `max_tokens` is the maximum length of a request."""
        self.model, self.backend = model, backend
        self.num_drafts = options.tokens
        self.accept = coins(options.accept, sampler.seeds_N) if options.accept else None
        self.page_tokens, self.max_tokens = page_tokens, max_tokens
        self._draw = sampler.draw if options.drafts_by == "shared" else sampler.argmax
        self._first_rows: Callable[..., tuple[Tensor, ...]] = resolve(FIRST_ROWS, kernel)
        self._later_rows: Callable[..., tuple[Tensor, ...]] = resolve(LATER_ROWS, kernel)

    def propose(self, step: DraftStep) -> Tensor:
        batch, draft_at_R = self._first(step)
        given_TX = step.given_TX[: step.num_tokens] if step.given_TX is not None else None
        state_RX = self._pass(step, batch, given_TX)
        slots_R, shape = step.slots_R, (len(step.slots_R), 1 + self.num_drafts)
        if not step.proposes:
            return torch.zeros(shape, dtype=torch.int32, device=slots_R.device)
        drafts_RX = torch.empty(shape, dtype=torch.int32, device=slots_R.device)
        for nth in range(1, 1 + self.num_drafts):
            if nth > 1:
                state_RX = self._pass(step, batch, state_RX)
            drawn_R = self._draw(self.model.logits(state_RX), slots_R, draft_at_R)
            batch, draft_at_R = self._later(step, batch, drawn_R, nth=nth, drafts_RX=drafts_RX)
        return drafts_RX

    def _pass(self, step: DraftStep, batch: Batch, given_TX: Tensor | None) -> Tensor:
        """Run the model and return the state of the sampled tokens."""
        ctx = ForwardContext(batch, self.backend.bind(batch), lane_tokens=step.lane_tokens)
        given_TX = given_TX if self.model.takes_hidden else None
        return self.model(batch.token_ids_T, given_TX, ctx)

    def _first(self, step: DraftStep) -> tuple[Batch, Tensor]:
        """Return the rows of the first pass: those of the step, with 1 - lag tokens more each.

        Also return the index of draft 1 in the text of each row.
        """
        target, num_rows, num_extra = step.batch, len(step.rows_R), 1 - self.model.lag
        num_tokens = step.num_tokens + num_extra * num_rows
        max_length = min(target.max_length + self.num_drafts, self.max_tokens)  # of all passes
        inputs = self._first_rows(
            slots_R=step.rows_R,
            starts_R1=target.starts_R1[: num_rows + 1],
            lengths_R=target.lengths_R[:num_rows],
            lengths_N=step.lengths_N,
            tokens_NL=step.tokens_NL,
            pages_NM=step.pages_NM,
            lag=self.model.lag,
            page_tokens=self.page_tokens,
            max_tokens=self.max_tokens,
            num_pages=-(-max_length // self.page_tokens),
            num_tokens=num_tokens,
        )
        ids_T, positions_T, slot_mapping_T, slots_T, *of_rows = inputs
        starts_R1, lengths_R, sampled_R, draft_at_R, table_RM = of_rows
        is_decode = target.num_decodes >= num_rows
        decoded = (
            num_tokens if is_decode else target.num_decode_tokens + num_extra * target.num_decodes
        )
        batch = replace(
            target,
            token_ids_T=ids_T,
            positions_T=positions_T,
            slot_mapping_T=slot_mapping_T,
            slots_T=slots_T,
            slots_R=step.rows_R,
            starts_R1=starts_R1,
            lengths_R=lengths_R,
            page_table_RM=table_RM,
            sampled_at=sampled_R,
            num_decodes=min(target.num_decodes, num_rows),
            num_decode_tokens=decoded,
            decode_width=target.decode_width + num_extra,
            max_new=target.max_new + num_extra,
            max_length=max_length,
            planned=(),
            is_draft=True,
        )
        return batch, draft_at_R

    def _later(
        self, step: DraftStep, before: Batch, drawn_R: Tensor, *, nth: int, drafts_RX: Tensor
    ) -> tuple[Batch, Tensor]:
        """Store draft `nth`. Return the rows of the pass that feeds it, one token each.

        `before` are the rows of the pass before. Also return the index of draft `nth` + 1.
        """
        ids_R, positions_R, slot_mapping_R, starts_R1, lengths_R, draft_at_R = self._later_rows(
            slots_R=step.slots_R,
            drawn_R=drawn_R,
            nth=nth,
            lengths_N=step.lengths_N,
            tokens_NL=step.tokens_NL,
            pages_NM=step.pages_NM,
            drafts_RX=drafts_RX,
            lag=self.model.lag,
            page_tokens=self.page_tokens,
            max_tokens=self.max_tokens,
        )
        batch = replace(
            before,
            token_ids_T=ids_R,
            positions_T=positions_R,
            slot_mapping_T=slot_mapping_R,
            slots_T=step.slots_R,
            slots_R=step.slots_R,
            starts_R1=starts_R1,
            lengths_R=lengths_R,
            sampled_at=None,
            num_decodes=len(ids_R),
            num_decode_tokens=len(ids_R),
            decode_width=1,
            max_new=1,
        )
        return batch, draft_at_R
