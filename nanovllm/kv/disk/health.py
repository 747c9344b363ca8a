"""Faults of the disk tier: one warning per kind, and steps aside while the disk cannot be used."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from nanovllm.kv.disk.format import PageFault
from nanovllm.plan import Availability

KINDS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read-only",
    errno.EACCES: "unreadable",
    errno.EPERM: "unreadable",
}
# Faults of the disk as a whole, in which reading would fail or wait as well as writing.
STOPS_READING = {"slow", "removed"}
MAX_PAUSES = 16  # longest pause between trials, in units of `retry_s`
log = logging.getLogger("disk")


def kind_of(error: OSError | PageFault) -> str:
    """Return the kind of a fault, a word for log lines and counters."""
    if isinstance(error, PageFault):
        return error.kind
    return KINDS.get(error.errno or 0, "failing")


def detail_of(error: OSError | PageFault) -> str:
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)


class Health:
    """State of one folder's disk. All methods may be called from any thread.

    1. A fault of one file (corrupt, truncated, foreign, unreadable) is a miss. It is logged once
       per kind, and again only after `quiet_s` seconds without that kind.
    2. A fault of the disk (full, read-only, failing, slow, removed) stops writing, and in some
       cases reading. `is_due` returns True after `retry_s` seconds; then the disk is tried.
    3. `recover` ends all stops after a successful trial, with one line in the log. If the disk
       fails again soon, the pause is doubled.

    `changed` is called when reading or writing stops or starts again.
    """

    def __init__(
        self,
        where: str,
        retry_s: float,
        quiet_s: float,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.can_read = True
        self.can_write = True
        self.counts: Counter[str] = Counter()  # faults by kind, since the start
        self._where = where
        self._changed = changed
        self._retry_s = retry_s
        self._pause_s = retry_s  # until the next trial
        self._quiet_s = quiet_s
        self._lock = threading.Lock()
        self._latest: dict[str, float] = {}  # time of the latest fault, by kind
        self._retry_at = 0.0
        self._recovered_at = float("-inf")

    @property
    def availability(self) -> Availability:
        return Availability(self.can_read, self.can_write)

    def note(self, kind: str, detail: str) -> None:
        """Count a fault of one file, and log it unless its kind is already logged."""
        with self._lock:
            is_new = self._is_new(kind)
        if is_new:
            text = "%s: a page is %s (%s), so it is computed again; further ones are not logged"
            log.warning(text, self._where, kind, detail)

    def step_aside(self, kind: str, detail: str) -> None:
        """Stop using the disk until `recover`, and log the reason unless it is already logged."""
        with self._lock:
            is_new = self._is_new(kind)
            now = time.monotonic()
            if self.can_write:  # double the pause if the last recovery did not last
                is_back = now - self._recovered_at < 10 * self._pause_s
                longer = min(2 * self._pause_s, MAX_PAUSES * self._retry_s)
                self._pause_s = longer if is_back else self._retry_s
            self.can_write = False
            self.can_read = self.can_read and kind not in STOPS_READING
            self._retry_at = now + self._pause_s
            stopped = "writes" if self.can_read else "reads and writes"
        if is_new:
            warning = f"the disk is {kind} ({detail}); the disk tier stops its {stopped}"
            log.warning("%s: %s and tries again every %g s", self._where, warning, self._pause_s)
        self._changed()

    def is_due(self) -> bool:
        """Return True if the disk is not in use and should be tried again."""
        return not self.can_write and time.monotonic() >= self._retry_at

    def recover(self) -> None:
        """Use the disk again."""
        with self._lock:
            was_stopped = not self.can_write
            self.can_read = self.can_write = True
            self._recovered_at = time.monotonic()
            self._latest.clear()
        if was_stopped:
            log.info("%s: the disk tier reads and writes again", self._where)
            self._changed()

    def _is_new(self, kind: str) -> bool:
        now = time.monotonic()
        before = self._latest.get(kind)
        self._latest[kind] = now
        self.counts[kind] += 1
        return before is None or now - before > self._quiet_s
