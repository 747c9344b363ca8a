"""A prefill engine (P) and a decode engine (D) on simulated GPUs, with the faults of two hosts.

The tickets, leases, offers and memories are the real ones. Sockets are simulated by `PaperClient`:
it reads P's memory page by page over some steps, so that P may reuse a page meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace as replaced
from random import Random
from typing import Any

from msgspec.structs import replace

from nanovllm.engine.tickets import Tickets
from nanovllm.plan import Copies, Lent, Moved, Moves
from nanovllm.sched.lending import Lending
from nanovllm.transfer.leases import Lease, Leases
from nanovllm.transfer.lender import Lender
from nanovllm.transfer.page_client import ReaderLimits
from nanovllm.transfer.remote_pages import RemotePages
from nanovllm.transfer.tickets import Ticket, TicketKey
from nanovllm.wire import StepOutput
from tests.paper.draft_layers import NAN
from tests.paper.engine import PAGE, PaperEngine
from tests.paper.transfers import BUSY, PaperTransfers, Transfer

SECRET = "the secret of these tests"
KEY = TicketKey(SECRET)
LAYOUT, IDENTITY = b"layout", b"identity"
PARTS = 2  # of a state
LOST = -99  # state whose parts differ
LOST_SHARE = 0.08  # of the steps of a read by another rank than 0
SILENCE = 3  # steps until a frozen P is given up
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "hybrid": {"checkpoints": 5},
    "drafts": {"drafts": 2, "draft_lag": 1},
}


class PrefillEngine(Lender):
    """P, whose lender has no server and no threads. A step is a second of its leases."""

    def __init__(
        self, number: int, kind: str, lease_s: float, *, budget: int, fault: str = ""
    ) -> None:
        sizes: dict[str, Any] = dict(num_slots=4, budget=budget, num_pages=16)
        few = {"checkpoints": 2} if kind == "hybrid" else {}  # so that they are soon reused
        self.paper = PaperEngine(**sizes, **{**KINDS[kind], **few})
        self.paper.scheduler.queue.lending = Lending(self.paper.memory, self)
        self.fault = fault
        self.time = 0.0
        self.engine = f"p{number}"
        self.leases = Leases(lease_s, lambda: self.time)
        self.most_pages = 8
        self.is_frozen = False
        self.num_ranks = 1 + number % 2
        self._incomplete, self._returned = {}, set[int]()
        self._key, self._layout, self._identity, self._lease_s = KEY, LAYOUT, IDENTITY, lease_s

    def lend(self, request: str, lent: Lent, num_tokens: int, num_ready: int | None = None) -> str:
        handover = super().lend(request, lent, num_tokens, num_ready)
        if handover and self.fault == "pages are not held":
            self.paper.scheduler.take_back(lent.pages)
        if handover and lent.state >= 0 and self.fault == "states are not held":
            self.paper.memory.states.drop(lent.state)  # type: ignore[attr-defined]
        return handover

    def advance(self, request: str, num_ready: int, *, is_last: bool = False) -> None:
        if self.fault == "pages are ready too early":
            lease = self.leases.lease_of(self._incomplete[request])
            num_ready = len(lease.pages) if lease else num_ready
        super().advance(request, num_ready, is_last=is_last)

    def revoke(self, request: str) -> Lent | None:
        if self.fault != "leases are not revoked":
            return super().revoke(request)
        lease = self.leases.lease_of(self._incomplete.pop(request))
        if lease is not None:  # its pages return to the pool, but D may read them
            self.leases.advance(lease.generation, len(lease.pages))
            self._returned.add(lease.generation)
        return None if lease is None else Lent(lease.pages, state=lease.state)

    def step(self, *, computes: bool) -> None:
        if self.is_frozen:
            return
        self.time += 1
        if computes:
            self.paper.step()
        for lease in self.leases.scan():
            self.give_back(lease)

    def give_back(self, lease: Lease) -> None:
        if lease.generation in self._returned:
            return
        pages = () if self.fault == "pages are not held" else lease.pages
        state = -1 if self.fault == "states are not held" else lease.state
        self.paper.scheduler.take_back(pages, state, int(lease.request))

    def content(self, lease: Lease, place: int) -> Any:
        """Return a copy of a page in all layers, or the state."""
        if place >= len(lease.pages):
            return self.paper.gpu.checkpoints[lease.state]
        return [memory[lease.pages[place]].copy() for memory in self.paper.transfers.memories]


@dataclass
class Cell:
    """The buffer of one page or part."""

    content: Any = None


@dataclass
class Read:
    ticket: Ticket
    cells: dict[int, Cell]  # by place, those that were not read yet
    steps: int  # that it takes at least
    lease: Lease | None = None
    silent: int = 0  # steps without an answer
    share: int = 0  # the rank of D that reads


@dataclass
class RankReads:
    """One fetch by all ranks of D. Rank 0 alone has contents: that of all heads."""

    left: list[Read]
    cells: list[Cell]
    ok: dict[int, bool] = field(default_factory=dict)  # by rank, of reads that have ended


@dataclass
class PaperClient:
    """Part of the PageClients of all ranks of D. `p` is the present P, which may change."""

    p: PrefillEngine
    rng: Random
    fault: str
    beats_every: int
    shares: int = 1  # ranks of D
    is_broken: bool = False  # there is no connection
    counts: Counter[str] = field(default_factory=Counter)
    reads: list[tuple[int, float]] = field(default_factory=list)
    kept: set[tuple[str, int]] = field(default_factory=set)
    running: dict[int, RankReads] = field(default_factory=dict)
    ends: list[tuple[Ticket, str, int]] = field(default_factory=list)  # messages to P, by share
    results: list[tuple[int, bool]] = field(default_factory=list)
    latest: int = 0
    time: int = 0

    def reads_from(self, engine: str) -> bool:
        is_same = self.p.engine == engine or self.fault == "engines are not compared"
        return is_same and not self.is_broken

    def keep(self, ticket: Ticket) -> None:
        self.kept.add((ticket.engine, ticket.generation))

    def decline(self, ticket: Ticket) -> None:
        for share in range(self.shares):
            self._end(ticket, "not wanted", share)

    def _end(self, ticket: Ticket, end: str, share: int) -> None:
        self.kept.discard((ticket.engine, ticket.generation))
        self.ends.append((ticket, end, share))

    def fetch(
        self, ticket: Ticket, buffers: Sequence[Cell], places: Sequence[int], **_: object
    ) -> int:
        self.latest += 1
        assert list(places) == sorted(places)
        reads = []
        for share in range(self.shares):
            own = [Cell() for _ in buffers] if share else buffers
            cells = dict(zip(places, own, strict=True))
            reads.append(Read(ticket, cells, self.rng.randint(0, 8), share=share))
        self.running[self.latest] = RankReads(reads, list(buffers))
        return self.latest

    def poll(self) -> list[tuple[int, bool]]:
        results, self.results = self.results, []
        self.counts.update("fetched" if ok else "failed" for _, ok in results)
        return results

    def close(self) -> None:
        """Do nothing."""

    def step(self) -> None:
        self.time += 1
        for number, reads in list(self.running.items()):
            self._read(reads)
            if not reads.left:
                del self.running[number]
                is_joined = self.fault != "the ends of ranks are not joined"
                self.results.append((number, all(reads.ok.values()) if is_joined else reads.ok[0]))
        if self.is_broken or self.p.is_frozen:
            return
        for ticket, end, share in self.ends:
            if ticket.engine == self.p.engine:
                lease = self.p.leases.finish(ticket.generation, end, share, self.shares)  # type: ignore[arg-type]
                if lease is not None:
                    self.p.give_back(lease)
        self.ends.clear()
        if self.time % self.beats_every == 0:
            reading = [read.ticket for reads in self.running.values() for read in reads.left]
            wanted = {*self.kept, *((ticket.engine, ticket.generation) for ticket in reading)}
            self.p.leases.extend(n for engine, n in wanted if engine == self.p.engine)

    def _read(self, reads: RankReads) -> None:
        """Let each rank of D read some pages. A rank other than 0 may lose its connection."""
        for read in list(reads.left):
            ok = self._progress(read)
            if read.share and self.rng.random() < LOST_SHARE:
                ok = False
            if ok is None:
                continue
            reads.left.remove(read)
            reads.ok[read.share] = ok
            self._end(read.ticket, "done" if ok else "not wanted", read.share)
        if reads.left or all(reads.ok.values()):
            return
        self.counts["shares differ"] += any(reads.ok.values())
        for cell in reads.cells:  # some heads have not arrived
            if isinstance(cell.content, list):
                cell.content = [[BUSY] * PAGE for _ in cell.content]
            elif cell.content is not None:
                cell.content = LOST

    def _progress(self, read: Read) -> bool | None:
        """Read some pages. Return the result once there is one."""
        if not self.reads_from(read.ticket.engine):
            return False
        if self.p.is_frozen:
            read.silent += 1
            return False if read.silent > SILENCE else None
        generation = read.ticket.generation
        lease = self.p.leases.lease_of(generation)
        if lease is None and (self.fault != "the lease is not checked" or read.lease is None):
            return False
        read.lease = lease or read.lease
        assert read.lease is not None
        count = len(read.lease.pages) + PARTS * (read.lease.state >= 0)
        if max(read.cells) >= count:
            return False
        for place in list(read.cells):
            if min(place + 1, len(read.lease.pages)) > read.lease.num_ready:
                self.counts["awaited"] += 1
                if self.fault != "pages are read before they are computed":
                    continue
            if not read.steps or self.rng.randint(0, 1):
                read.cells.pop(place).content = self.p.content(read.lease, place)
        read.steps -= read.steps > 0
        return None if read.cells else True


@dataclass
class Fetching:
    """A load whose pages are being read."""

    copies: Copies
    transfer: Transfer
    cells: dict[int, Cell]  # by slot
    left: set[int]
    from_p: set[int]  # slots; the others are read from the disk
    ok: bool = True


class ArrivingTransfers(PaperTransfers):
    """Transfers of D. Loads from P are read by the client first. There may be a disk as well."""

    has_peers = True

    def __init__(self, d: DecodeEngine, remote: RemotePages) -> None:
        super().__init__([d.gpu, d.gpu.layers], d.tiers)
        self.d = d
        self.remote = remote
        self.by_number: dict[int, Fetching] = {}
        self.by_ticket: dict[int, Fetching] = {}
        self.counts: Counter[str] = Counter()

    @property
    def writable(self) -> PaperTransfers | None:
        return self if self.d.has_disk else None

    def has_remote(self, keys: Iterable[bytes]) -> bool:
        return self.remote.has_remote(keys)

    def holds(self, key: bytes) -> bool:
        """Part of the disk's interface, too: a page of an unread ticket is written later."""
        return self.remote.holds(key) or super().holds(key)

    def keys_of_parts(self, key: bytes) -> list[bytes]:
        return self.remote.keys_of_parts(key)

    def state_keys(self, key: bytes) -> list[bytes]:
        parts = self.keys_of_parts(key)
        on_disk = bool(parts) and all(part in self.disk for part in parts)
        return self.remote.state_keys(key) or (parts if on_disk else [])

    def move(self, moves: Moves) -> None:
        local = [c for c in moves.loads if not (c.fetches or c.state_fetches)]
        super().move(replace(moves, loads=local))
        for copies in moves.loads:
            if copies.fetches or copies.state_fetches:
                self._fetch(copies)

    def _fetch(self, copies: Copies) -> None:
        wanted = (*copies.fetches, *copies.state_fetches)
        cells = {slot: Cell() for _, slot in wanted}
        content = [self.slots.get(slot, []) for slot, _ in copies.pairs]
        self._start("load", copies, content, tuple(copies.fetches))
        transfer = self.running[-1]
        transfer.polls = 10**9
        for _, page in copies.pairs:
            self._write(page, [[BUSY] * PAGE for _ in self.memories])
        if copies.state_fetches:
            self.saved[copies.state_to] = BUSY
        remote = [one for one in wanted if self.remote.holds(one[0]) or one[0] not in self.disk]
        for key, slot in set(wanted).difference(remote):
            on_disk = self.disk[key]
            cells[slot].content = on_disk[0][0] if key in dict(copies.state_fetches) else on_disk
            self.counts["from disk"] += 1
        numbers = self.remote.read_all([(key, cells[slot]) for key, slot in remote])  # type: ignore[misc]
        one = Fetching(copies, transfer, cells, set(numbers), from_p={slot for _, slot in remote})
        self.by_ticket[copies.ticket] = one
        self.by_number.update(dict.fromkeys(numbers, one))
        if not numbers:
            self._fill(one)

    def moved(self) -> list[Moved]:
        for number, ok in self.remote.poll():
            one = self.by_number.pop(number)
            one.left.remove(number)
            one.ok = one.ok and ok
            if not one.left:
                self._fill(one)
        return super().moved()

    def _fill(self, one: Fetching) -> None:
        one.transfer.polls = self.rng.randint(0, self.most_polls)
        for at, (slot, _) in enumerate(one.copies.pairs):
            if slot in one.cells:
                blank = [[BUSY] * PAGE for _ in self.memories]
                one.transfer.content[at] = one.cells[slot].content if one.ok else blank
        states = {one.cells[slot].content for _, slot in one.copies.state_fetches}
        one.transfer.state = states.pop() if len(states) == 1 else LOST

    def _end(self, one: Transfer) -> Moved:
        fetching = self.by_ticket.pop(one.ticket, None) if one.kind == "load" else None
        self.fail_every = 1 if fetching is not None and not fetching.ok else 0
        moved = super()._end(one)
        if fetching is not None:
            self.counts["arrived" if fetching.ok else "lost"] += bool(fetching.from_p)
            self.counts["states"] += fetching.ok and bool(one.parts)
            if fetching.ok and self.rng.randint(0, 1):
                return self._as_if_direct(fetching.from_p, one, moved)
        return moved

    def _as_if_direct(self, from_p: set[int], one: Transfer, moved: Moved) -> Moved:
        """Return the end of a load whose pages of P went to the device and not to host slots."""
        fetched = frozenset(slot for _, slot in one.fetches if slot in from_p)
        for slot in fetched:
            self.slots[slot] = [[NAN] * PAGE for _ in self.memories]
        is_kept = self.d.client.fault == "slots without content are used"
        return replaced(moved, blank=frozenset() if is_kept else fetched)


