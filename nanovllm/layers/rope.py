"""Rotary position embedding: the table of cosines and sines for `Ops.rope_store`.

Decision: the table is computed in float32, angles included, as in the reference implementation. A
more exact table would be a different model at long positions.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from nanovllm.layers.stretched_rope import Base, Llama3Rope, Positive, YarnRope


class PlainRope(Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="default"):
    rope_theta: Base
    partial_rotary_factor: Positive | None = None  # the leading fraction of a head that is rotated


Rope = PlainRope | Llama3Rope | YarnRope


def cos_sin_table(rope: Rope, rotary_size: int, max_tokens: int) -> Tensor:
    """Return cos_sin_LA, float32: row = position, cosines in the first half, sines in the second.

    `rotary_size` is the number of rotated elements of a head, and of columns.
    """
    if torch.get_default_device().type == "meta":  # meta arithmetic would import a compiler
        return torch.empty(max_tokens, rotary_size, dtype=torch.float32)
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.float32) / rotary_size
    frequencies = 1 / rope.rope_theta**exponents  # radians per token
    amplitude = 1.0
    if not isinstance(rope, PlainRope):
        frequencies, amplitude = rope.stretched(frequencies), rope.amplitude
    angles = torch.arange(max_tokens, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1) * amplitude
