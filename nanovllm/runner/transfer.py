"""Pages in host memory, and the copies between them, the device and the disk.

Decision: a page in host memory is contiguous over all layers, and one copy on the bus moves it. On
the device its parts lie apart, one per layer. They are gathered into one staging page per
direction, and scattered from another. The bus then moves megabytes at a time, at its full rate.

Decision: each direction has a stream and a thread of its own (copy_stream.py), so neither delays
the steps. A transfer begins after all work that was enqueued on the steps' stream before it. Work
of later plans is ordered after it by Moves.ended. On a CPU the same operations are done at once.

Decision: the views of staging pages are made once. Each call of torch gives up the interpreter's
lock and takes it again, and the thread of the steps may then have to wait for it. A page of keys
and values takes six calls. Pieces of 4 MiB were tried, and streams had the same gaps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from msgspec.structs import replace
from torch import Tensor

from nanovllm.config import ConfigError
from nanovllm.kv.disk.store import DiskStore
from nanovllm.kv.keys import Key
from nanovllm.kv.split import host_aligned
from nanovllm.plan import Copies, Moved, Moves, Write
from nanovllm.runner.caches import Caches, pin
from nanovllm.runner.copy_stream import CopyStream, StartedCopies
from nanovllm.runner.peers_and_disk import PeersAndDisk
from nanovllm.runner.results import Event, HostEvent
from nanovllm.transfer.device_pages import Arrivals
from nanovllm.transfer.remote_pages import RemotePages

BelowStore: TypeAlias = DiskStore | RemotePages | PeersAndDisk
PIECE_BYTES = 64 << 30  # of one allocation: CUDA fails to pin 512 GiB at once


def bytes_of_page(tensors: Sequence[Tensor], num_heads: Sequence[int]) -> int:
    """Return the bytes of a page in host memory, with these heads of each of the caches' tensors.

    The tensors are [layers, pages, tokens, heads, size].
    """
    num_bytes = 0
    for tensor, heads in zip(tensors, num_heads, strict=True):
        layers, _, tokens, _, size = tensor.shape
        num_bytes += layers * tokens * heads * size * tensor.itemsize
    return host_aligned(num_bytes)


class Staging(NamedTuple):
    """Memory on the device for a page of host memory."""

    row: Tensor
    views: list[Tensor]  # of its parts, see HostPages.views


class HostPages:
    """Pinned memory for `num_slots` pages of the caches. A page is a row of bytes.

    A checkpoint of recurrent states has `state_parts` parts of the size of a page.
    """

    def __init__(
        self, caches: Caches, num_slots: int, checkpoints_NX: Tensor | None = None
    ) -> None:
        # Tensors of the caches that have bytes, with the places of their parts in a page.
        self._parts: list[tuple[Tensor, slice]] = []
        end = 0
        for pages_LPSGA in caches.tensors:
            if num_bytes := pages_LPSGA[:, 0].nbytes:
                self._parts.append((pages_LPSGA, slice(end, end + num_bytes)))
            end += num_bytes
        self.page_bytes = bytes_of_page(caches.tensors, [one.shape[3] for one in caches.tensors])
        self.device = caches.tensors[0].device
        self._checkpoints_NX = checkpoints_NX
        state_bytes = 0
        if checkpoints_NX is not None:
            state_bytes = checkpoints_NX.shape[1] * checkpoints_NX.itemsize
        self.state_parts = -(-state_bytes // self.page_bytes)
        self._per_piece = max(1, PIECE_BYTES // self.page_bytes)
        self._pieces: list[Tensor] = []
        gib = num_slots * self.page_bytes / 2**30
        whole = f" (of {num_slots:,} pages x {self.page_bytes:,} bytes = {gib:.1f} GiB)"
        for first in range(0, num_slots, self._per_piece):
            count = min(self._per_piece, num_slots - first)
            try:
                piece = torch.zeros(count, self.page_bytes, dtype=torch.uint8)
            except RuntimeError as error:
                size = f"{count * self.page_bytes / 2**30:.1f} GiB{whole}"
                raise ConfigError(f"cache.host_gib: cannot allocate {size}: {error}") from None
            if self.device.type == "cuda":
                pin(piece, self, "cache.host_gib", whole)
            self._pieces.append(piece)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the caches that have bytes."""
        return [tensor for tensor, _ in self._parts]

    def row(self, slot: int) -> Tensor:
        """Return a slot's bytes, in host memory."""
        return self._pieces[slot // self._per_piece][slot % self._per_piece]

    def payload(self, slot: int) -> memoryview:
        """Return the bytes of a slot's page."""
        return memoryview(self.row(slot).numpy().data)

    def parts(self, row: Tensor, page: int) -> list[tuple[Tensor, Tensor]]:
        """Return the parts of a row, each with the same part of a page on the device."""
        return [*zip(self.views(row), self.on_device(page), strict=True)]

    def views(self, row: Tensor) -> list[Tensor]:
        """Return the parts of a row, in the types and shapes of the caches."""
        return [row[at].view(pages.dtype).view(pages[:, 0].shape) for pages, at in self._parts]

    def on_device(self, page: int) -> list[Tensor]:
        """Return the parts of a page on the device."""
        return [pages_LPSGA.select(1, page) for pages_LPSGA, _ in self._parts]

    def staging(self) -> Staging:
        """Allocate memory for a page on the device."""
        row = torch.empty(self.page_bytes, dtype=torch.uint8, device=self.device)
        return Staging(row, self.views(row))

    def state_part(self, checkpoint: int, part: int) -> Tensor:
        """Return the bytes of one part of a checkpoint. The last part may be shorter."""
        return self.state(checkpoint)[part * self.page_bytes : (part + 1) * self.page_bytes]

    def state(self, checkpoint: int) -> Tensor:
        """Return the bytes of a checkpoint, on the device or in host memory."""
        assert self._checkpoints_NX is not None
        return self._checkpoints_NX[checkpoint].view(torch.uint8)


@dataclass(slots=True)
class PendingLoad:
    """A load whose pages are being read from the tier below."""

    copies: Copies
    begun_s: float
    left: int  # reads that have not ended
    arrivals: Arrivals
    issued: Event  # after all earlier work on the load's pages
    ok: bool = True
    keys: dict[int, list[Key]] = field(default_factory=dict)  # by ticket, of each read
    lost: list[Key] = field(default_factory=list)  # keys of pages that are not below any more


class Mover:
    """Executor of transfers. Methods of the same names are in engine.executor.Executor.

    `open_disk` returns the tier below host memory. Its argument is called from any thread when a
    read or a write has ended.
    """

    def __init__(
        self,
        host: HostPages,
        open_disk: Callable[[Callable[[], None]], BelowStore] | None = None,
    ) -> None:
        self.host = host
        self._wake: Callable[[], object] = lambda: None
        self.disk = None if open_disk is None else open_disk(self._call_wake)
        self._reads: dict[int, PendingLoad] = {}  # by ticket of the disk
        self._writes: dict[int, int] = {}  # tickets, by that of the disk
        self._moved: list[Moved] = []  # transfers that ended without a copy
        self._fetch_s: dict[int, float] = {}  # of loads, by ticket
        self._blank: dict[int, frozenset[int]] = {}  # slots without content, likewise
        self._on_gpu = host.device.type == "cuda"
        self._stores, self._loads = (
            CopyStream(partial(copy, host.staging() if self._on_gpu else None), host.device)
            for copy in (self._store, self._load)
        )
        self._started: dict[int, StartedCopies] = {}  # by ticket, until Moves.ended

    @torch.inference_mode()
    def move(self, moves: Moves) -> None:
        """Enqueue the transfers. On a CPU, do them."""
        for ticket in moves.ended:
            if (started := self._started.pop(ticket, None)) is not None:
                self._order_after(started)
        issued = self._recorded()
        for copies in moves.stores:
            self._start(self._stores, copies, issued)
        for copies in moves.loads:
            if copies.fetches or copies.state_fetches:
                self._fetch(copies, issued)
            else:
                self._start(self._loads, copies, issued)
        for key in moves.removes:
            assert isinstance(self.disk, DiskStore | PeersAndDisk)
            self.disk.remove(key)
        for write in moves.writes:
            self._write(write)

    def _order_after(self, started: StartedCopies) -> None:
        """Order all later work of this rank after the end of a transfer.

        On the first rank it has ended. On others it is about to.
        """
        if self._on_gpu:
            steps = torch.cuda.current_stream()
            started.follow(steps, self._stores.stream, self._loads.stream)

    def _start(self, direction: CopyStream, copies: Copies, issued: Event) -> None:
        num_bytes = (len(copies.pairs) + len(copies.state_fetches)) * self.host.page_bytes
        self._started[copies.ticket] = direction.start(copies, num_bytes, issued)

    def _store(self, staging: Staging | None, copies: Copies, nth: int) -> None:
        """Copy a page, or a part of a state, to host memory. A part's slot ends with zeros.

        `staging` is None on a CPU, which writes to host memory at once.
        """
        nth_part = nth - len(copies.pairs)
        slot = copies.state_fetches[nth_part][1] if nth_part >= 0 else copies.pairs[nth][1]
        row = self.host.row(slot)
        staged, views = staging or Staging(row, self.host.views(row))
        if nth_part >= 0:
            source = self.host.state_part(copies.state_to, nth_part)
            staged[: len(source)].copy_(source, non_blocking=True)
            staged[len(source) :].zero_()
        else:
            for own, part in zip(views, self.host.on_device(copies.pairs[nth][0]), strict=True):
                own.copy_(part)
        if staged is not row:
            row.copy_(staged, non_blocking=True)

    def _load(self, staging: Staging | None, copies: Copies, nth: int) -> None:
        """Copy a page, or a part of a state, from host memory."""
        nth_part = nth - len(copies.pairs)
        slot = copies.state_fetches[nth_part][1] if nth_part >= 0 else copies.pairs[nth][0]
        row = self.host.row(slot)
        staged, views = staging or Staging(row, self.host.views(row))
        if staged is not row:
            staged.copy_(row, non_blocking=True)
        if nth_part >= 0:  # the checkpoint may be in host memory, and also goes by the stream
            target = self.host.state_part(copies.state_to, nth_part)
            target.copy_(staged[: len(target)], non_blocking=True)
            return
        for own, part in zip(views, self.host.on_device(copies.pairs[nth][1]), strict=True):
            part.copy_(own)

    def _call_wake(self) -> None:
        self._wake()

    def _fetch(self, copies: Copies, issued: Event) -> None:
        """Begin to read a load's pages from the tier below."""
        assert self.disk is not None
        page_of = dict(copies.pairs)
        arrivals = Arrivals({key: page_of[slot] for key, slot in copies.fetches}, issued)
        fetch = PendingLoad(
            copies=copies, begun_s=time.perf_counter(), left=0, arrivals=arrivals, issued=issued
        )
        wanted = (*copies.fetches, *copies.state_fetches)
        pages = [(key, self.host.payload(slot)) for key, slot in wanted]
        fetch.keys = self.disk.read_all(pages, arrivals)
        fetch.left = len(fetch.keys)
        self._reads |= dict.fromkeys(fetch.keys, fetch)

    def _write(self, write: Write) -> None:
        assert self.disk is not None
        ticket = self.disk.write(write.key, self.host.payload(write.slot))
        if ticket is None:  # its queue is full, or it is not in use
            self._moved.append(Moved(write.ticket, ok=False))
            self._wake()
        else:
            self._writes[ticket] = write.ticket

    def _poll_disk(self, disk: BelowStore) -> None:
        for ticket, ok in disk.poll():
            if (write := self._writes.pop(ticket, 0)) > 0:
                self._moved.append(Moved(write, ok=ok))
                continue
            fetch = self._reads.pop(ticket)
            fetch.left -= 1
            fetch.ok = fetch.ok and ok
            if not ok and disk.availability.reads:  # otherwise the pages may still be there
                fetch.lost += fetch.keys[ticket]
            if fetch.left:
                continue
            if fetch.ok:
                self._fetched(fetch)
            else:
                lost = tuple(fetch.lost)
                self._moved.append(Moved(fetch.copies.ticket, ok=False, lost=lost))

    def _fetched(self, fetch: PendingLoad) -> None:
        """Copy a load's pages that are in host memory now. The others have been filled directly."""
        own, filled = fetch.copies.ticket, fetch.arrivals.filled
        blank = frozenset(slot for slot, page in fetch.copies.pairs if page in filled)
        took_s = time.perf_counter() - fetch.begun_s
        fetch_s = 0.0 if fetch.arrivals.were_awaited else took_s
        pairs = [pair for pair in fetch.copies.pairs if pair[0] not in blank]
        if pairs or fetch.copies.state_fetches:
            self._fetch_s[own], self._blank[own] = fetch_s, blank
            self._start(self._loads, replace(fetch.copies, pairs=pairs), fetch.issued)
        else:
            self._moved.append(Moved(own, fetch_s=fetch_s, blank=blank))

    def _recorded(self) -> Event:
        event: Event = torch.cuda.Event() if self._on_gpu else HostEvent()
        event.record()
        return event

    @torch.inference_mode()
    def moved(self) -> list[Moved]:
        """Return the transfers that have ended since the last call, in order of each direction."""
        if self.disk is not None:
            self._poll_disk(self.disk)
        ended, self._moved = self._moved, []
        for started in (*self._stores.ended(), *self._loads.ended()):
            ticket = started.copies.ticket
            moved = Moved(
                ticket,
                num_bytes=started.num_bytes,
                seconds=1e-3 * started.begin.elapsed_time(started.end),
                fetch_s=self._fetch_s.pop(ticket, 0.0),
                blank=self._blank.pop(ticket, frozenset()),
            )
            ended.append(moved)
        return ended

    def call_when_moved(self, wake: Callable[[], object]) -> None:
        """Call `wake` from a thread after the end of each transfer."""
        self._wake = self._stores.call_when_ended = self._loads.call_when_ended = wake


class NoTiers:
    """Substitute for a device without a tier below it."""

    disk = None

    def move(self, moves: Moves) -> None:
        """Raise ValueError."""
        raise ValueError("the plan has transfers, but cache.host_gib is 0")

    def moved(self) -> list[Moved]:
        """Return an empty list."""
        return []

    def call_when_moved(self, wake: Callable[[], object]) -> None:
        """Do nothing: there are no transfers."""
