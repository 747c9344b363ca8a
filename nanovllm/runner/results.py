"""Transfer of sampled tokens to the host. `Handle.wait` is the step loop's only wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import Int32, Masks, RowLogprobs, StepResult
from nanovllm.runner.batch import StepRows
from nanovllm.sampling.base import SampledLogprobs


@dataclass(frozen=True, slots=True)
class StepCopy:
    """Output of a step in host memory. Its values are valid once the step has ended."""

    tokens_RW: Tensor  # int32
    drafts_RX: Tensor | None  # int32: see plan.StepResult
    logprobs: SampledLogprobs | None
    rows: StepRows

    def read(self, step: int) -> StepResult:
        """Return the step's result. Call it after the step has ended."""
        tokens = self._sampling(self.tokens_RW)
        drafts = None if self.drafts_RX is None else self._sampling(self.drafts_RX)
        if self.logprobs is None:
            return StepResult(step, tokens, (), drafts)
        logprobs = read_logprobs(self.logprobs, tokens, self.rows.num_sampled)
        return StepResult(step, tokens, logprobs, drafts)

    def _sampling(self, rows_RX: Tensor) -> Int32:
        """Return the rows that sample."""
        rows: Int32 = rows_RX.numpy()
        return rows.copy() if self.rows.sampling_rows is None else rows[self.rows.sampling_rows]


class HostEvent:
    """The used part of torch.cuda.Event on a CPU, where enqueued work is done at once."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the time to `end` in milliseconds."""
        return 1e3 * (end.at - self.at)


Event = Any  # a torch.cuda.Event, or a HostEvent
Gap = tuple[Event, Event]


class DeviceClock:
    """Events around the work of each step, to measure when the device is idle. Does not wait.

    Decision: a gap ends right before the forward pass, and not at the step's first small upload. An
    idle device takes that at once, while the host still prepares the rest.
    """

    def __init__(self, device: torch.device) -> None:
        timed = partial(torch.cuda.Event, enable_timing=True)
        self._new: Callable[[], Event] = timed if device.type == "cuda" else HostEvent
        self._free: list[Event] = []
        self._ended = self._event()

    def begin(self) -> Gap:
        """Mark the start of work. Return the gap before it, for `seconds`."""
        return self._ended, self._event()

    def end(self) -> Event:
        """Mark the end of work. Return an event that completes when all of it is done."""
        self._ended = self._event()
        return self._ended

    def between(self, start: Event, end: Event) -> float:
        """Return the seconds between two completed events."""
        return 1e-3 * float(start.elapsed_time(end))

    def seconds(self, gap: Gap) -> float:
        """Return the length of a gap. Call it once per gap, since the events are reused."""
        seconds = self.between(*gap)
        self._free += gap  # last, since another thread may take these events at once
        return seconds

    def _event(self) -> Event:
        event = self._free.pop() if self._free else self._new()
        event.record()
        return event


class Handle:
    """A step in flight. Implements engine.executor.StepHandle.

    `gap` precedes the forward pass, which has been enqueued. `finish` samples, with masks or None.
    `mode` is that of engine.executor.StepHandle.
    """

    def __init__(
        self,
        step: int,
        clock: DeviceClock,
        gap: Gap,
        finish: Callable[[Masks | None], StepCopy],
        mode: str,
    ) -> None:
        self.step = step
        self.mode = mode
        self.gap_s = self.busy_s = 0.0
        self._clock = clock
        self._gaps = [gap]
        self._finish = finish
        self._copy: StepCopy | None = None
        self._done: Event = None

    def sample(self, masks: Masks | None) -> None:
        if masks is not None:  # the device may have been idle after the forward pass
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
        return copy.read(self.step)


def start_copy(
    rows: StepRows,
    tokens_RW: Tensor,
    drafts_RX: Tensor | None,
    logprobs: SampledLogprobs | None = None,
) -> StepCopy:
    """Enqueue the copies to the host. Do not wait."""
    num_rows = len(rows.slots_R)  # a graph may have padding rows
    # A graph may have looked up drafts that the plan does not want.
    wanted_RX = drafts_RX if rows.proposes else None
    drafts = None if wanted_RX is None else to_host(wanted_RX[:num_rows])
    if logprobs is not None:
        logprobs = logprobs_to_host(logprobs)
    return StepCopy(to_host(tokens_RW[:num_rows]), drafts, logprobs, rows)


def to_host(tensor: Tensor) -> Tensor:
    """Copy into pinned memory, asynchronously. A CPU tensor is copied, as its owner reuses it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def logprobs_to_host(logprobs: SampledLogprobs) -> SampledLogprobs:
    return replace(
        logprobs,
        chosen_W=to_host(logprobs.chosen_W),
        top_ids_WK=to_host(logprobs.top_ids_WK),
        top_logprobs_WK=to_host(logprobs.top_logprobs_WK),
    )


def read_logprobs(
    logprobs: SampledLogprobs, tokens: Int32, sampled: Int32
) -> tuple[RowLogprobs, ...]:
    """Return the log-probabilities of `tokens`, of which row r sampled sampled[r].

    CORRUPTED and -1 are not tokens.
    """
    chosen = logprobs.chosen_W.tolist()
    ids, values = logprobs.top_ids_WK.tolist(), logprobs.top_logprobs_WK.tolist()
    row_of = np.repeat(np.arange(len(sampled)), sampled).tolist()
    starts = (np.cumsum(sampled) - sampled).tolist()
    return tuple(
        RowLogprobs(row, chosen[i], ids[i][:count], values[i][:count], nth=at - starts[row])
        for i, (at, count) in enumerate(zip(logprobs.at, logprobs.counts, strict=True))
        if tokens[row := row_of[at], at - starts[row]] >= 0
    )
