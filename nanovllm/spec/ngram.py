"""Prompt lookup: propose the tokens after the previous occurrence of a row's latest tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nanovllm.registry import resolve

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
        self.matches = min_match, max_match
        self._ngram: Callable[..., Tensor] = resolve(NGRAM, kernel)

    def propose(self, slots_R: Tensor, lengths_N: Tensor, tokens_NL: Tensor) -> Tensor:
        return self._ngram(slots_R, lengths_N, tokens_NL, self.num_drafts, *self.matches)
