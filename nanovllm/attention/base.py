"""What travels through a forward pass, and what a model may ask of attention.

Names of tensors end in their shape, in every file of this project: nanovllm/shapes.md.

Decision: keys and values always go through the paged cache. A layer stores them (one fused kernel
with the rotary embedding), then attention reads pages, for prefill and decode alike: one path.

Decision: a kind of attention is one file beside grouped.py: the cache that a layer of this kind
owns, and the layer's `EagerOperation`, which calls the step's bound attention with it. Nothing here
knows what a cache is, what a kind takes besides, or that its result has the shape of a query.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from nanovllm.plan import Chunk


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step. Under a CUDA graph they are static buffers, refilled before replay.

    Row r feeds the tokens starts_R1[r]:starts_R1[r + 1] of the step. Decode rows come first, then
    prompt chunks. Rows that only pad a graph are the last decode rows: where each decode row feeds
    one token they have length 1 and a token in the padding page 0, else length 0 and no token.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, 0-based position in its request
    slot_mapping_T: Tensor  # int64, page * S + offset: where the token's key and value go
    slots_T: Tensor  # int64: the slot of each token
    slots_R: Tensor  # int64: the slot of each row, where states, adapters and drafters find it
    starts_R1: Tensor  # int32 [R + 1]
    lengths_R: Tensor  # int32, tokens of the request including this step's
    page_table_RM: Tensor  # int32; entries past the request's pages are 0
    sampled_at: Tensor | None  # int64: where in T rows predict from, at least one; None: at all
    num_decodes: int  # so many rows, the first ones, feed their newest token and its drafts
    num_decode_tokens: int  # so many tokens, the first ones, are theirs
    decode_width: int  # the most tokens that one of them may feed; 1: each feeds one
    max_new: int  # the most tokens that any row feeds
    max_length: int  # an upper bound of lengths_R, on the host
    planned: Sequence[Chunk] = ()  # of the rows that are no decode rows; of padding there are none

    def sampled(self, x_TX: Tensor) -> Tensor:
        """The lines that rows predict from."""
        return x_TX if self.sampled_at is None else x_TX[self.sampled_at]

    def decodes(self) -> Batch:
        """The decode rows alone, among the tokens of the whole step."""
        return self._rows(0, self.num_decodes)

    def chunks(self) -> Batch:
        """The prompt chunks alone, among the tokens of the whole step."""
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


# A backend bound to one step's rows, called with a layer's own cache, then what its kind takes, and
# where the result goes: attend(cache, q_THA, out_THA=None) of grouped heads. The bound attention of
# a model whose layers are of several kinds is to go by the type of the cache. It knows where decode
# rows end and chunks begin (Batch.num_decodes, num_decode_tokens), and each row's slot.
Attend: TypeAlias = Callable[..., Tensor]


class EagerOperation(Protocol):
    """What depends on the step's rows, so that no graph of so many tokens can hold it.

    The first dimension of all its tensors is the step's tokens.
    """

    def __call__(self, ctx: ForwardContext, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """The result of tensors, which is written to one more tensor if that is given.

        Its lines of no row's tokens are undefined.
        """
        ...

    def empty(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """A result of these tensors by shape and dtype, of undefined contents."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Everything a forward pass needs besides weights, caches and token ids."""

    batch: Batch
    attend: Attend
    all_hidden: bool = False  # whether hidden states are wanted of tokens that nobody predicts from
    # How a layer calls an EagerOperation: eager(operation, ctx, *tensors), these contiguous. At
    # once, but a piecewise graph is cut there. Not a method, which would cost as much as the call.
    eager: Callable[..., Tensor] = operator.call
    lane_tokens: int = 0  # as in plan.StepPlan; in a graph 0, as all lanes have its tokens


class AttentionBackend(Protocol):
    """Made once per engine, of the caches' shapes. The caches themselves are the layers'."""

    def bind(self, batch: Batch) -> Attend:
        """Host work once per step. Reads no tensor's values, so a CUDA graph can capture it."""
        ...
