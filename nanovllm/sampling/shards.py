"""Sampling over ranks, each of which has the logits of a part of the vocabulary.

Decision: operations on single columns are computed by each rank on its own columns. For plain rows,
ranks exchange their best candidates, 8 bytes a row. Only rows with thresholds or log-probabilities,
which depend on all columns, are gathered. The set of these rows follows from the requests'
parameters, never from logits, so that all ranks take part in the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm.parallel.cut import span_of_vocabulary
from nanovllm.parallel.mesh import Mesh
from nanovllm.registry import resolve

DRAWS = {
    "torch": "nanovllm_kernels.sampling.reference:draw",
    "triton": "nanovllm_kernels.sampling.draw:draw",
}
WINNERS = {
    "torch": "nanovllm_kernels.sampling.reference:winners",
    "triton": "nanovllm_kernels.sampling.draw:winners",
}
BEST = {
    "torch": "nanovllm_kernels.sampling.reference:best",
    "triton": "nanovllm_kernels.sampling.draw:best",
}


MOST_ROWS = 128  # rows gathered at once, which bounds the memory


class Shard:
    """The part of the vocabulary (`span`) whose logits this rank has."""

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        self.mesh = mesh
        self.span = span_of_vocabulary(mesh, vocab_size)
        ranks = (Mesh(rank, mesh.tp_size) for rank in range(mesh.tp_size))
        self.counts = [span_of_vocabulary(rank, vocab_size).count for rank in ranks]

    @property
    def words(self) -> slice:
        """This rank's words of a grammar mask. Sampling blocks consist of whole words."""
        return slice(self.span.start // 32, -(-(self.span.start + self.span.count) // 32))

    def own(self, tokens: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens as columns of the shard, and their values.

        Tokens of other ranks become column 0 with the value 0 or False.
        """
        if self.span.is_whole:
            return tokens, values
        columns = tokens - self.span.start
        elsewhere = (columns < 0) | (columns >= self.span.count)
        return columns.masked_fill(elsewhere, 0), values.masked_fill(elsewhere, 0)

    def whole_rows(self, logits_SV: Tensor, at_W: Tensor) -> Tensor:
        """Return logits_WV of the rows at_W over the whole vocabulary. Collective."""
        logits_WV = logits_SV[at_W]
        if self.span.is_whole:
            return logits_WV
        padding = max(self.counts) - self.span.count
        shares_IWV = self.mesh.gather(functional.pad(logits_WV, (0, padding)))
        shares = zip(shares_IWV, self.counts, strict=True)
        return torch.cat([share_WV[:, :count] for share_WV, count in shares], 1)

    def draw(self, kernel: str) -> Callable[..., Tensor]:
        """Return a function that draws tokens, with the arguments of the kernel `draw`."""
        if self.span.is_whole:
            drawn: Callable[..., Tensor] = resolve(DRAWS, kernel)
            return drawn
        winners, best = resolve(WINNERS, kernel), resolve(BEST, kernel)

        def draw_together(*args: Tensor | None) -> Tensor:
            tokens_S: Tensor = best(self.mesh.gather(winners(*args, self.span.start)))
            return tokens_S

        return draw_together
