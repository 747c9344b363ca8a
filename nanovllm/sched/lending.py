"""Pages of prefill requests, for decode servers that read them.

A decode server (D) may read the first pages of a prompt while the last ones are computed. So a
prompt of several chunks is answered once the first one has been computed:

    completed      the request is reported as finished, with its lease, and runs on; the result of
                   each further chunk lets D read its pages
    end            D may read the last pages; or the lease is revoked, and D computes the prompt
    not_wanted     D has ended the lease, or it has expired: the request is aborted

Decision: a prompt of one chunk is lent at its end, as are models with recurrent states. The state
is complete last, and these models have few bytes in pages.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nanovllm.kv.memory import KVMemory
from nanovllm.plan import Lent
from nanovllm.sched.request import Request
from nanovllm.wire import Finish, FinishReason


class PageLender(Protocol):
    """Grants leases of pages to decode servers."""

    num_ranks: int

    def lend(self, request: str, lent: Lent, num_tokens: int, num_ready: int | None = None) -> str:
        """Return the object of the answer in JSON, or "" without a lease.

        `num_tokens` are those of the pages, of which the first `num_ready` are complete; None: all.
        """
        ...

    def advance(self, request: str, num_ready: int, *, is_last: bool = False) -> None:
        """Note that the first `num_ready` pages of an incomplete lease are complete."""
        ...

    def revoke(self, request: str) -> Lent | None:
        """End an incomplete lease. Return its pages; None if it has ended already."""
        ...


class Computed(NamedTuple):
    """A chunk whose step is in flight."""

    step: int
    request: Request
    end: int  # tokens of the prompt that are computed with this step


class Lending:
    """Leases of the requests of a prefill server's scheduler."""

    def __init__(self, memory: KVMemory, lender: PageLender) -> None:
        self._memory, self._lender = memory, lender
        self._chunks: deque[Computed] = deque()  # of requests that may be lent before their end
        self._answered: dict[int, Request] = {}  # those whose answer was sent, by id

    def issued(self, step: int, request: Request, end: int) -> None:
        """Note that a step computes a prompt up to `end` tokens, but not to its end."""
        if request.spec.lends:
            self._chunks.append(Computed(step, request, end))

    def completed(self, step: int) -> list[Finish]:
        """Lend what the steps up to this one have computed. Return the answers to send.

        The result of a step without sampled tokens is that of the first rank. Other ranks may still
        compute their last layer; they have finished it once a later step is complete.
        """
        answers: list[Finish] = []
        last = step - (self._lender.num_ranks > 1)
        while self._chunks and self._chunks[0].step <= last:
            _, request, end = self._chunks.popleft()
            num_ready = min(end // self._memory.page_tokens, self._num_pages(request))
            if request.id in self._answered:
                self._lender.advance(str(request.id), num_ready)
            elif num_ready and (handover := self._granted(request, num_ready)):
                self._answered[request.id] = request
                answers.append(Finish(request.id, FinishReason.LENGTH, handover))
        return answers

    def are_answered(self, ids_R: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which rows of a step are of answered requests."""
        return np.isin(ids_R, list(self._answered))

    def end(self, request: Request, reason: FinishReason) -> Finish | None:
        """End a request that leaves for good, before its pages are released. Return the answer.

        Return None if it was answered before.
        """
        is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if request.id not in self._answered:
            lends = is_whole and request.spec.lends
            return Finish(request.id, reason, self._granted(request) if lends else "")
        del self._answered[request.id]
        num_pages = self._num_pages(request)
        if is_whole and self._memory.has_computed(request.id, num_pages):
            self._lender.advance(str(request.id), num_pages, is_last=True)
        elif (lent := self._lender.revoke(str(request.id))) is not None:
            self._memory.take_back(lent.pages, lent.state)
        return None

    def left(self, request: Request) -> None:
        """Forget the chunks of a request that leaves its slot, and with it its pages."""
        if request.spec.lends:
            self._chunks = deque(one for one in self._chunks if one.request is not request)

    def was_answered(self, request: Request) -> bool:
        return request.id in self._answered

    def not_wanted(self, request_id: int) -> Request | None:
        """Return the request of a lease that has ended, if it still runs."""
        return self._answered.get(request_id)

    def _num_pages(self, request: Request) -> int:
        return (request.num_prompt - 1) // self._memory.page_tokens  # D computes the last token

    def _granted(self, request: Request, num_ready: int | None = None) -> str:
        """Lend a request's leading pages, which stay held. Return the object of the answer."""
        memory = self._memory
        lent = memory.lend(request.id, self._num_pages(request), is_whole=num_ready is None)
        if not lent.pages:
            return ""
        num_tokens = len(lent.pages) * memory.page_tokens
        handover = self._lender.lend(str(request.id), lent, num_tokens, num_ready)
        if not handover:
            memory.take_back(lent.pages, lent.state)
        return handover
