"""Queue of reads and writes between the caller and the I/O threads of the disk tier.

Life of a transfer: queued -> running -> copying -> done. Only while it is `copying` does an I/O
thread touch the caller's buffer. In all other states the caller's buffer can be given back at once,
so a disk that hangs holds no buffer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

log = logging.getLogger("disk")
Direction = Literal["read", "write"]


@dataclass(slots=True, eq=False)
class Transfer:
    ticket: int
    direction: Direction
    key: bytes
    buffer: memoryview  # of the caller
    state: Literal["queued", "running", "copying", "done"] = "queued"
    started: float = 0.0  # monotonic time at which it began to run


class Transfers:
    """Queues of reads and of writes. All methods may be called from any thread.

    Only writes are bounded. Every read fills a slot of host memory, which bounds them.

    `wake` is called without arguments, usually from an I/O thread, when `poll` has new results.
    """

    def __init__(self, max_writes: int, wake: Callable[[], None]) -> None:
        self._max_writes = max_writes
        self._call_wake = wake
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[Transfer]] = {"read": deque(), "write": deque()}
        self._open: dict[int, Transfer] = {}  # by ticket: not done yet
        self._working: set[Transfer] = set()  # an I/O thread has not returned from them
        self._writing: set[bytes] = set()  # keys of writes that are queued or at work
        self._results: list[tuple[int, bool]] = []
        self._latest = 0  # ticket
        self._is_closed = False

    def submit(self, direction: Direction, key: bytes, buffer: memoryview) -> int | None:
        """Queue a transfer and return its ticket, or None if the queue is full or closed."""
        with self._changed:
            queue = self._queues[direction]
            is_full = direction == "write" and len(queue) >= self._max_writes
            if self._is_closed or is_full:
                return None
            self._latest += 1
            transfer = Transfer(self._latest, direction, key, buffer)
            queue.append(transfer)
            self._open[transfer.ticket] = transfer
            if direction == "write":
                self._writing.add(key)
            self._changed.notify_all()
            return transfer.ticket

    def answer(self, ok: bool) -> int:
        """Return a ticket whose result is already known."""
        with self._changed:
            self._latest += 1
            ticket = self._latest
            is_first = self._add_result(ticket, ok)
        if is_first:
            self.wake()
        return ticket

    def is_writing(self, key: bytes) -> bool:
        return key in self._writing

    def take(self, direction: Direction) -> Transfer | None:
        """Return the next transfer, blocking; None once the queues are closed."""
        with self._changed:
            queue = self._queues[direction]
            self._changed.wait_for(lambda: queue or self._is_closed)
            if self._is_closed:
                return None
            transfer = queue.popleft()
            transfer.state = "running"
            transfer.started = time.monotonic()
            self._working.add(transfer)
            self._changed.notify_all()
            return transfer

    def begin_copy(self, transfer: Transfer) -> bool:
        """Reserve the caller's buffer for a copy; False if it was given back meanwhile."""
        with self._changed:
            if transfer.state != "running":
                return False
            transfer.state = "copying"
            return True

    def finish(self, transfer: Transfer, ok: bool) -> None:
        """Give the caller's buffer back with a result, unless that has been done."""
        with self._changed:
            is_first = self._finish(transfer, ok)
        if is_first:
            self.wake()

    def leave(self, transfer: Transfer) -> None:
        """Note that an I/O thread has ended its work for a transfer."""
        with self._changed:
            self._working.discard(transfer)
            self._forget_key(transfer)
            self._changed.notify_all()

    def fail_all(self) -> None:
        """Give all buffers back with a failure, except those that are being copied."""
        with self._changed:
            self._clear_queues()
            waiting = [t for t in self._open.values() if t.state != "copying"]
            was_empty = not self._results
            for transfer in waiting:
                self._finish(transfer, False)
            is_first = was_empty and bool(waiting)
        if is_first:
            self.wake()

    def cancel(self, ticket: int) -> None:
        """Give the buffer back without a result. Return once no thread touches it."""
        with self._changed:
            if (transfer := self._open.get(ticket)) is not None:
                self._changed.wait_for(lambda: transfer.state != "copying")
                if transfer.state == "queued":
                    self._queues[transfer.direction].remove(transfer)
                    self._forget_key(transfer)
                transfer.state = "done"
                self._open.pop(ticket, None)
            self._results = [result for result in self._results if result[0] != ticket]

    def poll(self) -> list[tuple[int, bool]]:
        """Return the results since the last call: tickets, and True if the copy was made."""
        if not self._results:
            return []
        with self._changed:
            results, self._results = self._results, []
            return results

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until `poll` has results. Return False after `timeout_s`."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._results, timeout_s))

    def oldest_start(self, timeout_s: float | None) -> float | None:
        """Return when the longest running work began. Wait for some if there is none.

        Return None after `timeout_s` without work, or once the queues are closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._working or self._is_closed, timeout_s)
            if self._is_closed or not self._working:
                return None
            return min(transfer.started for transfer in self._working)

    def close(self) -> None:
        """Fail all transfers. Return once no thread touches a caller's buffer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.fail_all()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)

    def wake(self) -> None:
        """Call the caller's function."""
        try:
            self._call_wake()
        except Exception:  # an I/O thread must survive it
            log.exception("the wake function of the disk tier failed")

    def _clear_queues(self) -> None:
        for queue in self._queues.values():
            for transfer in queue:
                self._forget_key(transfer)
            queue.clear()

    def _forget_key(self, transfer: Transfer) -> None:
        if transfer.direction == "write":
            self._writing.discard(transfer.key)

    def _finish(self, transfer: Transfer, ok: bool) -> bool:
        """Return True if this is the first result since the last poll."""
        if transfer.state == "done":
            return False
        transfer.state = "done"
        del self._open[transfer.ticket]
        return self._add_result(transfer.ticket, ok)

    def _add_result(self, ticket: int, ok: bool) -> bool:
        self._results.append((ticket, ok))
        self._changed.notify_all()
        return len(self._results) == 1
