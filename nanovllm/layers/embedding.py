"""The vocabulary's vectors, cut over ranks: into the model (embedding) and out of it (head)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear import Linear, Placement
from nanovllm.layers.ops import Ops
from nanovllm.parallel.mesh import Mesh


class Vocabulary(Linear):
    """One vector a token. A model with tied embeddings uses one of these at both ends."""

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh, ops: Ops) -> None:
        span = mesh.span("vocab_size", vocab_size)
        super().__init__(span.count, hidden_size, Placement(0, (("", span),)), ops)
        self.mesh, self.span = mesh, span

    def forward(self, token_ids_T: Tensor) -> Tensor:
        if self.mesh.tp_size == 1:
            return F.embedding(token_ids_T, self.weight)
        local_T = token_ids_T - self.span.start
        elsewhere_T = (local_T < 0) | (local_T >= self.span.count)
        x_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.mesh.all_reduce(x_TD.masked_fill(elsewhere_T[:, None], 0))

    def logits(self, x_SD: Tensor) -> Tensor:
        """logits_SV of the whole vocabulary, on every rank, in x's dtype.

        So every rank draws the same token by itself. Gathering each rank's winner instead, 8 bytes
        a row, will replace it for rows that ask for no more than that.
        """
        return self.mesh.all_gather(self.product(x_SD))
