"""Planned progress of all requests in slots, their latest tokens, and the decode rows among them.

Decision: values that change every step are numpy columns, one element per slot, and decode rows
are planned and completed as arrays. A request that leaves is only marked; rows are rebuilt once,
at the next access. A steady decode thus costs a few array operations a step for any number of
rows. A step in which all rows end costs little more.

Decision: most rows of a step get one token and need nothing else. In columns, that is a few array
operations for any number of rows. Tokens move to a request's own list only at the end of a page, at
a stop token, at the limit, or when the request leaves its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanovllm.plan import Int32
from nanovllm.sched.drafting import Drafting
from nanovllm.sched.request import Request, State
from nanovllm.speculate import Drafts

STOPS = 4  # stop ids that are compared as columns; requests with more are checked every step


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Requests, with their slots and ids as arrays."""

    requests: list[Request]
    slots: npt.NDArray[np.int64]  # indexing by int64 is four times as fast as by int32
    ids: npt.NDArray[np.int64]
    masked: list[int]  # indices of the requests with a grammar


def rows_of(requests: list[Request]) -> Rows:
    count = len(requests)
    slots = np.fromiter((r.slot for r in requests), np.int64, count)
    ids = np.fromiter((r.spec.request_id for r in requests), np.int64, count)
    masked = [i for i, r in enumerate(requests) if r.spec.grammar]
    return Rows(requests, slots, ids, masked)


@dataclass(frozen=True, slots=True)
class Flight:
    """Sampling rows of an issued step, in the order of its result."""

    rows: Rows  # the decode rows, then the requests whose prompt ends in this step
    drafts: Int32 | None  # number of drafts of each row; None if no row has drafts


