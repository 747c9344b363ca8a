"""Arbitrary drafts that are accepted at given rates, to measure costs and gains of speculation.

The output is not a text. With random weights, the drafts of a real drafter are never accepted, so
its speed cannot be measured without a checkpoint; this one's can.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm.spec.base import DraftStep, coins

PERIOD = 4096  # positions after which the drafts repeat


class Synthetic:
    def __init__(
        self,
        *,
        tokens: int,
        accept: Sequence[float],
        seeds_N: Tensor,
        vocab_size: int,
        device: torch.device,
        **_: object,
    ) -> None:
        """`vocab_size` is at least 2. `accept` is explained in `coins`."""
        self.num_drafts = tokens
        self.accept: tuple[Tensor, Tensor] | None = coins(accept, seeds_N)
        self._steps_D = torch.arange(1, tokens + 1, device=device)
        positions_PD = torch.arange(PERIOD, device=device)[:, None] + self._steps_D
        drafts_PD = positions_PD % PERIOD * 7919 % (vocab_size - 1) + 1
        # Indexed by the position of the latest token.
        self._drafts_PX = functional.pad(drafts_PD, (1, 0), value=tokens).to(torch.int32)

    def propose(self, step: DraftStep) -> Tensor:
        slots_R, newest_R = step.slots_R, step.lengths_N[step.slots_R]
        drafts_RX = self._drafts_PX[newest_R % PERIOD]
        step.tokens_NL[slots_R[:, None], newest_R[:, None] + self._steps_D] = drafts_RX[:, 1:]
        step.tokens_NL[-1].zero_()
        return drafts_RX
