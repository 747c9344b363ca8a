"""bad_words: mask a token that would complete a forbidden word.

Decision: as in vLLM, only output tokens count. A word that began in the prompt may be completed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.base import PerSlot, SampleRows, Wanted
from nanovllm.sampling.columns import Fields, indices, upload

ANY = -1  # matches any token; pads words on the left
NONE = -2  # matches no token; stands for positions before the output


class BadWords:
    """Forbidden words by slot: K words per slot, L tokens per word, both the maximum so far."""

    FIELDS: Fields = ()

    def __init__(self, per_slot: PerSlot) -> None:
        self.tokens_NL, self.prompt_lengths_N = per_slot.tokens_NL, per_slot.prompt_lengths_N
        self.vocab_size, self.shard = per_slot.shard.span.full, per_slot.shard
        self.counts = np.zeros(len(self.tokens_NL), np.int32)
        self.words_NKL = self.tokens_NL.new_full((len(self.tokens_NL), 0, 1), ANY)

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            words = [w for w in admit.sampling.bad_words if 0 <= min(w) <= max(w) < self.vocab_size]
            self.counts[admit.slot] = len(words)
            if not words:
                continue
            self._widen(len(words), max(map(len, words)))
            padded = np.full(self.words_NKL.shape[1:], ANY, np.int32)
            for row, word in zip(padded, words, strict=False):
                row[-len(word) :] = word
            self.words_NKL[admit.slot] = upload(padded, self.words_NKL.device)

    def wanted(self, host_slots: Int32) -> Wanted:
        return self.counts[host_slots] > 0

    def apply(self, logits_SV: Tensor, rows: SampleRows) -> None:
        at_W = indices(self.wanted(rows.host_slots), logits_SV.device)
        slots_W, lengths_W1 = rows.slots_S[at_W], rows.positions_S[at_W, None]
        words_WKL = self.words_NKL[slots_W]
        before_WKX, last_WK = words_WKL[..., :-1], words_WKL[..., -1].long()
        num_before = before_WKX.shape[-1]
        index_WX = lengths_W1 + torch.arange(-num_before, 0, device=at_W.device)
        is_output_WX = index_WX >= self.prompt_lengths_N[slots_W, None]
        tokens_WX = self.tokens_NL[slots_W[:, None], index_WX.clamp(min=0)]
        tail_W1X = tokens_WX.where(is_output_WX, NONE)[:, None]
        completes_WK = ((before_WKX == tail_W1X) | (before_WKX == ANY)).all(-1) & (last_WK >= 0)
        bans_WK = torch.where(completes_WK, -torch.inf, 0.0)
        columns_WK, bans_WK = self.shard.own(last_WK.clamp(min=0), bans_WK)
        at_X = (at_W[:, None] * logits_SV.shape[1] + columns_WK).flatten()
        logits_SV.view(-1).scatter_add_(0, at_X, bans_WK.flatten())

    def _widen(self, num_words: int, num_tokens: int) -> None:
        _, old_words, old_tokens = self.words_NKL.shape
        words, tokens = max(num_words - old_words, 0), max(num_tokens - old_tokens, 0)
        if words or tokens:
            pad = (tokens, 0, 0, words)  # words are right-aligned
            self.words_NKL = torch.nn.functional.pad(self.words_NKL, pad, value=ANY)
