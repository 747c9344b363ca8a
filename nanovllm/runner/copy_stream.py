"""Copies of pages in one direction: between the device and host memory, in order.

Decision: a thread of its own enqueues the copies on a stream of its own. A stream holds some 1,000
operations; a thread that enqueues more waits until the first have ended. Loads of 10 GiB, enqueued
by the thread of the steps, made 32 streams wait for 165 ms on an H100. The thread here keeps few
slices of pages in flight, and waits for the oldest before it enqueues more.

On a CPU, copies are done at once by the caller.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from nanovllm.plan import Copies
from nanovllm.runner.results import Event, HostEvent

SLICE, MOST_IN_FLIGHT = 16, 2  # pages that are enqueued together, and slices at a time
CopyPart = Callable[[Copies, int], None]


class StartedCopies:
    """A transfer that will be done after all earlier ones of its direction."""

    def __init__(self, copies: Copies, num_bytes: int, issued: Event) -> None:
        self.copies, self.num_bytes, self.issued = copies, num_bytes, issued
        self.begin: Event = None
        self.end: Event = None
        self.is_enqueued = threading.Event()

    def follow(self, *streams: Any) -> None:  # noqa: ANN401
        """Order later work of these streams after the end. Wait until the copies are enqueued.

        Raise RuntimeError if they will never be.
        """
        self.is_enqueued.wait()
        if self.end is None:
            raise RuntimeError("pages were not copied, since the thread that copies has failed")
        for stream in streams:
            stream.wait_event(self.end)


class CopyStream:
    """The transfers of one direction.

    `copy` does the nth of a transfer's copies on the current stream: pages, then parts of a state.
    `call_when_ended` is called from a thread after the end of each transfer.
    """

    def __init__(self, copy: CopyPart, device: torch.device) -> None:
        self._copy, self._device = copy, device
        self._started: deque[StartedCopies] = deque()
        self._in_flight: deque[tuple[Event, bool]] = deque()  # ends of slices; used by one thread
        self._error: BaseException | None = None  # of the thread, which then has ended
        self.call_when_ended: Callable[[], object] = lambda: None
        self.stream: Any = None
        self._new_event: Callable[[], Event] = HostEvent
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self._new_event = partial(torch.cuda.Event, enable_timing=True, blocking=True)
            self._to_enqueue: SimpleQueue[StartedCopies] = SimpleQueue()
            threading.Thread(target=self._run, daemon=True).start()

    def start(self, copies: Copies, num_bytes: int, issued: Event) -> StartedCopies:
        """Begin a transfer after `issued`, an event of another stream, and return it."""
        started = StartedCopies(copies, num_bytes, issued)
        self._started.append(started)
        self._check()  # later: a thread that ends now may not have seen this transfer
        if self.stream is None:
            self._enqueue(started)
        else:
            self._to_enqueue.put(started)
        return started

    def ended(self) -> list[StartedCopies]:
        """Return the transfers that have ended since the last call, in order."""
        self._check()
        ended = []
        while self._started:
            oldest = self._started[0]
            if not (oldest.is_enqueued.is_set() and oldest.end.query()):
                break
            ended.append(self._started.popleft())
        return ended

    def _check(self) -> None:
        """Raise the error that has ended the thread, if there is one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            torch.cuda.set_device(self._device)
            with torch.inference_mode():
                while True:
                    if self._in_flight and self._to_enqueue.empty():
                        self._wait_for_oldest()
                    else:
                        self._enqueue(self._to_enqueue.get())
        except BaseException as error:
            self._error = error
            for started in tuple(self._started):
                started.is_enqueued.set()
            self.call_when_ended()

    def _enqueue(self, started: StartedCopies) -> None:
        copies = started.copies
        count = len(copies.pairs) + len(copies.state_fetches)
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            if self.stream is not None:
                self.stream.wait_event(started.issued)
            started.begin = self._recorded()
            for first in range(0, count, SLICE):
                for nth in range(first, min(first + SLICE, count)):
                    self._copy(copies, nth)
                if first + SLICE < count:
                    self._add_in_flight(self._recorded(), is_end=False)
            started.end = self._recorded()
        started.is_enqueued.set()
        self._add_in_flight(started.end, is_end=True)

    def _add_in_flight(self, event: Event, *, is_end: bool) -> None:
        """Add the end of a slice, and of its transfer if `is_end`. Wait if there are too many."""
        self._in_flight.append((event, is_end))
        if self.stream is None or len(self._in_flight) > MOST_IN_FLIGHT:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        event, is_end = self._in_flight.popleft()
        event.synchronize()
        if is_end:
            self.call_when_ended()

    def _recorded(self) -> Event:
        event = self._new_event()
        event.record()
        return event
