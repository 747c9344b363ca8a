"""Rates of the disk tier beside those of plain writes and reads of the same files.

    python -m tests.load.disk_tier DIR --gib 4 --mib 18 [--results-dir results]

Writes and reads pages of `--mib` MiB, `--gib` GiB in total, through the store and by pwrite and
preadv of one thread and of as many threads as the store has. Prints and records GB/s. Without
direct I/O the system's page cache takes part in all of them.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanovllm.bench.measure import now
from nanovllm.kv.disk.folder import NUM_SHARDS, PageFolder, aligned_bytes
from nanovllm.kv.disk.format import PageOwner, file_bytes
from nanovllm.kv.disk.limits import DiskLimits
from nanovllm.kv.disk.store import DiskStore
from tests.load.tiered import conclude, show_progress


def store_rates(folder: Path, pages: int, limits: DiskLimits) -> tuple[float, float, bool]:
    """Return bytes per second of writes and of reads through the store, and `is_direct`."""
    store = DiskStore(folder, PageOwner(b"", "", b"", 0), limits, lambda: None)
    store.scanned.wait()
    length = limits.payload_bytes
    sources = [memoryview(mmap.mmap(-1, length)) for _ in range(8)]
    for source in sources:
        source[:] = os.urandom(length)
    began = time.perf_counter()
    for number in range(pages):
        while store.write(b"%d" % number, sources[number % 8]) is None:
            store.wait(0.01)
            store.poll()
    while store.counters().written < pages:
        time.sleep(0.001)
    wrote = pages * length / (time.perf_counter() - began)
    store.poll()
    began = time.perf_counter()
    into = [memoryview(mmap.mmap(-1, length)) for _ in range(8)]
    tickets = {store.read(b"%d" % number, into[number % 8]) for number in range(pages)}
    while tickets:
        store.wait()
        for ticket, ok in store.poll():
            assert ok, store.faults()
            tickets.discard(ticket)
    read = pages * length / (time.perf_counter() - began)
    store.close()
    return wrote, read, store.is_direct


def plain_rate(folder: Path, work: Callable[[int, memoryview], int], own: tuple[int, int, int],
               flags: int) -> float:  # fmt: skip
    """Return bytes per second of `work` on plain files. `own` is (threads, pages, length)."""
    threads, pages, length = own

    def of_thread(first: int) -> None:
        buffer = memoryview(mmap.mmap(-1, length))
        buffer[:] = b"x" * length
        for number in range(first, pages, threads):
            fd = os.open(folder / f"plain{number}", os.O_RDWR | os.O_CREAT | flags, 0o600)
            assert work(fd, buffer) == length
            os.close(fd)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        [*pool.map(of_thread, range(threads))]
    return pages * length / (time.perf_counter() - began)


def read_rate(folder: Path, most_bytes: int = 2 << 30) -> dict[str, float]:
    """Return the rate in GB/s at which the tier reads its own files, with as many threads.

    Checksums and copies are not part of it. `disk_is_direct` is 1 if the reads bypass the system's
    page cache; otherwise the rate may be that of memory. At most `most_bytes` are read.
    """
    pages = PageFolder(folder)
    pages.open()
    files = {name: file.size for n in range(NUM_SHARDS) for name, file in pages.scan(n).items()}
    if not files:
        raise RuntimeError(f"{folder} has no files of the disk tier")
    length = max(files.values())
    pages.probe(length)
    names = [name for name, size in files.items() if size == length][: max(1, most_bytes // length)]
    threads = DiskLimits(payload_bytes=length, cap_bytes=length).read_threads

    def of_thread(first: int) -> None:
        into = aligned_bytes(length)
        for name in names[first::threads]:
            pages.read(name, into, time.time_ns())

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        [*pool.map(of_thread, range(threads))]
    rate = len(names) * length / (time.perf_counter() - began)
    pages.close()
    return {"disk_read_gb_per_s": rate / 1e9, "disk_is_direct": float(bool(pages.is_direct))}


def checksum_rate(length: int) -> float:
    data = os.urandom(length)
    began = time.perf_counter()
    for _ in range(5):
        zlib.crc32(data)
    return 5 * length / (time.perf_counter() - began)


def measured(folder: Path, threads: int, pages: int, length: int) -> dict[str, float]:
    """Return the rates in GB/s, and `is_direct`: 1 if the store bypassed the page cache."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        limits = DiskLimits(
            payload_bytes=length,
            cap_bytes=(pages + 1) * file_bytes(length),
            slow_s=60.0,
            read_threads=threads,
            write_threads=max(1, threads // 2),
        )
        wrote, read, is_direct = store_rates(Path(made), pages, limits)
    found = {
        "is_direct": is_direct,
        "checksum_gb_per_s": checksum_rate(length) / 1e9,
        "store_write_gb_per_s": wrote / 1e9,
        "store_read_gb_per_s": read / 1e9,
    }
    flags = os.O_DIRECT if is_direct else 0
    for count in sorted({1, threads}):
        with tempfile.TemporaryDirectory(dir=folder) as made:
            own = count, pages, file_bytes(length)
            there = Path(made)
            wrote = plain_rate(there, lambda fd, data: os.pwrite(fd, data, 0), own, flags)
            read = plain_rate(there, lambda fd, data: os.preadv(fd, [data], 0), own, flags)
        found[f"plain_write_{count}_gb_per_s"] = wrote / 1e9
        found[f"plain_read_{count}_gb_per_s"] = read / 1e9
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--mib", type=float, default=18.0, help="size of a page")
    parser.add_argument("--threads", type=int, default=4, help="of reads; half of them write")
    parser.add_argument("--results-dir", type=Path, help="write a record there")
    asked = parser.parse_args(words)
    show_progress()
    started_at = now()
    length = int(asked.mib * 2**20)
    pages = max(1, int(asked.gib * 2**30 / length))
    metrics = measured(asked.folder, asked.threads, pages, length)
    load = {name: getattr(asked, name) for name in ("gib", "mib", "threads")}
    conclude(asked, None, started_at, metrics, {"name": "disk_tier", **load})


if __name__ == "__main__":
    main()
