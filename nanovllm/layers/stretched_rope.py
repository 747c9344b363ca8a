"""Rotary embeddings for longer contexts than the original one of a model.

Sources: the Llama 3.1 and YaRN (arXiv 2309.00071) variants, as in transformers'
modeling_rope_utils.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

Base = Annotated[float, Meta(gt=1)]
Positive = Annotated[float, Meta(gt=0)]


class Llama3Rope(Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="llama3"):
    """Llama 3.1: slow rotations are stretched by `factor`, fast ones kept, others blended."""

    rope_theta: Base
    partial_rotary_factor: Positive | None = None
    factor: Positive
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: Annotated[int, Meta(ge=1)]
    amplitude: ClassVar[float] = 1.0  # of cosines and sines

    def stretched(self, frequencies: Tensor) -> Tensor:
        """Return the frequencies, divided by `factor` if the period exceeds the original context.

        The transition is smooth.
        """
        turns = self.original_max_position_embeddings / (2 * math.pi / frequencies)
        unscaled = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unscaled = unscaled.clamp(0, 1)  # 1: a fast rotation, with many whole turns in training
        return (1 - unscaled) * frequencies / self.factor + unscaled * frequencies


class YarnRope(Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="yarn"):
    """YaRN: stretch rotations with less than `beta_slow` turns in the original context by `factor`.

    Those with more than `beta_fast` turns are kept, the others blended by their index in the head.
    """

    rope_theta: Base
    partial_rotary_factor: Positive | None = None
    factor: Positive
    original_max_position_embeddings: Annotated[int, Meta(ge=1)]
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def score_scale(self) -> float:
        """Factor of the scores of DeepSeek's attention."""
        return self._scale(self.mscale_all_dim) ** 2

    def stretched(self, frequencies: Tensor) -> Tensor:
        """Return the frequencies, slow ones divided by `factor`."""
        size = 2 * len(frequencies)
        low, high = (self._place_of(turns, size) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        places = torch.arange(len(frequencies), dtype=torch.float32)
        unscaled = 1 - ((places - low) / (high - low or 0.001)).clamp(0, 1)
        # The formula of the reference, since frequencies / factor would differ in the last bits.
        slow = 1 / (self.factor * self.rope_theta ** (2 * places / size))
        return slow * (1 - unscaled) + frequencies * unscaled

    def _scale(self, weight: float) -> float:
        return 1 + 0.1 * weight * math.log(self.factor) if self.factor > 1 else 1.0

    def _place_of(self, turns: float, size: int) -> float:
        """Return the index of the frequency with `turns` turns in the original context."""
        period = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(period) / (2 * math.log(self.rope_theta))
