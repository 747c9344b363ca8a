"""Request state on the device: one row per slot, and a padding slot after the last.

Padding rows of a graph use the padding slot, whose length stays 0 and whose pages are page 0.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.plan import Int32, StepPlan
from nanovllm.runner.upload import upload_together


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
        sent = upload_together(
            [slots, cached, prompts, joined(token_at), joined(known), joined(page_at), pages],
            self.device,
        )
        slots_N, cached_N, prompts_N, token_at_T, tokens_T, page_at_P, pages_P = sent
        self.pages_NM.view(-1).index_copy_(0, page_at_P.long(), pages_P)
        if plan.admits:
            at_N = slots_N.long()
            self.tokens_NL.view(-1).index_copy_(0, token_at_T.long(), tokens_T)
            self.lengths_N.index_copy_(0, at_N, cached_N)
            self.prompt_lengths_N.index_copy_(0, at_N, prompts_N)


def arange(count: int) -> Int32:
    return np.arange(count, dtype=np.int32)


def joined(arrays: list[Int32]) -> Int32:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
