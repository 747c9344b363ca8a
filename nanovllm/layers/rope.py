"""Rotary position embedding: the table of cosines and sines that `Ops.rope_store` applies.

Decision: the table is computed in float32, angles included, because the reference implementation
is: a more exact table would be a different model at long positions.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from nanovllm.layers.stretched_rope import Base, Llama3Rope, Positive, YarnRope


class PlainRope(Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="default"):
    rope_theta: Base
    partial_rotary_factor: Positive | None = None  # which part of a head is rotated, the first


Rope = PlainRope | Llama3Rope | YarnRope


def cos_sin_table(rope: Rope, rotary_size: int, max_tokens: int) -> Tensor:
    """cos_sin_LA, float32: row = position, cosines in the first half, sines in the second.

    `rotary_size`: the table's columns, the elements of a head that are rotated.
    """
    if torch.get_default_device().type == "meta":  # to compute there is to import a compiler
        return torch.empty(max_tokens, rotary_size, dtype=torch.float32)
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.float32) / rotary_size
    frequencies = 1 / rope.rope_theta**exponents  # radians per token
    amplitude = 1.0
    if not isinstance(rope, PlainRope):
        frequencies, amplitude = rope.stretched(frequencies), rope.amplitude
    angles = torch.arange(max_tokens, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1) * amplitude
