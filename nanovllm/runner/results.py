"""Sampled tokens on their way to the host. The only place where the host waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.plan import CORRUPTED, Int32, Masks, RowLogprobs, StepResult
from nanovllm.sampling.base import Sampled, SampledLogprobs


@dataclass(frozen=True, slots=True)
class Copy:
    """What was sampled, on its way: on the host once the step has ended."""

    tokens_S: Tensor  # int32
    logprobs: SampledLogprobs | None


class HostEvent:
    """Of torch.cuda.Event what is used, where the host computes: enqueued work is done work."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: HostEvent) -> float:
        """In milliseconds."""
        return 1e3 * (end.at - self.at)


Event = Any  # a torch.cuda.Event, or a HostEvent
Gap = tuple[Event, Event]


class DeviceClock:
    """When the device has work: events around what a step enqueues. Nothing waits for them.

    Decision: a gap ends right before the forward pass, not at the step's first small upload, which
    a waiting device takes at once while the host still prepares the rest.
    """

    def __init__(self, device: torch.device) -> None:
        timed = partial(torch.cuda.Event, enable_timing=True)
        self._new: Callable[[], Event] = timed if device.type == "cuda" else HostEvent
        self._free: list[Event] = []
        self._ended = self._event()

    def begin(self) -> Gap:
        """Work follows. Returns the gap before it, for `seconds`."""
        return self._ended, self._event()

    def end(self) -> Event:
        """No more work follows; the event passes when all of it is done."""
        self._ended = self._event()
        return self._ended

    def between(self, start: Event, end: Event) -> float:
        """Seconds between two events that have passed."""
        return 1e-3 * float(start.elapsed_time(end))

    def seconds(self, gap: Gap) -> float:
        """To be asked once, of a gap that has passed: its events are used again."""
        self._free += gap
        return self.between(*gap)

    def _event(self) -> Event:
        event = self._free.pop() if self._free else self._new()
        event.record()
        return event


class Handle:
    """Implements engine.executor.StepHandle. `finish` samples, given masks or None.

    `gap`: before the forward pass, which has been enqueued.
    """

    def __init__(
        self,
        step: int,
        clock: DeviceClock,
        gap: Gap,
        finish: Callable[[Masks | None], Copy],
    ) -> None:
        self.step = step
        self.gap_s = self.busy_s = 0.0
        self._clock = clock
        self._gaps = [gap]
        self._finish = finish
        self._copy: Copy | None = None
        self._done: Event = None

    def sample(self, masks: Masks | None) -> None:
        if masks is not None:  # the forward pass has been left alone meanwhile
            self._gaps.append(self._clock.begin())
        self._copy = self._finish(masks)
        self._done = self._clock.end()

    def wait(self) -> StepResult:
        copy = self._copy
        assert copy is not None, "the step was not sampled"
        self._done.synchronize()
        span_s = self._clock.between(self._gaps[0][0], self._done)
        self.gap_s = sum(map(self._clock.seconds, self._gaps))
        self.busy_s = span_s - self.gap_s
        lines = copy.tokens_S.numpy().reshape(-1, 1).copy()
        return StepResult(self.step, lines, read(copy.logprobs, lines) if copy.logprobs else ())


def start_copy(sampled: Sampled) -> Copy:
    """Enqueue the copies behind the step; nothing here waits."""
    tokens_S = to_host(sampled.tokens_S.to(torch.int32))
    return Copy(tokens_S, begin(sampled.logprobs) if sampled.logprobs is not None else None)


def to_host(tensor: Tensor) -> Tensor:
    """Into pinned memory, asynchronously; a CPU tensor is copied, for its owner may reuse it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def begin(found: SampledLogprobs) -> SampledLogprobs:
    return replace(
        found,
        chosen_W=to_host(found.chosen_W),
        top_ids_WK=to_host(found.top_ids_WK),
        top_logprobs_WK=to_host(found.top_logprobs_WK),
    )


def read(found: SampledLogprobs, lines: Int32) -> tuple[RowLogprobs, ...]:
    """Of the rows that drew a token: a corrupted one has no log-probabilities."""
    chosen = found.chosen_W.tolist()
    ids, values = found.top_ids_WK.tolist(), found.top_logprobs_WK.tolist()
    return tuple(
        RowLogprobs(row, chosen[i], ids[i][:count], values[i][:count])
        for i, (row, count) in enumerate(zip(found.rows, found.counts, strict=True))
        if lines[row, 0] != CORRUPTED
    )
