"""Inputs of a forward pass, and the interface between models and attention backends.

The names of tensors end in their shape letters, in every file of this project: nanovllm/shapes.md.

Decision: keys and values always go through the paged cache. A layer stores them (one fused kernel
with the rotary embedding), then attention reads pages, for prefill and decode alike: one path.

Decision: each kind of attention is one file like grouped.py. It defines the cache of a layer, and
the layer's `EagerOperation`, which calls the step's bound attention with that cache. This file does
not depend on the type of a cache, on further arguments of a kind, or on the shape of its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from nanovllm.plan import Chunk


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one step. Under a CUDA graph they are static buffers, refilled before replay.

    Row r has the tokens starts_R1[r]:starts_R1[r + 1] of the step. Decode rows come first, then
    prompt chunks. Rows that pad a graph are the last decode rows. If every decode row has one
    token, a padding row has length 1 and a token in the padding page 0; otherwise it has no tokens.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, 0-based position in its request
    slot_mapping_T: Tensor  # int64, page * S + offset: the place of the token's key and value
    slots_T: Tensor  # int64: the slot of each token
    slots_R: Tensor  # int64: the slot of each row, the index of states, adapters and drafters
    starts_R1: Tensor  # int32 [R + 1]
    lengths_R: Tensor  # int32, tokens of the request including this step's
    page_table_RM: Tensor  # int32; entries after a request's own pages are 0, the padding page
    sampled_at: Tensor | None  # int64: indices in T of sampled tokens, at least one; None: all
    num_decodes: int  # rows [:num_decodes] are decode rows: the latest token plus drafts
    num_decode_tokens: int  # tokens [:num_decode_tokens] belong to decode rows
    decode_width: int  # maximum tokens of a decode row; 1 without drafts
    max_new: int  # maximum tokens of any row
    max_length: int  # upper bound of lengths_R, on the host
    planned: Sequence[Chunk] = ()  # the chunks; empty in a padding step and for a draft model
    is_draft: bool = False  # rows of a draft model, whose chunks only the device knows
    # For recurrent states: parts_X and targets_X of the chunks, as mix_rows takes them.
    state_parts: tuple[Tensor | None, Tensor | None] = (None, None)

    def sampled(self, x_TX: Tensor) -> Tensor:
        """Return the rows of x_TX at sampled tokens."""
        return x_TX if self.sampled_at is None else x_TX[self.sampled_at]

    def decodes(self) -> Batch:
        """Return the decode rows alone. Token indices still count from the step's first token."""
        return self._rows(0, self.num_decodes)

    def chunks(self) -> Batch:
        """Return the chunks alone. Token indices still count from the step's first token."""
        rows = self._rows(self.num_decodes, len(self.lengths_R))
        return replace(rows, num_decodes=0, num_decode_tokens=0)

    def _rows(self, start: int, stop: int) -> Batch:
        return replace(
            self,
            slots_R=self.slots_R[start:stop],
            starts_R1=self.starts_R1[start : stop + 1],
            lengths_R=self.lengths_R[start:stop],
            page_table_RM=self.page_table_RM[start:stop],
        )


# A backend that is bound to one step's rows. It is called with a layer's cache, the inputs of its
# kind, and an output tensor: attend(cache, q_THA, out_THA=None) for grouped heads. In a model with
# several kinds of layers, the bound attention dispatches on the type of the cache.
Attend: TypeAlias = Callable[..., Tensor]


class EagerOperation(Protocol):
    """Operation that depends on the step's rows, so that a piecewise CUDA graph cannot contain it.

    The first dimension of all its tensors is the step's tokens.
    """

    def __call__(self, ctx: ForwardContext, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Return the result, which is written to the last argument if an output tensor is given.

        The result is undefined for tokens that belong to no row.
        """
        ...

    def empty(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Return an uninitialised tensor with the shape and dtype of the result."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Adapters of a step's tokens. Kernels find the ranks of each adapter on the device."""

    adapter_T: Tensor  # int32: slot of each token's adapter, -1 for none
    owner_P: Tensor  # int32: slot of the adapter that owns each page of ranks, -2 for none
    tables: dict[str, Any] = field(init=False, default_factory=dict)  # of kernels, by the first


class Taps(Protocol):
    """Observer of the residual stream, whose values draft models take."""

    def take(self, layer: int, residual: Any) -> Any:  # noqa: ANN401
        """Read the stream before a layer, or after the last one, and return it."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs of a forward pass besides weights and caches."""

    batch: Batch
    attend: Attend
    all_hidden: bool = False  # return hidden states of all tokens, not only of sampled ones
    # Layers call an EagerOperation as eager(operation, ctx, *tensors), with contiguous tensors. It
    # runs at once, but a piecewise graph is split there. A method would double the cost of a call.
    eager: Callable[..., Tensor] = operator.call
    taps: Taps | None = None
    lane_tokens: int = 0  # as in plan.StepPlan; 0 in a graph, whose tokens are equal in all lanes
    adapters: AdaptedRows | None = None  # None: no token of the step has an adapter

    def adapted(self, *, is_last: bool) -> AdaptedRows | None:
        """Return the adapters of the rows after a layer's attention.

        After that of the last layer, these are the sampled tokens.
        """
        rows, batch = self.adapters, self.batch
        if rows is None or not is_last or self.all_hidden or batch.sampled_at is None:
            return rows
        return replace(rows, adapter_T=rows.adapter_T[batch.sampled_at.clamp(min=0)])


class AttentionBackend(Protocol):
    """Attention implementation. Made once per engine from the shapes of caches, not the caches."""

    def bind(self, batch: Batch) -> Attend:
        """Do a step's host work. Read no tensor's values, so that a CUDA graph can capture it."""
        ...
