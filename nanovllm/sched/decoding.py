"""Planned progress of all requests in slots, and the decode rows among them.

Decision: values that change every step are numpy columns, one element per slot, and decode rows
are planned and completed as arrays. A request that leaves is only marked; rows are rebuilt once,
at the next access. A steady decode thus costs a few array operations a step for any number of
rows. A step in which all rows end costs little more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nanovllm.plan import Int32
from nanovllm.sched.drafting import Drafting
from nanovllm.sched.request import Request
from nanovllm.sched.rows import Flight, Rows, rows_of
from nanovllm.sched.tails import Tails


class Decoding:
    """Columns by slot, the rows of requests that decode, and the steps in flight."""

    def __init__(self, num_slots: int, page_tokens: int, num_drafts: int) -> None:
        self.page_tokens = page_tokens
        # Tokens that the issued plans compute, at most.
        self.planned = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.room = np.zeros(num_slots, np.int32)  # tokens the held pages can take
        self.tails = Tails(num_slots, page_tokens)
        self.drafting = Drafting(num_slots, num_drafts)
        self.owner = np.full(num_slots, -1, np.int64)  # request ids
        self._rows = rows_of([])  # may still contain requests in _left
        self._left: set[Request] = set()
        self._issued = self._rows  # the rows of the latest issued plan
        self._flights: dict[int, Flight] = {}

    @property
    def rows(self) -> Rows:
        """Rows of all requests in slots whose prompt has been planned to the end."""
        if self._left:
            self._rows = rows_of([r for r in self._rows.requests if r not in self._left])
            self._left.clear()
        return self._rows

    def begin(self, request: Request, num_pages: int) -> None:
        """Initialise the columns of a request that was admitted with `num_pages` pages."""
        slot = request.slot
        self.owner[slot] = request.id
        self.planned[slot] = request.num_cached
        self.limit[slot] = request.limit
        self.room[slot] = num_pages * self.page_tokens
        self.tails.begin(request)
        if self.drafting.most:
            self.drafting.begin(slot)

    def grow(self, request: Request, num_pages: int) -> int:
        """Add the room of more pages. Return the index of the first one in the page table."""
        at = int(self.room[request.slot]) // self.page_tokens
        self.room[request.slot] += num_pages * self.page_tokens
        return at

    def prefills(self, request: Request) -> bool:
        return bool(self.planned[request.slot] < request.prefill_until)

    def leave(self, request: Request) -> None:
        """Free a request's slot while issued plans may still write to its pages.

        From now on `request.num_in_flight` counts its pending results, and `request.written` and
        `request.drafted` are the positions that they may still write.
        """
        self.tails.flush(request)
        num_known, planned = len(request.tokens), int(self.planned[request.slot])
        reach = int(self.drafting.reach[request.slot])
        if planned >= request.prefill_until:
            self._left.add(request)
            flights = self._flights.values()
            request.num_in_flight = sum(int(request.id in f.rows.ids) for f in flights)
        vouched = num_known - 1 if num_known > request.prefill_until else request.num_cached
        request.written = range(vouched, max(planned, reach))
        request.drafted = range(vouched, reach)
        self.owner[request.slot] = -1

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
        self, step: int, decodes: Rows, drafts_R: Int32 | None, firsts: list[Request]
    ) -> tuple[Rows, bool]:
        """Record an issued step. Return its sampling rows, and True if `decodes` are unchanged.

        `firsts` are the requests whose prompt ends in this step. They decode from now on.
        """
        same, self._issued = decodes is self._issued, decodes
        rows, present = decodes, self.rows
        if firsts:
            rows = rows_of(decodes.requests + firsts)
            self._rows = rows if decodes is present else rows_of(present.requests + firsts)
            if drafts_R is not None:
                drafts_R = np.append(drafts_R, np.zeros(len(firsts), np.int32))
        self._flights[step] = Flight(rows, drafts_R)
        return rows, same

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
        if rows is self._rows and not self._left:
            return None
        here: npt.NDArray[np.bool_] = self.owner[rows.slots] == rows.ids
        return here

    def check(self, running: Sequence[Request]) -> None:
        decoding = {r.id for r in self.rows.requests}
        assert decoding == {r.id for r in running if not self.prefills(r)}
        assert len(decoding) == len(self.rows.requests), "a request has two rows"
        owners = {r.slot: r.id for r in running}
        assert owners == {i: int(self.owner[i]) for i in np.flatnonzero(self.owner >= 0)}
        for request in running:
            planned = int(self.planned[request.slot])
            assert planned < request.limit
            assert planned <= self.room[request.slot]
