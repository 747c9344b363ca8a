"""Disk tier of the KV cache for one rank: pages in files, read and written in the background.

Theory of operation:

1. `write` queues a page. An I/O thread copies the caller's buffer, computes the checksum, makes
   room below the limit, and writes a file. `holds` is True once the file is complete.
2. `read` queues a load. An I/O thread reads the file into memory of its own and checks header and
   checksum. Only then are the bytes copied to the caller. A page with any fault is a miss.
3. `poll` returns finished tickets. `wake` is called when there are some.
4. A thread keeps the index up to date with the folder, since servers and ranks may share it. It
   also tries the disk again after a fault. Another thread ends transfers on a disk that hangs.

With several ranks, each has a store for its share of a page. Rank 0 alone decides by its index. The
others read and write the same pages, also before their own scan has found a file. If the store of
any rank stops its reads or writes, rank 0 starts no more of these until it is in use again.

No method raises an exception for a fault of the disk, and none but `open` and `close` waits for it.

Decision: I/O threads have buffers of their own. The extra copy runs at 10 GB/s per thread. In
return, a buffer of the caller never has unchecked bytes, never waits for the disk, and needs no
alignment for direct I/O.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from nanovllm.kv.disk import format as page_format
from nanovllm.kv.disk.folder import NUM_SHARDS, PageFile, PageFolder, aligned_bytes
from nanovllm.kv.disk.format import BLOCK, PageFault, PageOwner
from nanovllm.kv.disk.health import Health, detail_of, kind_of
from nanovllm.kv.disk.index import PageIndex
from nanovllm.kv.disk.limits import DiskLimits
from nanovllm.kv.disk.transfers import Direction, Transfer, Transfers
from nanovllm.plan import Availability, state_part_keys

log = logging.getLogger("disk")
Buffer: TypeAlias = "bytes | bytearray | memoryview"
MAX_EVICTED = 16  # files that one write removes to make room; the scan removes more


class DiskCounters(Struct):
    """Counts since the start, for metrics. Seconds are those of I/O threads, added up."""

    hits: int = 0  # reads with the page's bytes
    misses: int = 0  # reads without
    read_bytes: int = 0
    read_seconds: float = 0.0
    written: int = 0  # pages
    written_bytes: int = 0
    write_seconds: float = 0.0
    dropped_writes: int = 0  # the queue was full, or the disk not in use
    failed_writes: int = 0
    evicted: int = 0  # files removed by this store to stay below the limit


class DiskStore:
    """Pages of one owner in a folder. Methods may be called from any thread.

    `write` borrows its buffer until its ticket is polled. The result True then means that the bytes
    were copied, not that they are on the disk.
    """

    has_peers = False  # kv.below.Below

    def __init__(
        self, path: Path, owner: PageOwner, limits: DiskLimits, wake: Callable[[], None]
    ) -> None:
        """Open the folder and start the threads. Files are found in the background, see `scanned`.

        Raise ConfigError if the folder cannot be used or the limit is below one page.
        """
        limits.check()
        self.owner = owner
        self.limits = limits
        self.scanned = threading.Event()  # set after the first scan of the folder
        self._counters = DiskCounters()
        self._counting = threading.Lock()
        self._index = PageIndex(limits.cap_bytes)
        self._folder = PageFolder(path)
        self._transfers = Transfers(limits.max_writes, wake)
        self._where = f"cache.disk {path}"
        own = f"{self._where}, rank {owner.rank}" if owner.rank else self._where
        self._health = Health(own, limits.retry_s, limits.quiet_s, self._transfers.wake)
        self._others: dict[int, Availability] = {}  # by rank
        self._on_others = Availability()  # on all of them
        self._unwanted: dict[str, bytes] = {}  # names of files to remove, with their keys
        self._closing = threading.Event()
        self._changed = threading.Event()  # a file was written: scan a shard
        self._next_shard = 0  # to scan
        self._is_open = False
        self._try(self._open_folder)
        self._try(self._probe)
        work = [("disk-keep", self._keep), ("disk-watch", self._watch)]
        work += [(f"disk-read-{i}", self._read_all) for i in range(limits.read_threads)]
        work += [(f"disk-write-{i}", self._write_all) for i in range(limits.write_threads)]
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True) for name, target in work
        ]
        for thread in self._threads:
            thread.start()

    @property
    def writable(self) -> DiskStore:
        return self

    def has_remote(self, keys: Iterable[bytes]) -> bool:
        return False

    def holds(self, key: bytes) -> bool:
        """Return True if the page can be read on all ranks, as far as the index shows. No I/O."""
        return self._health.can_read and self._on_others.reads and self.is_listed(key)

    def is_listed(self, key: bytes) -> bool:
        """Return True if the page is in the index, even if the disk is not in use."""
        name = self.owner.name(key)
        return name in self._index and name not in self._unwanted

    @property
    def availability(self) -> Availability:
        """Whether this rank's disk is in use."""
        return self._health.availability

    @property
    def can_write(self) -> bool:
        """Return True if the disks of all ranks are written to."""
        return self._health.can_write and self._on_others.writes

    def note_rank(self, rank: int, availability: Availability) -> None:
        """Note whether another rank's disk is in use, on rank 0."""
        with self._counting:
            self._others[rank] = availability
            reads, writes = zip(*self._others.values(), strict=True)
            self._on_others = Availability(all(reads), all(writes))
        stopped = " and ".join(n for n, can in availability._asdict().items() if not can)
        state = f"rank {rank} stops its {stopped}" if stopped else f"rank {rank} is in use again"
        log.info("%s: %s, which all ranks follow", self._where, state)

    def _may_hold(self, key: bytes) -> bool:
        """Return True if a read may succeed. Ranks other than 0 also try files not yet found."""
        if self.owner.rank == 0:
            return self.holds(key)
        return self._health.can_read and self.owner.name(key) not in self._unwanted

    def remove(self, key: bytes) -> None:
        """Make a page a miss at once, and remove its file in the background.

        This includes a write of it that has not ended.
        """
        self._unwanted[self.owner.name(key)] = key
        self._changed.set()

    def page_counts(self) -> dict[str, float]:
        """Return the number of the largest files that the limit allows, and of those in use.

        Files of other servers, models and ranks in the folder count, since the limit does.
        """
        size = self.limits.file_bytes
        used = -(-self.num_bytes // size)
        return {"disk.pages": self.limits.cap_bytes // size, "disk.pages_used": used}

    def keys_of_parts(self, key: bytes) -> list[bytes]:
        """Return the keys of the parts of the state after a page. Each is stored like a page."""
        return state_part_keys(key, self.limits.state_parts)

    def state_keys(self, key: bytes) -> list[bytes]:
        """Return `keys_of_parts` if all of them are on the disk, otherwise an empty list."""
        if not self.limits.state_parts or not self.holds(state_part_keys(key, 1)[0]):
            return []
        parts = self.keys_of_parts(key)
        return parts if all(map(self.holds, parts)) else []

    def read_all(
        self, pages: Sequence[tuple[bytes, Buffer]], arrivals: object = None
    ) -> dict[int, list[bytes]]:
        """Queue a load of each page; see read(). Return the keys by ticket.

        `arrivals` is not used: no page is read to the device directly.
        """
        return {self.read(key, into): [key] for key, into in pages}

    def write(self, key: bytes, buffer: Buffer) -> int | None:
        """Queue a page to be written; return its ticket, or None if it was dropped.

        `buffer` is contiguous, of at most `payload_bytes`. It must not change until the ticket is
        polled or cancelled. A page that is stored or queued already is not written again.
        """
        view = memoryview(buffer).cast("B")
        name = self.owner.name(key)
        if name in self._unwanted:
            self._count(dropped_writes=1)
            return None
        if name in self._index or self._transfers.is_writing(key):
            self._index.use(name, self._index.next_stamp())
            return self._transfers.answer(True)
        ticket = None
        if self._health.can_write and len(view) <= self.limits.payload_bytes:
            ticket = self._transfers.submit("write", key, view)
        if ticket is None:
            self._count(dropped_writes=1)
        return ticket

    def read(self, key: bytes, into: Buffer) -> int:
        """Queue a load of a page with the size of `into`; return its ticket.

        `into` is contiguous and writable, and changes only if the result is True. It must stay
        valid until the ticket is polled or cancelled.
        """
        view = memoryview(into).cast("B")
        ticket = None
        if self._may_hold(key) and len(view) <= self.limits.payload_bytes:
            ticket = self._transfers.submit("read", key, view)
        if ticket is None:
            self._count(misses=1)
            return self._transfers.answer(False)
        return ticket

    def poll(self) -> list[tuple[int, bool]]:
        """Return (ticket, ok) of the transfers that have ended since the last call."""
        return self._transfers.poll()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `poll` has results. Return False after `timeout_s`."""
        return self._transfers.wait(timeout_s)

    def cancel(self, ticket: int) -> None:
        """Give a transfer's buffer back to the caller at once. Its ticket is not polled."""
        self._transfers.cancel(ticket)

    def counters(self) -> DiskCounters:
        """Return a copy of the counts."""
        with self._counting:
            return DiskCounters(
                *(getattr(self._counters, f) for f in DiskCounters.__struct_fields__)
            )

    def faults(self) -> dict[str, int]:
        """Return the number of faults by kind since the start."""
        return dict(self._health.counts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files in the folder, as far as the index shows."""
        return self._index.num_bytes

    @property
    def is_direct(self) -> bool:
        """True if reads and writes bypass the page cache."""
        return bool(self._folder.is_direct)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads. Queued transfers fail; buffers are the caller's own when it returns."""
        self._closing.set()
        self._changed.set()
        self._transfers.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._folder.close()

    def _try(self, action: Callable[[], object]) -> bool:
        """Step aside if an action has a fault. Return False in that case."""
        try:
            action()
        except (OSError, PageFault) as error:
            self._health.step_aside(kind_of(error), detail_of(error))
            return False
        return True

    def _open_folder(self) -> None:
        """Open the folder, of which no file is known yet."""
        self._folder.open()
        self._index.clear()
        self.scanned.clear()
        self._next_shard = 0
        self._is_open = True

    def _probe(self) -> None:
        """Write and read a page's bytes. Raise an error if that fails or is too slow."""
        if not self._is_open:
            return
        began = time.monotonic()
        self._folder.probe(self.limits.file_bytes)
        if time.monotonic() - began > self.limits.slow_s:
            raise PageFault("slow", f"a page took over {self.limits.slow_s:g} s")

    def _count(self, **amounts: float) -> None:
        with self._counting:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def _read_all(self) -> None:
        self._serve("read", self._read, "misses")

    def _write_all(self) -> None:
        self._serve("write", self._write, "failed_writes")

    def _serve(
        self, direction: Direction, run: Callable[[Transfer, memoryview], bool], failed: str
    ) -> None:
        """Run the transfers of one direction until the store is closed. Count those that fail.

        The buffer of a write has usually been given back when its copy ended.
        """
        staging = aligned_bytes(self.limits.file_bytes)
        while (transfer := self._transfers.take(direction)) is not None:
            is_done = False
            try:
                is_done = run(transfer, staging)
            except Exception:
                log.exception("a %s of the disk tier failed", direction)
            if not is_done:
                self._count(**{failed: 1})
            self._transfers.finish(transfer, is_done)
            self._transfers.leave(transfer)

    def _read(self, transfer: Transfer, staging: memoryview) -> bool:
        """Read and check a page, and copy it to the caller's buffer. Return False for a miss."""
        length = len(transfer.buffer)
        name = self.owner.name(transfer.key)
        file = staging[: page_format.file_bytes(length)]
        stamp = self._index.next_stamp()
        try:
            self._folder.read(name, file, stamp)
            page_format.check(file, self.owner, transfer.key, length)
        except FileNotFoundError:  # evicted by another server, or all of the folder is removed
            self._index.drop(name)
            self._check_folder()
            return False
        except (OSError, PageFault) as error:
            self._drop_faulty(name, error)
            return False
        self._index.use(name, stamp)
        if not self._transfers.begin_copy(transfer):
            return False
        _copy(transfer.buffer, file[BLOCK : BLOCK + length])
        seconds = time.monotonic() - transfer.started
        self._count(hits=1, read_bytes=length, read_seconds=seconds)
        return True

    def _drop_faulty(self, name: str, error: OSError | PageFault) -> None:
        self._index.drop(name)
        self._health.note(kind_of(error), detail_of(error))
        try:
            self._folder.remove(name)
        except OSError as failure:
            log.debug("cannot remove %s: %s", name, failure)

    def _write(self, transfer: Transfer, staging: memoryview) -> bool:
        """Copy the caller's buffer, then write it. Return False if that is not possible."""
        if not self._transfers.begin_copy(transfer):
            return False
        length = len(transfer.buffer)
        _copy(staging[BLOCK : BLOCK + length], transfer.buffer)
        self._transfers.finish(transfer, True)
        name = self.owner.name(transfer.key)
        file = staging[: page_format.file_bytes(length)]
        digest = page_format.checksum(file, length)
        page_format.seal(file, page_format.header_of(self.owner, transfer.key, length, digest))
        self._index.reserve(len(file))
        try:
            if not self._health.can_write:
                return False
            if not self._make_room(MAX_EVICTED):
                return False
            stamp = self._index.next_stamp()
            self._folder.write(name, file, stamp)
            self._index.put(name, PageFile(len(file), stamp))
        except OSError as error:
            if not self._check_folder():
                if isinstance(error, IsADirectoryError | NotADirectoryError):  # of one name
                    self._health.note("foreign", detail_of(error))
                else:
                    self._health.step_aside(kind_of(error), detail_of(error))
            return False
        finally:
            self._index.reserve(-len(file))
            self._changed.set()
        seconds = time.monotonic() - transfer.started
        self._count(written=1, written_bytes=length, write_seconds=seconds)
        return True

    def _make_room(self, most: int) -> bool:
        """Remove files until all fit, the ones unused for longest first.

        Return False, and leave the rest to the next scan, after more than `most` files.
        """
        for _ in range(most + 1):
            oldest = self._index.take_oldest()
            if oldest is None:
                return True
            name, file = oldest
            newer = self._folder.remove(name, file.stamp)
            if newer is None:
                self._count(evicted=1)
            else:  # used by another server meanwhile
                self._index.put(name, PageFile(file.size, newer))
        return False

    def _check_folder(self) -> bool:
        """Step aside if the folder is gone. Return True in that case."""
        is_removed = self._folder.is_removed()
        if is_removed:
            self._health.step_aside("removed", "its folder does not exist any more")
        return is_removed

    def _keep(self) -> None:
        """Scan all shards once, and then one shard per written page, or per `scan_s` seconds.

        After a fault, always wait, so that a scan that fails is not repeated without a pause.
        """
        has_failed = False
        while not self._closing.is_set():
            is_idle = self.scanned.is_set() or not (self._is_open and self._health.can_read)
            if is_idle or has_failed:
                self._changed.wait(self.limits.scan_s)
                self._changed.clear()
            has_failed = True
            try:
                has_failed = not self._try(self._remove_unwanted)
                if self._health.is_due():
                    has_failed |= not self._try(self._recover)
                elif self._health.can_read and self._is_open:
                    has_failed |= not self._try(self._scan)
            except Exception:
                log.exception("the scan of the disk tier failed")

    def _remove_unwanted(self) -> None:
        """Remove the files of pages that are not written at present. The others come later."""
        for name, key in [*self._unwanted.items()]:
            if self._is_open and not self._transfers.is_writing(key):
                self._folder.remove(name)
                self._index.drop(name)
                del self._unwanted[name]

    def _scan(self) -> None:
        """Scan the next shard. Apply the limit after the last one."""
        number = self._next_shard
        before = self._index.names(number)
        try:
            files = self._folder.scan(number)
        except NotADirectoryError as error:  # another file has the name of the shard
            self._health.note("foreign", detail_of(error))
            files = {}
        self._index.update(before, files)
        self._next_shard = (number + 1) % NUM_SHARDS
        if self._next_shard:
            return
        if not self.scanned.is_set():
            count, used = len(self._index), self._index.num_bytes / 2**30
            limit = self.limits.cap_bytes / 2**30
            mode = "direct" if self.is_direct else "buffered"
            text = "%s: %d pages, %.2f of %.2f GiB, %s I/O"
            log.info(text, self._folder.path, count, used, limit, mode)
            self.scanned.set()
        if self._health.can_write:
            self._make_room(len(self._index))

    def _recover(self) -> None:
        """Use the disk again if a page can be written and read fast enough."""
        if not self._is_open or self._folder.is_removed():
            self._open_folder()
        self._probe()
        self._health.recover()

    def _watch(self) -> None:
        """Step aside and end all transfers when one takes longer than `slow_s`."""
        slow_s = self.limits.slow_s
        while not self._closing.is_set():
            started = self._transfers.oldest_start(timeout_s=None)
            if started is None:
                continue
            if not self._health.can_read or time.monotonic() - started > slow_s:
                if self._health.can_read:
                    self._health.step_aside("slow", f"a page took over {slow_s:g} s")
                self._transfers.fail_all()
            self._closing.wait(slow_s / 8)


def _copy(into: memoryview, source: memoryview) -> None:
    """Copy bytes between buffers of equal length, without the GIL if they are large."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