class Decoding:
    """Columns by slot, the rows of requests that decode, and the steps in flight."""

    def __init__(self, num_slots: int, page_tokens: int, drafts: Drafts) -> None:
        self.page_tokens = page_tokens
        # Tokens that the issued plans compute, at most.
        self.planned = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.room = np.zeros(num_slots, np.int32)  # tokens the held pages can take
        self.drafting = Drafting(num_slots, drafts)
        self.owner = np.full(num_slots, -1, np.int64)  # request ids
        # Tokens of each slot that follow its request's own list, up to the end of a page.
        self._tails_NT = np.zeros((num_slots, page_tokens), np.int32)
        self._counts_N = np.zeros(num_slots, np.int32)
        self._due_N = np.zeros(num_slots, np.int32)  # count at which the request must be checked
        self._stops_KN = np.zeros((STOPS, num_slots), np.int32)
        self._most_stops = 1  # rows of _stops_KN in use
        self._rows = rows_of([])
        self._has_left = False  # True if _rows may still contain requests without a slot
        self._issued = self._rows  # the rows of the latest issued plan
        self._flights: dict[int, Flight] = {}

    @property
    def rows(self) -> Rows:
        """Rows of all requests in slots whose prompt has been planned to the end."""
        if self._has_left:
            going = [r for r in self._rows.requests if r.state is State.DECODING]
            self._rows = rows_of(going)
            self._has_left = False
        return self._rows

    def begin(self, request: Request, num_pages: int) -> None:
        """Initialise the columns of a request that was admitted with `num_pages` pages."""
        slot = request.slot
        self.owner[slot] = request.id
        self.planned[slot] = request.num_cached
        self.limit[slot] = request.limit
        self.room[slot] = num_pages * self.page_tokens
        stops = list(request.stop_ids)
        self._stops_KN[:, slot] = -1
        self._stops_KN[: len(stops), slot] = stops[:STOPS]
        self._most_stops = max(self._most_stops, min(len(stops), STOPS))
        self._empty_tail(request)
        if self.drafting.most:
            self.drafting.begin(slot)

    def grow(self, request: Request, num_pages: int) -> int:
        """Add the room of more pages. Return the index of the first one in the page table."""
        at = int(self.room[request.slot]) // self.page_tokens
        self.room[request.slot] += num_pages * self.page_tokens
        return at

    def leave(self, request: Request) -> None:
        """Free a request's slot while issued plans may still write to its pages.

        From now on `request.num_in_flight` counts its pending results, and `request.written` and
        `request.drafted` are the positions that they may still write.
        """
        self.flush(request)
        num_known, planned = len(request.tokens), int(self.planned[request.slot])
        reach = int(self.drafting.reach[request.slot])
        if request.state is State.DECODING:
            self._has_left = True
            flights = self._flights.values()
            request.num_in_flight = sum(int(request.id in f.rows.ids) for f in flights)
        verified = num_known - 1 if num_known > request.prefill_until else request.num_cached
        request.written = range(verified, max(planned, reach))
        request.drafted = range(verified, reach)
        self.owner[request.slot] = -1

    # -- latest tokens ----------------------------------------------------------------------

    def append(self, slots_R: npt.NDArray[np.int64], tokens_R: Int32) -> list[int]:
        """Append a token to each row. Return the rows whose requests must be checked."""
        at_R = self._counts_N[slots_R]
        self._tails_NT[slots_R, at_R] = tokens_R
        at_R += 1
        self._counts_N[slots_R] = at_R
        is_stop_R = (self._stops_KN[: self._most_stops].take(slots_R, 1) == tokens_R).any(0)
        rows: list[int] = (is_stop_R | (at_R >= self._due_N[slots_R])).nonzero()[0].tolist()
        return rows

    def flush(self, request: Request) -> None:
        """Move a request's tokens from the columns to its own list."""
        tail = self._tails_NT[request.slot, : self._counts_N[request.slot]]
        request.tokens.frombytes(tail.tobytes())
        self._empty_tail(request)

    def _empty_tail(self, request: Request) -> None:
        num_tokens = len(request.tokens)
        until_full = self.page_tokens - (num_tokens - 1) % self.page_tokens
        due = min(until_full, request.limit - num_tokens)
        self._counts_N[request.slot] = 0
        self._due_N[request.slot] = due if len(request.stop_ids) <= STOPS else 1

    # -- steps ------------------------------------------------------------------------------

    def wanting(self) -> tuple[Rows, Int32]:
        """Return the rows that may still sample, and the planned tokens of each.

        Rows whose last token is in flight are left out.
        """
        rows = self.rows
        planned_R = self.planned.take(rows.slots)
        wants = planned_R + 1 < self.limit.take(rows.slots)
        if np.count_nonzero(wants) < len(wants):  # six times as fast as wants.all()
            rows = rows_of([r for r, want in zip(rows.requests, wants, strict=True) if want])
            planned_R = planned_R[wants]
        return rows, planned_R

    def short_of_room(self, rows: Rows, ends_R: Int32) -> list[Request]:
        """Return the requests whose pages hold fewer than `ends_R` tokens."""
        short = ends_R > self.room.take(rows.slots)
        return [rows.requests[i] for i in short.nonzero()[0].tolist()]

    def issue(
        self,
        step: int,
        decodes: Rows,
        drafts_R: Int32 | None,
        firsts: list[Request],
        *,
        as_decodes: bool = False,
    ) -> tuple[Rows, Rows, bool]:
        """Record an issued step. Return its sampling rows, its decode rows, and True if the latter
        are those of the step before.

        `firsts` are the requests whose prompt ends in this step. They decode from now on, and with
        `as_decodes` in this step already.
        """
        rows, decoding = decodes, self.rows
        if firsts:
            rows = rows_of(decodes.requests + firsts)
            self._rows = rows if decodes is decoding else rows_of(decoding.requests + firsts)
            if drafts_R is not None:
                drafts_R = np.append(drafts_R, np.zeros(len(firsts), np.int32))
        for request in firsts:
            request.state = State.DECODING
        self._flights[step] = Flight(rows, drafts_R)
        if as_decodes:
            decodes = rows
        same, self._issued = decodes is self._issued, decodes
        return rows, decodes, same

    def fed(self, step: int, row: int) -> tuple[int, list[int]]:
        """Return the request id and the drafts of a row. All earlier steps must be complete."""
        flight = self._flights[step]
        count = 0 if flight.drafts is None else flight.drafts[row]
        return int(flight.rows.ids[row]), self.drafting.fed(flight.rows.slots[row], count)

    def pop_flight(self, step: int) -> Flight:
        """Remove and return the rows of a step whose results have arrived."""
        return self._flights.pop(step)

    def present(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the requests that are still in their slots, or None if all are."""
        if rows is self._rows and not self._has_left:
            return None
        is_present: npt.NDArray[np.bool_] = self.owner[rows.slots] == rows.ids
        return is_present

    def check(self, running: Sequence[Request]) -> None:
        decoding = {r.id for r in self.rows.requests}
        assert decoding == {r.id for r in running if r.state is State.DECODING}
        assert len(decoding) == len(self.rows.requests), "a request has two rows"
        owners = {r.slot: r.id for r in running}
        assert owners == {i: int(self.owner[i]) for i in np.flatnonzero(self.owner >= 0)}
        for request in running:
            planned = int(self.planned[request.slot])
            assert planned < request.limit
            assert planned <= self.room[request.slot]
            assert (planned < request.prefill_until) == (request.state is not State.DECODING)
