"""Numbers of tokens routed to each expert, counted on the device.

An engine with work reads the newest counts that have arrived. An idle one waits for exact counts.
All ranks that compute the same tokens have the same counts; a lane counts its own tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nanovllm.experts import ExpertLoad
from nanovllm.layers.experts.moe import MoE
from nanovllm.runner.results import Event, HostEvent, to_host

Counts = npt.NDArray[Any]


def new_event(device: torch.device) -> Event:
    return torch.cuda.Event() if device.type == "cuda" else HostEvent()


class ExpertCounter:
    """Token counts of a model's experts. Replicas are counted separately and reported together.

    The constructor also gives the layers the tables that map experts to replicas.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        blocks = [part for part in model.modules() if isinstance(part, MoE)]
        sizes = [sum(map(len, block.places.ranks)) for block in blocks]
        self.tokens_X = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        for block, tokens_X in zip(blocks, self.tokens_X.split(sizes), strict=True):
            block.places.count(tokens_X)
        self._layers = [block.layer for block in blocks]
        held = [
            (at, rank, expert)
            for at, block in enumerate(blocks)
            for rank, experts in enumerate(block.places.ranks)
            for expert in experts
        ]
        self._layer_of, self._rank_of, self._expert_of = np.array(held, np.int64).reshape(-1, 3).T
        self._copy: tuple[Tensor, Event] | None = None
        self._newest: ExpertLoad | None = None

    def newest(self, *, wait: bool) -> ExpertLoad | None:
        """Return the counts of some earlier step, or with `wait` the present ones.

        Return None before the first counts have arrived, and for a model without experts.
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
            self._newest, self._copy = self._load_of(copy.numpy()), None
        return self._newest

    def _load_of(self, counts: Counts) -> ExpertLoad:
        by_expert, by_rank = (
            np.bincount(self._layer_of * (1 + what.max()) + what, counts).astype(np.int64).tobytes()
            for what in (self._expert_of, self._rank_of)
        )
        return ExpertLoad(self._layers, by_expert, by_rank)
