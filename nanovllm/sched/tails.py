"""The newest tokens of the requests in slots, which their own lists do not have yet.

Decision: a step brings most rows one token and nothing else to do. As columns that is a few array
operations for any number of rows. A request's own list catches up when somebody must look at it: a
page is full, a stop token or the limit has come, or it leaves its slot.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nanovllm.plan import Int32
from nanovllm.sched.request import Request

STOPS = 4  # ids a slot compares with at once; a request with more of them is looked at every step


class Tails:
    """The newest tokens of requests in slots: as many as make their last page full, at most."""

    def __init__(self, num_slots: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._tokens_NT = np.zeros((num_slots, page_tokens), np.int32)
        self._counts_N = np.zeros(num_slots, np.int32)
        self._due_N = np.zeros(num_slots, np.int32)  # the count at which to look at the request
        self._stops_KN = np.zeros((STOPS, num_slots), np.int32)
        self._most_stops = 1  # rows of it that anybody has needed

    def begin(self, request: Request) -> None:
        """Begins the tail of a request that has just got its slot."""
        stops = list(request.stop_ids)
        self._stops_KN[:, request.slot] = -1
        self._stops_KN[: len(stops), request.slot] = stops[:STOPS]
        self._most_stops = max(self._most_stops, min(len(stops), STOPS))
        self._empty(request)

    def append(self, slots_R: npt.NDArray[np.int64], tokens_R: Int32) -> list[int]:
        """Appends a token to each tail. Returns the rows whose requests are to be looked at."""
        at_R = self._counts_N[slots_R]
        self._tokens_NT[slots_R, at_R] = tokens_R
        at_R += 1
        self._counts_N[slots_R] = at_R
        is_stop_R = (self._stops_KN[: self._most_stops].take(slots_R, 1) == tokens_R).any(0)
        rows: list[int] = (is_stop_R | (at_R >= self._due_N[slots_R])).nonzero()[0].tolist()
        return rows

    def flush(self, request: Request) -> None:
        """Moves the tail of a request in a slot to its own list."""
        tail = self._tokens_NT[request.slot, : self._counts_N[request.slot]]
        request.tokens.frombytes(tail.tobytes())
        self._empty(request)

    def _empty(self, request: Request) -> None:
        num_tokens = len(request.tokens)
        until_full = self.page_tokens - (num_tokens - 1) % self.page_tokens
        due = min(until_full, request.limit - num_tokens)
        self._counts_N[request.slot] = 0
        self._due_N[request.slot] = due if len(request.stop_ids) <= STOPS else 1
