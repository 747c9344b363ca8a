"""Sampled tokens on their way to the host. The only place where the host waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.plan import Masks, RowLogprobs, StepResult
from nanovllm.sampling.base import DeviceLogprobs, Sampled


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """DeviceLogprobs copied, or on their way."""

    rows: list[int]
    counts: list[int]
    chosen_W: Tensor
    top_ids_WK: Tensor
    top_logprobs_WK: Tensor


@dataclass(frozen=True, slots=True)
class Copy:
    """A step's tokens on their way."""

    tokens_S: Tensor  # int32, on the host once `event` has passed
    logprobs: HostLogprobs | None
    event: torch.cuda.Event | None


class Handle:
    """Implements engine.executor.StepHandle. `finish` samples, given masks or None."""

    def __init__(self, step: int, finish: Callable[[Masks | None], Copy]) -> None:
        self.step = step
        self._finish = finish
        self._copy: Copy | None = None

    def sample(self, masks: Masks | None) -> None:
        self._copy = self._finish(masks)

    def wait(self) -> StepResult:
        copy = self._copy
        assert copy is not None, "the step was not sampled"
        if copy.event is not None:
            copy.event.synchronize()
        lines = copy.tokens_S.numpy().reshape(-1, 1).copy()
        return StepResult(self.step, lines, read(copy.logprobs) if copy.logprobs else ())


def start_copy(sampled: Sampled, device: torch.device) -> Copy:
    """Enqueue the copies behind the step; nothing here waits."""
    tokens_S = to_host(sampled.tokens_S.to(torch.int32))
    logprobs = begin(sampled.logprobs) if sampled.logprobs is not None else None
    return Copy(tokens_S, logprobs, passed(device))


def passed(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def to_host(tensor: Tensor) -> Tensor:
    """Into pinned memory, asynchronously; a CPU tensor is copied, for its owner may reuse it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def begin(found: DeviceLogprobs) -> HostLogprobs:
    return HostLogprobs(
        rows=found.rows,
        counts=found.counts,
        chosen_W=to_host(found.chosen_W),
        top_ids_WK=to_host(found.top_ids_WK),
        top_logprobs_WK=to_host(found.top_logprobs_WK),
    )


def read(found: HostLogprobs) -> tuple[RowLogprobs, ...]:
    chosen = found.chosen_W.tolist()
    ids, values = found.top_ids_WK.tolist(), found.top_logprobs_WK.tolist()
    return tuple(
        RowLogprobs(row, chosen[i], ids[i][:count], values[i][:count])
        for i, (row, count) in enumerate(zip(found.rows, found.counts, strict=True))
    )
