"""Decoding: how far the plans of requests in slots reach, and which of them decode.

Decision: what changes every step is kept in numpy columns, one element per slot, and decode rows
are planned and completed as arrays. Who leaves is only marked; rows are rebuilt once, when they are
next looked at. So a steady decode costs a few array operations a step, whatever the number of rows,
and a step in which all of them end costs little more.
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
    """Columns by slot for all requests in slots, the rows of those that decode, steps in flight."""

    def __init__(self, num_slots: int, page_tokens: int, num_drafts: int) -> None:
        self.page_tokens = page_tokens
        self.planned = np.zeros(num_slots, np.int32)  # tokens the issued plans compute, at most
        self.limit = np.zeros(num_slots, np.int32)
        self.room = np.zeros(num_slots, np.int32)  # tokens the held pages can take
        self.tails = Tails(num_slots, page_tokens)
        self.drafting = Drafting(num_slots, num_drafts)
        self.owner = np.full(num_slots, -1, np.int64)  # request ids
        self._rows = rows_of([])  # may still name those who have left
        self._left: set[Request] = set()
        self._issued = self._rows  # what the device has
        self._flights: dict[int, Flight] = {}

    @property
    def rows(self) -> Rows:
        """The rows of all requests in slots whose known tokens are fed."""
        if self._left:
            self._rows = rows_of([r for r in self._rows.requests if r not in self._left])
            self._left.clear()
        return self._rows

    def begin(self, request: Request, num_pages: int) -> None:
        """A request has got a slot, `num_pages` pages, and its num_cached tokens."""
        slot = request.slot
        self.owner[slot] = request.id
        self.planned[slot] = request.num_cached
        self.limit[slot] = request.limit
        self.room[slot] = num_pages * self.page_tokens
        self.tails.begin(request)
        if self.drafting.most:
            self.drafting.begin(slot)

    def grow(self, request: Request, num_pages: int) -> int:
        """Gives a request the room of more pages. Returns the index of the first of them."""
        at = int(self.room[request.slot]) // self.page_tokens
        self.room[request.slot] += num_pages * self.page_tokens
        return at

    def prefills(self, request: Request) -> bool:
        return bool(self.planned[request.slot] < request.prefill_until)

    def leave(self, request: Request) -> None:
        """A request gives up its slot; issued plans may still write to its pages.

        From now on it says itself how many of their lines concern it, and what they write.
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
        """The rows that may still sample, and how far each is planned already.

        Left out are those whose last token is on its way.
        """
        rows = self.rows
        planned_R = self.planned.take(rows.slots)
        wants = planned_R + 1 < self.limit.take(rows.slots)
        if np.count_nonzero(wants) < len(wants):  # a sixth of what wants.all() takes
            rows = rows_of([r for r, want in zip(rows.requests, wants, strict=True) if want])
            planned_R = planned_R[wants]
        return rows, planned_R

    def short_of_room(self, rows: Rows, ends_R: Int32) -> list[Request]:
        """The requests whose pages don't reach so far."""
        short = ends_R > self.room.take(rows.slots)
        return [rows.requests[i] for i in short.nonzero()[0].tolist()]

    def issue(
        self, step: int, decodes: Rows, drafts_R: Int32 | None, firsts: list[Request]
    ) -> tuple[Rows, bool]:
        """A step is on its way. Returns its sampling rows, and whether `decodes` are known.

        `firsts`: the requests whose known tokens end in this step; they decode from now on.
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
        """Whose row of an issued step it is, and the drafts it feeds, all earlier steps landed."""
        flight = self._flights[step]
        count = 0 if flight.drafts is None else flight.drafts[row]
        return int(flight.rows.ids[row]), self.drafting.fed(flight.rows.slots[row], count)

    def land(self, step: int) -> Flight:
        """The results of an issued step have come."""
        return self._flights.pop(step)

    def present(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Which of a flight's requests still have the slots they had. None: all of them."""
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
