"""Hang detection of the step loop: the age of the step in flight, and its limit.

One thread writes and another reads, so every update is a single assignment.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

FIRST_STEP_S = 600.0  # limit of a step before any has ended


class StepProgress:
    """Times of steps. They begin and end in order, and several may be in flight."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque()  # of the steps in flight, oldest first
        self._since: float | None = None  # the last begin or end; None while nothing is in flight
        self._longest_s = 0.0
        self._slowest_token_s = 0.0
        self._has_ended = False

    def begin(self, num_tokens: int) -> None:
        """Record the launch of a step with `num_tokens` tokens."""
        if not self._tokens:
            self._since = monotonic()
        self._tokens.append(num_tokens)

    def end(self) -> None:
        """Record the end of the oldest step in flight."""
        now, num_tokens = monotonic(), self._tokens.popleft()
        took_s = now - (self._since or now)
        self._longest_s = max(self._longest_s, took_s)
        self._slowest_token_s = max(self._slowest_token_s, took_s / max(1, num_tokens))
        self._has_ended = True
        self._since = now if self._tokens else None

    def age_s(self) -> float:
        """Return the seconds since a step began or ended; 0 while nothing is in flight."""
        since = self._since
        return 0.0 if since is None else monotonic() - since

    def late_s(self) -> float:
        """Return the seconds by which the step in flight exceeds its limit; negative below it.

        The limit is the longest step so far, or the time of the step's tokens at the slowest rate
        so far, whichever is larger. The second keeps the first long prompt from raising an alarm.
        """
        age = self.age_s()
        if not age:
            return 0.0
        try:
            num_tokens = max(self._tokens)
        except (ValueError, RuntimeError):  # the step has just ended, or another has just begun
            return 0.0
        expected = max(self._longest_s, num_tokens * self._slowest_token_s)
        return age - (expected if self._has_ended else FIRST_STEP_S)
