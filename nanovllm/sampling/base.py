"""What one step samples and what comes of it, and what a sampling feature is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.columns import Columns, Fields, TokenLists
from nanovllm.sampling.shards import Shard

Wanted = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows that draw a token."""

    slots_S: Tensor  # int64
    positions_S: Tensor  # int64: the drawn token's index in its request, so the length before it
    host_slots: Int32  # slots_S on the host
    max_length: int | None = None  # no position is larger; None = as long as requests can be


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """The log-probabilities of the W rows that want any. The tensors are where they were
    computed, or copied."""

    at: list[int]  # indices into Sampled.tokens_S
    counts: list[int]  # how many of the K best each row asked for
    chosen_W: Tensor
    top_ids_WK: Tensor  # int64, best first
    top_logprobs_WK: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens_S: Tensor  # int64; plan.CORRUPTED where a row's logits were NaN or infinite
    logprobs: SampledLogprobs | None


@dataclass(frozen=True, slots=True)
class PerSlot:
    """What features may know of a slot. `tokens_NL` and `prompt_lengths_N` belong to the runner."""

    columns: Columns
    tokens_NL: Tensor  # int32: every token known so far
    prompt_lengths_N: Tensor  # int32
    shard: Shard  # the columns of logits that features are given

    def lists(self) -> TokenLists:
        """Empty ones, for a feature to fill."""
        return TokenLists(len(self.tokens_NL), self.shard, self.tokens_NL.device)


class Feature(Protocol):
    """Something a request may ask of sampling, and its numbers per slot."""

    FIELDS: Fields  # its columns

    def admit(self, admits: Sequence[Admit]) -> None:
        """Write the slots' columns on the host; Sampler sends them."""
        ...

    def wanted(self, host_slots: Int32) -> Wanted:
        """Who of these asks for it. Not called for steps of plain rows."""
        ...


class Processor(Feature, Protocol):
    """A feature that changes logits."""

    def __init__(self, per_slot: PerSlot) -> None: ...

    def apply(self, logits_SV: Tensor, rows: SampleRows) -> None:
        """In place, on contiguous float32 logits. Rows that did not ask stay as they are.

        The columns are those of the shard; a change of theirs may depend on nothing else.
        """
        ...
