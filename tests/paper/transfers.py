"""Simulated transfers between the pages of the simulated GPU and host slots.

A transfer ends some polls after its start, in random order, and a load may fail. Meanwhile the
targets of a load contain BUSY, and those of a failed one NaN. A store reads its pages at its start
and once more at its end, so that they must contain the text already, and still.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from nanovllm.kv.costs import TransferCosts
from nanovllm.kv.tiers import HostTier
from nanovllm.plan import Availability, Copies, Moved, Moves, StepPlan
from tests.paper.draft_layers import NAN

BUSY = -3


@dataclass
class PaperTiers:
    """Sizes and faults of the tiers below the simulated device. A token costs one second."""

    host: int = 0  # pages
    disk: bool = False
    host_cost: float = 0.0  # seconds per page
    most_storing: int = 8
    ahead: int | None = None  # pages that are ready to be evicted; None: all are stored at once
    most_polls: int = 0  # until a transfer ends
    fail_every: int = 0  # loads; 0: none fails
    transfers: int = 0  # seed

    def tier(self, num_pages: int) -> HostTier:
        costs = TransferCosts(page_s=self.host_cost, token_s=1.0, start_s=0.0, disk_page_s=0.0)
        most = self.most_storing
        return HostTier(
            self.host, costs=costs, ahead=self.ahead, most_queued=num_pages, most_storing=most
        )


@dataclass
class Transfer:
    ticket: int
    kind: str
    pairs: list[tuple[int, int]]
    content: list[list[int]]  # of the sources, at the start
    polls: int  # until its end
    fetches: tuple[tuple[bytes, int], ...] = ()  # of a load: keys on disk, and slots
    parts: tuple[tuple[bytes, int], ...] = ()  # of a state: keys, and slots
    checkpoint: int = -1
    state: int = 0  # its value, or the one that it gets


class PaperTransfers:
    """Part of an engine.executor.Executor. `layers` have the pages as `memory`, or are None."""

    has_peers = False
    can_write = True
    availability = Availability()

    def __init__(self, layers: list[Any], tiers: PaperTiers) -> None:
        self.memories = [each.memory for each in layers if each is not None]
        self.saved: list[int] = layers[0].checkpoints  # recurrent states
        self.recurrent: bool = layers[0].recurrent
        self.rng = Random(tiers.transfers)
        self.most_polls = tiers.most_polls
        self.fail_every = tiers.fail_every
        self.slots: dict[int, list[list[int]]] = {}  # content of each layer
        self.disk: dict[bytes, list[list[int]]] = {}
        self.running: list[Transfer] = []
        self.unwanted: set[int] = set()  # tickets of writes whose pages were removed meanwhile
        self.reported: set[int] = set()  # and not yet in Moves.ended
        self.num_loads = 0  # that have ended
        self.polls: int | None = None  # of all later transfers, if it is not random

    def move(self, moves: Moves) -> None:
        assert set(moves.ended) <= self.reported, "ended without a report"
        self.reported -= set(moves.ended)
        for copies in moves.stores:
            sources = [page for page, _ in copies.pairs]
            self._start("store", copies, [self._cells(page) for page in sources])
            self.running[-1].state = self.saved[copies.state_to] if copies.state_fetches else 0
        for key in moves.removes:
            self.disk.pop(key, None)
            writes = [one for one in self.running if one.kind == "write"]
            self.unwanted |= {one.ticket for one in writes if one.fetches[0][0] == key}
        for write in moves.writes:
            copies = Copies(write.ticket, [(write.slot, -write.slot)])
            self._start("write", copies, [self.slots[write.slot]], ((write.key, write.slot),))
        for copies in moves.loads:
            fetched = {slot: self.disk[key] for key, slot in copies.fetches}
            content = [fetched.get(slot) or self.slots[slot] for slot, _ in copies.pairs]
            self._start("load", copies, content, tuple(copies.fetches))
            if copies.state_fetches:
                read = {self.disk[key][0][0] for key, _ in copies.state_fetches}
                (self.running[-1].state,) = read
                self.saved[copies.state_to] = BUSY
            for _, page in copies.pairs:
                self._write(page, [[BUSY] * len(cells) for cells in self._cells(page)])

    @property
    def writable(self) -> PaperTransfers | None:
        return self

    def has_remote(self, keys: Iterable[bytes]) -> bool:
        return False

    def holds(self, key: bytes) -> bool:
        """Part of the interface of a tier below host memory."""
        return key in self.disk

    def is_listed(self, key: bytes) -> bool:
        return key in self.disk

    def note_rank(self, rank: int, availability: Availability) -> None:
        raise AssertionError("there is one rank")

    def page_counts(self) -> dict[str, float]:
        return {}

    def keys_of_parts(self, key: bytes) -> list[bytes]:
        """Return the keys of two parts of the state after a page, if there are states."""
        return [b"part %d " % part + key for part in range(2)] if self.recurrent else []

    def state_keys(self, key: bytes) -> list[bytes]:
        parts = self.keys_of_parts(key)
        return parts if all(map(self.holds, parts)) else []

    def _start(
        self,
        kind: str,
        copies: Copies,
        content: list[list[list[int]]],
        fetches: tuple[tuple[bytes, int], ...] = (),
    ) -> None:
        targets = {target for _, target in copies.pairs}
        for other in self.running:
            own = other.pairs if other.kind == kind else [pair[::-1] for pair in other.pairs]
            if "write" not in (kind, other.kind):
                assert not targets & {target for _, target in own}, "a target is in use"
            busy = {slot for _, slot in other.fetches}
            assert not busy & {slot for _, slot in fetches}, "a slot is fetched to twice"
        polls = self.rng.randint(0, self.most_polls) if self.polls is None else self.polls
        made = Transfer(copies.ticket, kind, copies.pairs, content, polls, fetches)
        made.parts, made.checkpoint = tuple(copies.state_fetches), copies.state_to
        self.running.append(made)

    def _cells(self, page: int) -> list[list[int]]:
        return [memory[page].copy() for memory in self.memories]

    def _write(self, page: int, content: list[list[int]]) -> None:
        for memory, cells in zip(self.memories, content, strict=True):
            memory[page] = cells.copy()

    def moved(self) -> list[Moved]:
        for one in self.running:
            one.polls -= 1
        ended = [one for one in self.running if one.polls < 0]
        self.running = [one for one in self.running if one.polls >= 0]
        self.rng.shuffle(ended)
        self.reported |= {one.ticket for one in ended}
        return [self._end(one) for one in ended]

    def _end(self, one: Transfer) -> Moved:
        if one.kind == "store":
            for (page, slot), content in zip(one.pairs, one.content, strict=True):
                assert self.memories[0][page] == content[0], "written to during a store"
                self.slots[slot] = content
            for part, (_, slot) in enumerate(one.parts):
                assert self.saved[one.checkpoint] == one.state, "written to during a store"
                self.slots[slot] = [[one.state, part]]
            return Moved(one.ticket)
        if one.kind == "write":
            ((key, slot),) = one.fetches
            assert self.slots[slot] == one.content[0], "a slot was replaced during a write"
            if one.ticket not in self.unwanted:
                self.disk[key] = one.content[0]
            return Moved(one.ticket)
        self.num_loads += 1
        ok = not self.fail_every or self.num_loads % self.fail_every > 0
        if one.parts:
            assert self.saved[one.checkpoint] == BUSY, "written to during a load"
            self.saved[one.checkpoint] = one.state if ok else NAN
        for _, slot in one.fetches:
            self.slots.pop(slot, None)
        for (slot, page), content in zip(one.pairs, one.content, strict=True):
            if (slot in {to for _, to in one.fetches}) and ok:
                self.slots[slot] = content
            assert slot not in self.slots or self.slots[slot] == content, (
                "a slot was replaced during a load"
            )
            assert set(self.memories[0][page]) == {BUSY}, "written to during a load"
            failed = [[NAN] * len(cells) for cells in content]
            self._write(page, content if ok else failed)
        return Moved(one.ticket, ok=ok)

    def check(self, plan: StepPlan) -> None:
        """Assert that a plan uses no page that a transfer may still write."""
        busy = {page for one in self.running if one.kind == "load" for _, page in one.pairs}
        given = {page for got in (*plan.admits, *plan.grants) for page in got.pages}
        used = given.union(plan.clean, *plan.copies)
        assert not busy & used, "planned during a load"
