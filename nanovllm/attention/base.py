"""What travels through a forward pass, and what a model may ask of attention.

Names of tensors end in their shape, in every file of this project: nanovllm/shapes.md.

Decision: keys and values always go through the paged cache. A layer stores them (one fused kernel
with the rotary embedding), then attention reads pages, for prefill and decode alike: one path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step. Under a CUDA graph they are static buffers, refilled before replay.

    Row r feeds the tokens starts_R1[r]:starts_R1[r + 1] of the step. Rows that only pad a graph
    have length 1 and one token in the padding page 0.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, 0-based position in its request
    slot_mapping_T: Tensor  # int64, page * S + offset: where the token's key and value go
    starts_R1: Tensor  # int32 [R + 1]
    lengths_R: Tensor  # int32, tokens of the request including this step's
    page_table_RM: Tensor  # int32; entries past the request's pages are 0
    sampled_at: Tensor | None  # int64: where in T rows predict from, at least one; None: at all
    num_rows: int
    num_decodes: int  # so many rows, the first ones, feed one token each
    max_new: int  # most tokens any row feeds; 1 = every row is a decode row
    max_length: int  # an upper bound of lengths_R, on the host

    def sampled(self, x_TX: Tensor) -> Tensor:
        """The lines that rows predict from."""
        return x_TX if self.sampled_at is None else x_TX[self.sampled_at]

    def rows(self, start: int, stop: int) -> Batch:
        """These rows alone, among the tokens of the whole step."""
        return replace(
            self,
            starts_R1=self.starts_R1[start : stop + 1],
            lengths_R=self.lengths_R[start:stop],
            page_table_RM=self.page_table_RM[start:stop],
            num_rows=stop - start,
            num_decodes=max(0, min(self.num_decodes, stop) - start),
        )


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's cache. Zero-filled at start; page 0 is never given to a request."""

    k_PSGA: Tensor
    v_PSGA: Tensor


class Attend(Protocol):
    """A backend bound to one step's rows and to the caches."""

    def __call__(self, layer: int, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        """Causal attention of q over each row's cached context, scale A**-0.5.

        Returns o_THA, which is out_THA if given. Lines of no row's tokens are left undefined.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Everything a forward pass needs besides weights and token ids."""

    batch: Batch
    caches: tuple[PagedKV, ...]  # by layer
    attend: Attend


class AttentionBackend(Protocol):
    """Made once per engine with the caches."""

    name: str

    def bind(self, batch: Batch) -> Attend:
        """Host work once per step. Reads no tensor's values, so a CUDA graph can capture it."""
        ...
