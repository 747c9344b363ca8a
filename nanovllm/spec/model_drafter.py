"""Drafts by a model: a first pass over the rows of the step, then passes of one token a row.

Let q be the tokens of a request that were computed before the step, and c the tokens that its row
fed. Its latest token after the step is t[L]. Drafts 1 to D follow at L + 1 to L + D.

    1. first pass   feeds t[q + lag] ... t[q + c]; the state at t[L] predicts draft 1
    2. pass i       feeds draft i at L + i; its state predicts draft i + 1

The host does not need L: it is between q + 1 and q + c, and tokens after it are computed in vain.
Their keys and values are overwritten before anything reads them. The page table of a slot ends with
entries 0. So keys and values that no page has room for go to the padding page. The first pass of a
later step feeds these tokens again.

Decision: drafts are drawn with the target's own noise, which is a function of seed, position and
token. At equal distributions, the draft then equals the target's draw at any temperature.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm.attention.base import AttentionBackend, Batch, ForwardContext
from nanovllm.config import Speculate
from nanovllm.sampling.sampler import Sampler
from nanovllm.spec.base import DraftStep, coins
from nanovllm.spec.model_base import DraftModel


class ModelDrafter:
    """Implements spec.base.Drafter."""

    def __init__(
        self,
        model: DraftModel,
        backend: AttentionBackend,
        sampler: Sampler,
        *,
        options: Speculate,
        page_tokens: int,
        max_tokens: int,
    ) -> None:
        """`max_tokens` is the maximum length of a request."""
        self.model, self.backend = model, backend
        self.num_drafts = options.tokens
        self.accept = coins(options.accept, sampler.seeds_N) if options.accept else None
        self.page_tokens, self.max_tokens = page_tokens, max_tokens
        self._draw = sampler.draw if options.drafts_by == "shared" else sampler.argmax

    def propose(self, step: DraftStep) -> Tensor:
        slots_R, padding = step.slots_R, len(step.lengths_N) - 1
        first, given_TX = self._first(step), step.given_TX
        given_TX = given_TX[: step.num_tokens] if given_TX is not None else None
        state_RX = self._pass(step, first, given_TX)
        drawing_R1 = (slots_R != padding).to(torch.int32)[:, None]
        if not step.proposes:
            return 0 * drawing_R1.expand(-1, 1 + self.num_drafts)
        newest_R, drafts = step.lengths_N[slots_R].long(), list[Tensor]()
        for nth in range(1, 1 + self.num_drafts):
            if drafts:
                batch = self._next(step, drafts[-1], newest_R + nth - 1)
                state_RX = self._pass(step, batch, state_RX)
            logits_RV = self.model.logits(state_RX)
            drafts.append(self._draw(logits_RV, slots_R, newest_R + nth).clamp(min=0))
        drafts_RD = torch.stack(drafts, 1).to(torch.int32)
        steps_D = torch.arange(1, 1 + self.num_drafts, device=slots_R.device)
        step.tokens_NL[slots_R[:, None], newest_R[:, None] + steps_D] = drafts_RD
        step.tokens_NL[-1].zero_()
        return torch.cat((drawing_R1 * self.num_drafts, drafts_RD), 1)

    def _pass(self, step: DraftStep, batch: Batch, given_TX: Tensor | None) -> Tensor:
        """Run the model and return the state of the sampled tokens."""
        ctx = ForwardContext(batch, self.backend.bind(batch), lane_tokens=step.lane_tokens)
        given_TX = given_TX if self.model.takes_hidden else None
        return self.model(batch.token_ids_T, given_TX, ctx)

    def _first(self, step: DraftStep) -> Batch:
        """Return the rows of the first pass: those of the step, with 1 - lag tokens more each."""
        target, rows_R, lag = step.batch, step.rows_R, self.model.lag
        num_rows, num_extra, device = len(rows_R), 1 - lag, rows_R.device
        num_tokens = step.num_tokens + num_extra * num_rows
        fed_R = target.starts_R1[: num_rows + 1].diff()
        before_R = target.lengths_R[:num_rows] - fed_R
        starts_R1 = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        torch.cumsum(fed_R + num_extra, 0, dtype=torch.int32, out=starts_R1[1:])
        token_T = torch.arange(num_tokens, dtype=torch.int32, device=device)
        row_T = torch.searchsorted(starts_R1[1:], token_T, right=True)  # num_rows for padding
        padding = len(step.lengths_N) - 1
        slots_T = functional.pad(rows_R, (0, 1), value=padding)[row_T]
        offsets_T = functional.pad(before_R, (0, 1))[row_T] + token_T - starts_R1[row_T]
        positions_T = offsets_T.where(row_T < num_rows, 0).long()
        last_R = starts_R1[:-1] + step.lengths_N[rows_R] - lag - before_R
        is_decode = target.num_decodes >= num_rows
        decoded = (
            num_tokens if is_decode else target.num_decode_tokens + num_extra * target.num_decodes
        )
        rows = replace(
            target,
            token_ids_T=step.tokens_NL[slots_T, positions_T + lag].long(),
            slots_R=rows_R,
            starts_R1=starts_R1,
            lengths_R=before_R + fed_R + num_extra,
            sampled_at=last_R.long().clamp(0, num_tokens - 1),
            num_decodes=min(target.num_decodes, num_rows),
            num_decode_tokens=decoded,
            decode_width=target.decode_width + num_extra,
            max_new=target.max_new + num_extra,
            max_length=target.max_length + num_extra,
        )
        return self._placed(rows, step, slots_T, positions_T)

    def _next(self, step: DraftStep, tokens_R: Tensor, at_R: Tensor) -> Batch:
        """Return the rows of a later pass: one token each, tokens_R, at index at_R of its text."""
        num_rows = len(tokens_R)
        positions_R = (at_R - self.model.lag).clamp(min=0)
        rows = replace(
            step.batch,
            token_ids_T=tokens_R,
            slots_R=step.slots_R,
            starts_R1=torch.arange(num_rows + 1, dtype=torch.int32, device=at_R.device),
            lengths_R=positions_R.to(torch.int32) + 1,
            sampled_at=None,
            num_decodes=num_rows,
            num_decode_tokens=num_rows,
            decode_width=1,
            max_new=1,
            max_length=step.batch.max_length + self.num_drafts,
        )
        return self._placed(rows, step, step.slots_R, positions_R)

    def _placed(self, rows: Batch, step: DraftStep, slots_T: Tensor, positions_T: Tensor) -> Batch:
        """Return the rows with the positions, slots and places in the cache of their tokens.

        The padding page takes keys and values of positions beyond the longest request.
        """
        size, pages_NM = self.page_tokens, step.pages_NM
        max_length = min(rows.max_length, self.max_tokens)
        inside_T = positions_T < self.max_tokens
        clamped_T = positions_T.clamp(max=self.max_tokens - 1)
        slot_mapping_T = pages_NM[slots_T, clamped_T // size].long() * size + clamped_T % size
        return replace(
            rows,
            positions_T=clamped_T,
            slot_mapping_T=slot_mapping_T.where(inside_T, clamped_T % size),
            slots_T=slots_T,
            lengths_R=rows.lengths_R.clamp(max=self.max_tokens),
            page_table_RM=pages_NM[rows.slots_R, : -(-max_length // size)],
            max_length=max_length,
            planned=(),
            is_draft=True,
        )
