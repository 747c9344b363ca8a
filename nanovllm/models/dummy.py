"""Random weights, for a model of any size without a checkpoint (`load.format: dummy`)."""

from __future__ import annotations

import logging
import zlib

import torch

from nanovllm.log import Progress
from nanovllm.models.destination import FP8, Destination
from nanovllm.models.scattered import Scattered

log = logging.getLogger("engine")


def fill_random(destinations: dict[str, Destination], seed: int) -> None:
    """Fill norm weights with one and matrices with random numbers that preserve the scale.

    Each tensor that a checkpoint would have is generated whole, from the seed and its name. The
    rank keeps its slice, so the model does not depend on the number of ranks or on their slices.
    """
    generator = torch.Generator(next(iter(destinations.values())).into.device)
    own = {name: to for name, to in destinations.items() if to.count}
    progress = Progress(log, "random weights", sum(to.into.nbytes for to in own.values()), "GB")
    for name, to in own.items():
        into = to.into
        is_whole = into.shape == to.shape and into.dtype != FP8 and not isinstance(to, Scattered)
        dtype = torch.bfloat16 if into.dtype == FP8 else into.dtype
        whole = into if is_whole else into.new_empty(to.shape, dtype=dtype)
        if whole.ndim == 1:
            whole.fill_(1)
        else:
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            whole.normal_(0, to.shape[-1] ** -0.5, generator=generator)
        if not is_whole:
            to.take(whole, 0)
        progress.advance(into.nbytes)
    progress.finish()
