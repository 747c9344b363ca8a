"""The vocabulary's vectors, cut over ranks: into the model (embedding) and out of it (head)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nanovllm.dist.mesh import Mesh
from nanovllm.layers.linear import Layer, Placement, parameter
from nanovllm.layers.ops import Ops


class Vocabulary(Layer):
    """One vector a token. A model with tied embeddings uses one of these at both ends."""

    def __init__(self, vocab_size: int, width: int, mesh: Mesh, ops: Ops) -> None:
        super().__init__()
        self.mesh, self.ops = mesh, ops
        self.span = mesh.span("vocab_size", vocab_size)
        self.weight = parameter(self.span.count, width)
        self.placements = {"weight": Placement(0, (("", self.span),))}

    def forward(self, token_ids_T: Tensor) -> Tensor:
        if self.mesh.tp_size == 1:
            return F.embedding(token_ids_T, self.weight)
        local_T = token_ids_T - self.span.start
        elsewhere_T = (local_T < 0) | (local_T >= self.span.count)
        x_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.mesh.all_reduce(x_TD.masked_fill(elsewhere_T[:, None], 0))

    def logits(self, x_SD: Tensor) -> Tensor:
        """Of this rank's share of the vocabulary, in x's dtype: samplers never need all of it."""
        return self.ops.linear(x_SD, self.weight)