class DecodeEngine(PaperEngine):
    """D. Its tickets are settled by what it publishes."""

    def __init__(self, client: PaperClient, kind: str, *, has_disk: bool) -> None:
        self.has_disk = has_disk
        sizes: dict[str, Any] = dict(num_slots=4, budget=24, num_pages=24)
        super().__init__(
            host=20, most_polls=4, transfers=client.rng.randint(0, 99), **sizes, **KINDS[kind]
        )
        parts = PARTS if kind == "hybrid" else 0
        limits = ReaderLimits(layout=LAYOUT, identity=IDENTITY, page_bytes=1, state_parts=parts)
        self.remote = RemotePages([], SECRET, limits, lambda: None)
        self.remote._client = self.client = client  # type: ignore[assignment]
        self.tickets = Tickets(self.remote, PAGE)
        self.transfers = ArrivingTransfers(self, self.remote)
        self.move, self.moved = self.transfers.move, self.transfers.moved
        self.memory.tier.below = self.transfers  # type: ignore[attr-defined]

    def collect(self, out: StepOutput) -> None:
        self.tickets.published(out)
        super().collect(out)

    def check_empty(self) -> None:
        """Assert that nothing is held for an ended request."""
        assert self.memory.pool.num_free == self.memory.pool.num_pages
        assert not self.remote._offers and not self.remote._where and not self.remote._fetches
        assert not self.client.running and not self.client.kept
