"""Inputs and outputs of sampling, and the interface of sampling features."""

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
    """Rows that draw a token."""

    slots_S: Tensor  # int64
    positions_S: Tensor  # int64: the index of the drawn token in its request
    host_slots: Int32  # slots_S on the host
    max_length: int | None = None  # upper bound of positions; None: the maximum of all requests


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the W rows with logprobs. Tensors may be on the device or the host."""

    at: list[int]  # indices into Sampled.tokens_S
    counts: list[int]  # alternatives of each row, at most K
    chosen_W: Tensor
    top_ids_WK: Tensor  # int64, best first
    top_logprobs_WK: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens_S: Tensor  # int64; plan.CORRUPTED where a row's logits were NaN or infinite
    logprobs: SampledLogprobs | None


@dataclass(frozen=True, slots=True)
class PerSlot:
    """State by slot that features may use. The runner owns `tokens_NL` and `prompt_lengths_N`."""

    columns: Columns
    tokens_NL: Tensor  # int32: prompt and output
    prompt_lengths_N: Tensor  # int32
    shard: Shard  # this rank's columns of the vocabulary, as in all logits

    def lists(self) -> TokenLists:
        """Return empty token lists for a feature."""
        return TokenLists(len(self.tokens_NL), self.shard, self.tokens_NL.device)


class Feature(Protocol):
    """A sampling parameter, with its values by slot."""

    FIELDS: Fields  # columns of the feature

    def admit(self, admits: Sequence[Admit]) -> None:
        """Write the columns of the requests' slots on the host. Sampler sends them."""
        ...

    def wanted(self, host_slots: Int32) -> Wanted:
        """Return a mask of the slots that use the feature. Not called for plain steps."""
        ...


class Processor(Feature, Protocol):
    """A feature that changes logits."""

    def __init__(self, per_slot: PerSlot) -> None: ...

    def apply(self, logits_SV: Tensor, rows: SampleRows) -> None:
        """Change contiguous float32 logits in place. Rows without the feature stay the same.

        The columns are those of the shard, and a column's change must not depend on others.
        """
        ...
