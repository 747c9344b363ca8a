"""Sampled tokens on their way to the host. The only place where the host waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.plan import RowLogprobs, StepResult
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
class Handle:
    """Implements engine.executor.StepHandle."""

    step: int
    tokens_S: Tensor  # int32, on the host once `event` has passed
    logprobs: HostLogprobs | None
    event: torch.cuda.Event | None

    def wait(self) -> StepResult:
        if self.event is not None:
            self.event.synchronize()
        lines = self.tokens_S.numpy().reshape(-1, 1).copy()
        return StepResult(self.step, lines, read(self.logprobs) if self.logprobs else ())


def start_copy(step: int, sampled: Sampled, device: torch.device) -> Handle:
    """Enqueue the copies behind the step; nothing here waits."""
    tokens_S = to_host(sampled.tokens_S.to(torch.int32))
    logprobs = begin(sampled.logprobs) if sampled.logprobs is not None else None
    return Handle(step, tokens_S, logprobs, passed(device))


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
