"""Base of draft heads, which draft from the hidden states of a target model.

A head runs over pairs. Pair p is the embedding of the token at p + 1 and the target's hidden state
at p, and its logits are for the token at p + 2. The pair of a draft has the state of the previous
pass in place of the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from nanovllm.attention.base import ForwardContext
from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.fp8 import Fp8Copy
from nanovllm.layers.linear import Layer, Linear, Placement
from nanovllm.layers.ops import Ops
from nanovllm.models.decoder import Decoder, Rule
from nanovllm.parallel.mesh import Span

log = logging.getLogger("engine")


class DraftHead(Layer):
    """A head with layers of its own, which uses the embedding and the output head of its target.

    Implements spec.model_base.DraftModel. Each instance has WEIGHTS, since names depend on files.
    """

    WEIGHTS: Sequence[Rule]
    LESS_ONE: str = "-"  # pattern of norm weights that are stored as weight - 1
    IGNORED: Sequence[str] = ()  # names of tensors that may be present unused
    lag = 1
    taps: Sequence[int] = ()
    takes_hidden = True
    layers: nn.ModuleList

    def __init__(self, target: Decoder, *, fp8_head: bool = False) -> None:
        """`fp8_head`: logits of drafts are read from an fp8 copy of the target's output head."""
        super().__init__()
        self._shared = target.embed, target.head  # in a tuple, so that they are no submodules
        self.head_copy = Fp8Copy(target.head) if fp8_head else None

    @property
    def embedding(self) -> VocabEmbedding:
        return self._shared[0]

    @property
    def output(self) -> nn.Module:
        return self._shared[1] if self.head_copy is None else self.head_copy

    @property
    def read_by_pass(self) -> Sequence[nn.Module]:
        return (self.layers,)

    @property
    def read_by_given(self) -> Sequence[nn.Module]:
        return ()

    def bind_caches(self, caches: Mapping[int, Any]) -> None:
        """Set the cache of each layer of the head. It may replace an earlier one."""
        for layer, cache in caches.items():
            cast("Any", self.layers[layer]).attn.bind(cache)

    def logged(self, fill: Callable[[], None]) -> Callable[[], None]:
        """Return `fill`, followed by the log of the size of an fp8 copy, if there is one."""

        def fill_and_log() -> None:
            fill()
            if self.head_copy is not None:
                text = "drafts read an fp8 copy of the output head: %.2f GB (speculate.dtype)"
                log.info(text, self.head_copy.num_bytes / 1e9)

        return fill_and_log

    def given(self, hidden_TD: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Return the head's states of all tokens, from the target's hidden states or taps."""
        raise NotImplementedError

    def forward(self, token_ids_T: Tensor, given_TX: Tensor, ctx: ForwardContext) -> Tensor:
        """Return state_SD of sampled pairs. `given_TX` is overwritten.

        `token_ids_T` are the second tokens of the pairs.
        """
        raise NotImplementedError

    def logits(self, state_SD: Tensor) -> Tensor:
        """Return logits_SV in the model's dtype, for this rank's span of the vocabulary."""
        head = self._shared[1] if self.head_copy is None else self.head_copy
        return head.product(state_SD)


def replicated(out_features: int, in_features: int, ops: Ops) -> Linear:
    """Return a product that every rank computes whole."""
    rows = Span(out_features, 0, out_features)
    return Linear(out_features, in_features, Placement(0, (("", rows),)), ops)


def rules_of_layer(rules: Iterable[Rule], source: str, layer: int) -> list[Rule]:
    """Return a family's rules for one layer of a head, without placeholders for the layer.

    `source` is the name of the layer in the checkpoint, in place of "model.layers.{}".
    """
    layer_rules: list[Rule] = []
    for name, target, *part in rules:
        if target.startswith("layers.{}."):
            ours = target.replace("{}", str(layer), 1)
            layer_rules.append((name.replace("model.layers.{}", source, 1), ours, "".join(part)))
    return layer_rules
