"""Prompt lookup: propose the tokens after the previous occurrence of a row's latest tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nanovllm.registry import resolve
from nanovllm.spec.base import DraftStep

NGRAM = {
    "torch": "nanovllm_kernels.sampling.ngram_reference:ngram",
    "triton": "nanovllm_kernels.sampling.ngram:ngram",
}


class Ngram:
    accept: tuple[Tensor, Tensor] | None = None

    def __init__(
        self, *, tokens: int, min_match: int, max_match: int, kernel: str, **_: object
    ) -> None:
        self.num_drafts = tokens
        self.min_match, self.max_match = min_match, max_match
        self._ngram: Callable[..., Tensor] = resolve(NGRAM, kernel)

    def propose(self, step: DraftStep) -> Tensor:
        return self._ngram(
            step.slots_R,
            step.lengths_N,
            step.tokens_NL,
            num_drafts=self.num_drafts,
            min_match=self.min_match,
            max_match=self.max_match,
        )
