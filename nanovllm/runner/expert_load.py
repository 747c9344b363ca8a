"""How many tokens were routed to each expert: counted by the routing on the device, and read now
and then without waiting for it.

All ranks that work on the same tokens count the same; a lane counts its own tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.experts import ExpertLoad
from nanovllm.layers.moe import MoE
from nanovllm.models.decoder import Decoder
from nanovllm.runner.results import Event, HostEvent, to_host

Counts = npt.NDArray[Any]


def new_event(device: torch.device) -> Event:
    return torch.cuda.Event() if device.type == "cuda" else HostEvent()


class ExpertCounter:
    """Counts of a model's experts. The copies of an expert are counted one by one, told together.

    From its making on layers count, and find the copies of experts that other ranks hold.
    """

    def __init__(self, model: Decoder, device: torch.device) -> None:
        blocks = [part for part in model.modules() if isinstance(part, MoE)]
        sizes = [sum(map(len, block.ranks)) for block in blocks]
        self.tokens_X = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        for block, tokens_X in zip(blocks, self.tokens_X.split(sizes), strict=True):
            block.count(tokens_X)
        self._layers = [block.layer for block in blocks]
        held = [
            (at, rank, expert)
            for at, block in enumerate(blocks)
            for rank, experts in enumerate(block.ranks)
            for expert in experts
        ]
        self._layer_of, self._rank_of, self._expert_of = np.array(held, np.int64).reshape(-1, 3).T
        self._copy: tuple[Tensor, Event] | None = None
        self._newest: ExpertLoad | None = None

    def newest(self, *, wait: bool) -> ExpertLoad | None:
        """What was counted until some earlier asking, if the device was that far; until now, if it
        may be waited for. None: nothing was yet, or there are no experts.
        """
        if not self._layers:
            return None
        if wait or self._copy is None:
            self._copy = to_host(self.tokens_X), new_event(self.tokens_X.device)
            self._copy[1].record()
        copy, done = self._copy
        if wait:
            done.synchronize()
        if done.query():
            self._newest, self._copy = self._told(copy.numpy()), None
        return self._newest

    def _told(self, counts: Counts) -> ExpertLoad:
        by_expert, by_rank = (
            np.bincount(self._layer_of * (1 + what.max()) + what, counts).astype(np.int64).tobytes()
            for what in (self._expert_of, self._rank_of)
        )
        return ExpertLoad(self._layers, by_expert, by_rank)
