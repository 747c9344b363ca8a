"""P's side of transfers: leases of prompts, and the server that sends their pages.

Life of a lease: lend() grants it and returns the object of P's answer. The prompt may still be
computed then: advance() tells how far it is. D reads the pages through the server and ends the
lease. Without that, a timer ends it at its expiry, also if P is idle. Both call `give_back` from a
thread; the engine then returns the pages to its pool.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from nanovllm.plan import Lent
from nanovllm.transfer.device_pages import DeviceMemory
from nanovllm.transfer.leases import LEASE_S, Lease, Leases
from nanovllm.transfer.messages import EngineCard
from nanovllm.transfer.page_server import PageServer, PageSource, no_parts
from nanovllm.transfer.params import answer_params
from nanovllm.transfer.tickets import VERSION, Ticket, TicketKey

SCAN_S = 1.0
log = logging.getLogger("transfer")


class Lender:
    """Owner of P's leases. `most_pages` limits the pages of all leases."""

    def __init__(
        self,
        listen: tuple[str, int],
        secret: str,
        *,
        layout: bytes,
        identity: bytes,
        page_bytes: int,
        most_pages: int,
        page: Callable[[int, int, int], memoryview],
        state: Callable[[int, range, int, int], memoryview] | None = None,
        state_parts: Callable[[int], int] = no_parts,
        lease_s: float = LEASE_S,
        memories: Sequence[DeviceMemory] = (),
        close_memory: Callable[[], None] = lambda: None,
        num_ranks: int = 1,
    ) -> None:
        """`page` returns the bytes of a page, for a share of several; it is called from threads.

        `state` returns parts of a checkpoint, and `state_parts` their number for each of several
        shares. `page_bytes` is the size of a page of each of `num_ranks` ranks. `memories` are
        those of all ranks, or empty. `close` calls `close_memory`, after which no process can read
        that of rank 0.
        """
        self.engine = secrets.token_hex(16)
        self.leases = Leases(lease_s)
        self.most_pages = most_pages
        self._key = TicketKey(secret)
        self._layout = layout
        self._identity = identity
        self._lease_s = lease_s
        self._close_memory = close_memory
        self._give_back: Callable[[Lease], None] = lambda _: None
        self._incomplete: dict[str, int] = {}  # generations by request; for the engine's thread
        self.num_ranks = num_ranks
        self._closing = threading.Event()
        card = EngineCard(
            engine=self.engine,
            layout=layout,
            identity=identity,
            page_bytes=page_bytes,
            num_ranks=num_ranks,
            state_parts=state_parts(num_ranks),
            memories=[*memories],
        )
        source = PageSource(page, lambda lease: self._give_back(lease), state, state_parts)
        self.server = PageServer(listen, secret, card, leases=self.leases, source=source)
        log.info("transfer.listen: %s:%d serves engine %s", *self.server.address, self.engine)
        threading.Thread(target=self._scan, name="transfer-scan", daemon=True).start()

    def call_when_ended(self, give_back: Callable[[Lease], None]) -> None:
        """Call `give_back` from any thread with each lease that has ended."""
        self._give_back = give_back

    def lend(self, request: str, lent: Lent, num_tokens: int, num_ready: int | None = None) -> str:
        """Grant a lease of pages that the caller holds. Return the object of the answer in JSON.

        Return "" if too many pages are leased already. With `num_ready`, the pages after that
        number are not complete: the caller must call `advance` for them, or `revoke`.
        """
        pages = lent.pages
        if not pages or self.leases.num_pages_with(pages) > self.most_pages:
            return ""
        generation = self.leases.grant(request, pages, lent.state, num_ready=num_ready)
        if num_ready is not None:
            self._incomplete[request] = generation
        ticket = Ticket(
            version=VERSION,
            engine=self.engine,
            generation=generation,
            request=request,
            pages=pages,
            text=lent.key,
            num_tokens=num_tokens,
            expires_at=time.time() + self._lease_s,
            layout=self._layout,
            identity=self._identity,
        )
        params = answer_params(self._key.sign(ticket), self.engine, request, num_tokens)
        return msgspec.json.encode(params).decode()

    def advance(self, request: str, num_ready: int, *, is_last: bool = False) -> None:
        """Note that the first `num_ready` pages of an incomplete lease are complete."""
        generation = self._incomplete.pop(request) if is_last else self._incomplete[request]
        self.leases.advance(generation, num_ready)

    def revoke(self, request: str) -> Lent | None:
        """End an incomplete lease. Return its pages; None if it has ended already."""
        lease = self.leases.revoke(self._incomplete.pop(request))
        return None if lease is None else Lent(lease.pages, state=lease.state)

    @property
    def sent_bytes(self) -> int:
        """Bytes of pages and states that decode servers have received, of all ranks."""
        return self.server.counts["bytes"]

    def close(self) -> None:
        self._closing.set()
        self.server.close()
        self._close_memory()

    def _scan(self) -> None:
        while not self._closing.wait(SCAN_S):
            for lease in self.leases.scan():
                text = "no decode server has read %d pages of request %s within %.0f s"
                log.warning(text, len(lease.pages), lease.request, self._lease_s)
                self._give_back(lease)
