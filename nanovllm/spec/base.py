"""Drafter"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Accept = tuple[Tensor, Tensor]


class Drafter(Protocol):
    num_drafts: int
    accept: Accept | None

    def propose(self, slots_R: Tensor, lengths_N: Tensor, tokens_NL: Tensor) -> Tensor: ...
