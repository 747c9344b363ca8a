"""Tickets of a decode server's requests until they have started or ended; counts of transfers."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

from nanovllm.config import Recipe
from nanovllm.engine.executor import Executor
from nanovllm.kv.keys import PageKeys
from nanovllm.transfer.lender import Lender
from nanovllm.transfer.remote_pages import RemotePages
from nanovllm.wire import FETCH_BYTES, FETCH_S, Generate, StepOutput, TransferStats


@dataclass(frozen=True, slots=True)
class Tickets:
    """Offers tickets of requests to `pages`, and settles them."""

    pages: RemotePages
    page_tokens: int

    def offer(self, request: Generate, adapter: bytes) -> None:
        """Offer the request's ticket. `adapter` is the digest of its adapter, as in page keys.

        One token of the prompt is always left to compute.
        """
        tokens = array("i")
        tokens.frombytes(request.prompt)
        keys = PageKeys(tokens, request.salt, self.page_tokens, adapter)
        most = max(len(tokens) - 1, 0) // self.page_tokens
        self.pages.offer(request.request_id, request.ticket, keys.full, most)

    def published(self, output: StepOutput) -> None:
        """Settle the tickets of requests that have started, ended or been refused."""
        for started in output.started:
            self.pages.settle(started.request_id)
        for finished in output.finished:
            self.pages.settle(finished.request_id)
        for refused in output.refused:
            self.pages.settle(refused.request_id)


def tickets_of(executor: Executor, recipe: Recipe) -> Tickets | None:
    """Return the tickets of a decode server; None for other servers. `recipe` is resolved."""
    if executor.remote is None:
        return None
    return Tickets(executor.remote, int(recipe.cache.page_tokens))


@dataclass(slots=True)
class TransferCounts:
    """Counts of one engine's transfers: of its lender, or of the pages that it reads."""

    lender: Lender | None
    remote: RemotePages | None
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    by_bytes: list[int] = field(default_factory=lambda: [0] * (len(FETCH_BYTES) + 1))
    by_s: list[int] = field(default_factory=lambda: [0] * (len(FETCH_S) + 1))

    def stats(self) -> TransferStats | None:
        """Return the counts since the start; None without a role."""
        if self.lender is not None:
            return TransferStats(
                num_leases=len(self.lender.leases),
                num_leased_pages=self.lender.leases.num_pages,
                leases=dict(self.lender.leases.counts),
                sent_bytes=self.lender.sent_bytes,
            )
        if self.remote is None:
            return None
        for num_bytes, seconds in self.remote.taken_reads():
            self.fetched_bytes += num_bytes
            self.fetch_s += seconds
            self.by_bytes[bisect_left(FETCH_BYTES, num_bytes)] += 1
            self.by_s[bisect_left(FETCH_S, seconds)] += 1
        return TransferStats(
            tickets=dict(self.remote.counts),
            num_failed=self.remote.num_failed,
            fetched_bytes=self.fetched_bytes,
            fetches_by_bytes=self.by_bytes.copy(),
            fetch_s=self.fetch_s,
            fetches_by_s=self.by_s.copy(),
        )
