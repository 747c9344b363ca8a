"""Whether the step loop gets on: how long the step in flight has taken, and how long it may.

Knows neither plans nor devices. One thread writes and another reads, hence the single assignments.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

FIRST_STEP_S = 600.0  # what a step may take before any has been seen


class StepProgress:
    """Steps begin and end in order; more than one may be in flight."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque()  # of the steps in flight, oldest first
        self._since: float | None = None  # the last begin or end; None while nothing is in flight
        self._longest_s = 0.0
        self._slowest_token_s = 0.0
        self._has_ended = False

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens is about to be launched."""
        if not self._tokens:
            self._since = monotonic()
        self._tokens.append(num_tokens)

    def end(self) -> None:
        """The oldest step in flight has ended."""
        now, num_tokens = monotonic(), self._tokens.popleft()
        took_s = now - (self._since or now)
        self._longest_s = max(self._longest_s, took_s)
        self._slowest_token_s = max(self._slowest_token_s, took_s / max(1, num_tokens))
        self._has_ended = True
        self._since = now if self._tokens else None

    def age_s(self) -> float:
        """Seconds since a step began or ended; 0 while nothing is in flight."""
        since = self._since
        return 0.0 if since is None else monotonic() - since

    def late_s(self) -> float:
        """How much longer the step in flight takes than any seen, and than its tokens explain.

        Below 0 while it is within both. A step of many tokens may take as long as the slowest
        token of any step makes them, so that the first long prompt is no alarm.
        """
        age = self.age_s()
        if not age:
            return 0.0
        try:
            num_tokens = max(self._tokens)
        except (ValueError, RuntimeError):  # it has just ended, or another has just begun
            return 0.0
        expected = max(self._longest_s, num_tokens * self._slowest_token_s)
        return age - (expected if self._has_ended else FIRST_STEP_S)
