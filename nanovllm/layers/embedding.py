"""Token embedding and output head, cut over ranks by vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear import Linear, Placement
from nanovllm.layers.ops import Ops
from nanovllm.parallel.cut import span_of_vocabulary
from nanovllm.parallel.mesh import Mesh


class VocabEmbedding(Linear):
    """One vector for each token of this rank's `span`; its product is the logits of these tokens.

    A model with tied embeddings uses one object as embedding and head.
    """

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh, ops: Ops) -> None:
        span = span_of_vocabulary(mesh, vocab_size)
        super().__init__(span.count, hidden_size, Placement(0, (("", span),)), ops)
        self.mesh, self.span = mesh, span

    def forward(self, token_ids_T: Tensor) -> Tensor:
        if self.span.is_whole:
            return F.embedding(token_ids_T, self.weight)
        local_T = token_ids_T - self.span.start
        elsewhere_T = (local_T < 0) | (local_T >= self.span.count)
        x_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.mesh.all_reduce(x_TD.masked_fill(elsewhere_T[:, None], 0))
