"""Latest tokens of the requests in slots, not yet appended to each request's own list.

Decision: most rows of a step get one token and need nothing else. In columns, that is a few array
operations for any number of rows. Tokens move to a request's own list only at the end of a page, at
a stop token, at the limit, or when the request leaves its slot.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nanovllm.plan import Int32
from nanovllm.sched.request import Request

STOPS = 4  # stop ids that are compared as columns; requests with more are checked every step


class Tails:
    """Tokens of each slot that follow its request's own list, up to the end of a page."""

    def __init__(self, num_slots: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._tokens_NT = np.zeros((num_slots, page_tokens), np.int32)
        self._counts_N = np.zeros(num_slots, np.int32)
        # The count at which the request must be checked.
        self._due_N = np.zeros(num_slots, np.int32)
        self._stops_KN = np.zeros((STOPS, num_slots), np.int32)
        self._most_stops = 1  # rows of _stops_KN in use

    def begin(self, request: Request) -> None:
        """Initialise the columns of a request that was admitted."""
        stops = list(request.stop_ids)
        self._stops_KN[:, request.slot] = -1
        self._stops_KN[: len(stops), request.slot] = stops[:STOPS]
        self._most_stops = max(self._most_stops, min(len(stops), STOPS))
        self._empty(request)

    def append(self, slots_R: npt.NDArray[np.int64], tokens_R: Int32) -> list[int]:
        """Append a token to each row. Return the rows whose requests must be checked."""
        at_R = self._counts_N[slots_R]
        self._tokens_NT[slots_R, at_R] = tokens_R
        at_R += 1
        self._counts_N[slots_R] = at_R
        is_stop_R = (self._stops_KN[: self._most_stops].take(slots_R, 1) == tokens_R).any(0)
        rows: list[int] = (is_stop_R | (at_R >= self._due_N[slots_R])).nonzero()[0].tolist()
        return rows

    def flush(self, request: Request) -> None:
        """Move a request's tokens from the columns to its own list."""
        tail = self._tokens_NT[request.slot, : self._counts_N[request.slot]]
        request.tokens.frombytes(tail.tobytes())
        self._empty(request)

    def _empty(self, request: Request) -> None:
        num_tokens = len(request.tokens)
        until_full = self.page_tokens - (num_tokens - 1) % self.page_tokens
        due = min(until_full, request.limit - num_tokens)
        self._counts_N[request.slot] = 0
        self._due_N[request.slot] = due if len(request.stop_ids) <= STOPS else 1
