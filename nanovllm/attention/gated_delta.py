"""Gated delta rule: a request has a state of fixed size instead of keys and values.

A state holds the last inputs of a short convolution, and for each head a matrix that every token
decays and updates. Matrices are float32, or bfloat16 if the recipe sets it. Drafts are never
written to a state. With drafts, a slot stores the inputs of its last step, and the next step first
applies the accepted ones to the state ("replay").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm_kernels.delta.reference import DeltaWeights
from torch import Tensor

from nanovllm.attention.base import Batch, ForwardContext
from nanovllm.attention.delta_kernels import DeltaKernels


@dataclass
class StateProgress:
    """Progress of the states, shared by all layers."""

    lengths_N: Tensor  # int32: number of tokens in each slot's states
    replays_R: Tensor  # int32: stored inputs of each row that must be replayed
    owners: list[GatedDelta]  # the layers with states, in order


class DeltaStates(NamedTuple):
    """One layer's states: those of all slots and the padding slot, and those of checkpoints."""

    conv_NCW: Tensor
    recurrent_NHKV: Tensor
    tickets_RG: Tensor  # zeros, for kernels
    inputs_NWX: Tensor | None  # by slot: inputs of the rule in its last step; None without drafts
    progress: StateProgress
    saved: tuple[Tensor, Tensor]  # checkpoints, in the format of conv_NCW and recurrent_NHKV


@dataclass
class GatedDelta:
    """A layer's convolution, gates, delta rule, norm and output gate.

    The columns of its input are queries, keys and values of all heads, then z. The last columns are
    b and a of each head, which may also be a separate tensor.
    """

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    kernels: DeltaKernels

    def bind(self, states: DeltaStates, weights: DeltaWeights) -> None:
        """Set the layer's states and weights."""
        self.states, self.weights = states, weights
        states.progress.owners.append(self)

    def __call__(self, ctx: ForwardContext, y_TX: Tensor, *more: Tensor) -> Tensor:
        """Return x_THV. It is the last argument, if that has three dimensions."""
        given = more[-1] if more and more[-1].ndim == 3 else None
        tokens = self._split(y_TX, more[0] if more and more[0].ndim == 2 else y_TX)
        batch, decoded = ctx.batch, None
        rows, at = batch.num_decodes, batch.num_decode_tokens
        if rows:
            decoded = self._decode(batch, *(each[:at] for each in tokens))
        if rows < len(batch.slots_R):
            slots_R, starts_R1 = batch.slots_R[rows:], batch.starts_R1[rows:]
            chunked = self.kernels.rows(
                *tokens,
                self.weights,
                self.states.conv_NCW,
                self.states.recurrent_NHKV,
                slots_R,
                starts_R1,
                *batch.state_parts,
                *self.states.saved,
                out_THV=given,
            )
            progress = self.states.progress
            if self.states.inputs_NWX is not None and progress.owners[-1] is self:
                progress.lengths_N[slots_R] = batch.lengths_R[rows:]
            if decoded is not None:
                chunked[:at] = decoded
            return chunked
        assert decoded is not None
        return decoded if given is None else given.copy_(decoded)

    def empty(self, y_TX: Tensor, *_: Tensor) -> Tensor:
        """Return an uninitialised x_THV."""
        return y_TX.new_empty(len(y_TX), self.value_heads, self.value_size)

    @property
    def num_channels(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def _split(self, y_TX: Tensor, ba_TX: Tensor) -> tuple[Tensor, ...]:
        """Return the columns qkv_TC, a_TH, b_TH, z_THV."""
        channels, width = self.num_channels, self.value_heads * self.value_size
        z_TX = y_TX[:, channels : channels + width]
        z_THV = z_TX.unflatten(1, (self.value_heads, self.value_size))
        b_TH, a_TH = ba_TX[:, -2 * self.value_heads :].chunk(2, 1)
        return y_TX[:, :channels], a_TH, b_TH, z_THV

    def _decode(self, batch: Batch, *tokens: Tensor) -> Tensor:
        rows = batch.num_decodes
        slots_R, starts_R1 = batch.slots_R[:rows], batch.starts_R1[: rows + 1]
        conv_NCW, recurrent_NHKV, tickets_RG, inputs_NWX, drafting, _ = self.states
        if inputs_NWX is None:
            return self.kernels.decodes(
                *tokens, self.weights, conv_NCW, recurrent_NHKV, slots_R, tickets_RG
            )
        replays_R = drafting.replays_R[:rows]
        if drafting.owners[0] is self:
            lag_R = tokens_before(batch, rows) - drafting.lengths_N[slots_R]
            replays_R.copy_(lag_R.clamp(0, inputs_NWX.shape[1]))
        x_THV = self.kernels.drafted(
            *tokens,
            self.weights,
            conv_NCW,
            recurrent_NHKV,
            slots_R,
            starts_R1,
            inputs_NWX,
            replays_R,
            tickets_RG,
        )
        if drafting.owners[-1] is self:
            drafting.lengths_N[slots_R] = tokens_before(batch, rows)
        return x_THV


def tokens_before(batch: Batch, num_rows: int) -> Tensor:
    """Return the computed tokens of the first rows, without those of the step: int32 [num_rows]."""
    return batch.lengths_R[:num_rows] - batch.starts_R1[: num_rows + 1].diff()
