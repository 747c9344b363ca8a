"""Interface of models that draft tokens: a small model of its own, an EAGLE-3 head, an MTP module.

spec.model_drafter runs one after the tokens of the target's step were drawn and written to the
slots. A first pass feeds the rows of the step. Passes of one token follow for drafts 2, 3, ...

Places. Token t[p] of a request goes to position and slot `p - lag`. A model of its own has a lag of
0. A head has a lag of 1. Its pair (embedding of t[p + 1], hidden state of t[p]) goes where the
target put t[p]. So its first pass has exactly the rows, positions and slots of the target's step.
Layers are further layers of the target's paged cache and share its page table. So prefix hits,
copies of pages, chunks and preemption treat them like the target's layers.

Laws. The drafts change no text: a draft is accepted if it equals the token that the target draws.
Every pass is a fixed sequence of device work with shapes from the host, so that a CUDA graph can
capture it. All ranks run the same passes and draw together, so they have equal drafts.

Shape letters in addition to those of nanovllm/shapes.md: X is the width of a pass's second input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanovllm.attention.base import ForwardContext
from nanovllm.config import Config
from nanovllm.kv.layout import CacheLayout
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Parted, Residual, Slices
from nanovllm.models.decoder import Decoder, DecoderConfig
from nanovllm.parallel.mesh import Mesh


class DraftModel(Protocol):
    """A torch module that drafts. Made by a DraftLoader."""

    lag: int  # 0: a model of its own; 1: a head
    # The target's residual streams that `given` takes. n is the stream before layer n, which is the
    # output of layer n - 1. All products are added, and there is no norm. Ascending, from 1 to the
    # number of layers. Empty: no tap.
    taps: Sequence[int]
    takes_hidden: bool  # whether `given` takes the target's hidden states, or `taps`, of all tokens

    @property
    def output(self) -> nn.Module:
        """The output head that `logits` reads, which may be the target's or a copy of it."""
        ...

    @property
    def read_by_pass(self) -> Sequence[nn.Module]:
        """The other modules with products of a pass."""
        ...

    @property
    def read_by_given(self) -> Sequence[nn.Module]:
        """The modules with products of `given`."""
        ...

    def bind_caches(self, caches: Mapping[int, Any]) -> None:
        """Set the cache of each own layer, numbered from 0 as in DraftLoader.layout."""
        ...

    def given(self, hidden_TD: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Return given_TX, the second input of a first pass, for all tokens of the target's step.

        `hidden_TD` is after the target's final norm, `taps` are streams [T, D] in the order of
        `self.taps`. EAGLE-3: fc of the taps, X = its own hidden size. MTP: hidden_TD itself. Called
        inside the target's graph, only if `takes_hidden`. Must copy what it returns from `taps`.
        """
        ...

    def __call__(self, token_ids_T: Tensor, given_TX: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return state_SX of the tokens at ctx.batch.sampled_at (None: of all).

        `given_TX` belongs to the same tokens: in a first pass the result of `given`, later the
        state that the previous pass returned. None if not `takes_hidden`. The state of EAGLE-3 is
        the stream before its norm (after it with norm_output), that of MTP is after its norm.
        Keys and values of all tokens are stored; see layers.attention for `is_last`.
        """
        ...

    def logits(self, state_SX: Tensor) -> Tensor:
        """Return logits_SV for this rank's span of the target's vocabulary, as Decoder.logits does.

        With a draft vocabulary (d2t), all other tokens have -inf; see `spread`. A model that is
        whole on every rank returns the span's columns.
        """
        ...


class DraftLoader(Protocol):
    """Maker of the DraftModel of a recipe. One class per method, named in spec.DRAFT_LOADERS.

    The constructor reads config files and headers only. It raises ConfigError if the model does not
    fit the target: another vocabulary, hidden size or number of taps. It also does for a config
    that leaves something unclear. The error is one line with the key or file, and the remedy.
    """

    layout: CacheLayout  # of this rank's own layers, numbered from 0
    model_config: DecoderConfig  # of these layers
    mesh: Mesh  # over which they are cut
    # Shape of a weight of this rank that speculate.dtype applies to: [outputs, inputs]. None: there
    # is no such weight.
    fp8_shape: tuple[int, int] | None

    def __init__(
        self, config: Config, target: DecoderConfig, mesh: Mesh, element_bytes: int
    ) -> None:
        """`config` is the target's, with config.recipe.speculate. `target` is its model config.

        `mesh` is the target's. `element_bytes` is the size of a cache element.
        """
        ...

    def empty(self, target: Decoder, ops: Ops, max_tokens: int, *, fp8: bool = False) -> DraftModel:
        """Return the model with uninitialised parameters, on the default device and dtype.

        It may share modules with the target (embedding, head): keep them out of `parameters()`, for
        example in a tuple. `max_tokens` is the length of rotary tables. `target` may be on "meta".
        `fp8`: weights that speculate.dtype applies to are in block fp8.
        """
        ...

    def filler(self, model: DraftModel) -> Callable[[], None]:
        """Return a function that loads the weights, or with load.format dummy makes random ones.

        Call it after the target's weights are loaded. Raise ConfigError like weights.filler.
        """
        ...


def spread(logits_SX: Tensor, target_ids_X: Tensor, vocab_size: int) -> Tensor:
    """Return logits_SV over the target's whole vocabulary: -inf for tokens without a column.

    `target_ids_X`, int64, are the target's ids of the columns. The caller takes its rank's span.
    """
    out_SV = logits_SX.new_full((len(logits_SX), vocab_size), float("-inf"))
    return out_SV.index_copy_(1, target_ids_X, logits_SX)


class StreamTaps:
    """Copies of the target's residual stream, made in its forward pass. See DraftModel.taps."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers
        self.streams: list[Tensor] = []

    def take(self, layer: int, residual: Residual) -> Residual:
        """Copy the stream before a layer, if it is tapped, and return the stream."""
        if layer not in self.layers:
            return residual
        if isinstance(residual, Parted):
            residual = residual.added()
        if isinstance(residual, Added):
            self.streams.append(residual.stream_TD.clone())
        elif isinstance(update := residual.update, Slices):
            sum_TD = residual.stream_TD + update.parts_ITN.sum(0, dtype=torch.float32)
            self.streams.append(sum_TD.to(residual.stream_TD.dtype))
        else:
            self.streams.append(residual.stream_TD + update)
        return residual
