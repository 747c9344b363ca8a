"""Helpers of the disk tier's tests: open a store, and write and read single pages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from nanovllm.kv.disk.format import PageOwner, file_bytes
from nanovllm.kv.disk.limits import DiskLimits
from nanovllm.kv.disk.store import DiskStore

LENGTH = 10_000  # bytes of a payload, not a multiple of a block
OWNER = PageOwner(identity=b"m" * 32, dtype="bfloat16", layout=b"l" * 32, rank=0)


def limits(pages: int = 100, **changed: float) -> DiskLimits:
    few = {"read_threads": 2, "write_threads": 1, "slow_s": 20.0, "retry_s": 0.05, "scan_s": 0.02}
    fields = {"payload_bytes": LENGTH, "cap_bytes": pages * file_bytes(LENGTH), **few, **changed}
    return DiskLimits(**fields)  # type: ignore[arg-type]


@contextmanager
def opened(
    folder: Path, own: DiskLimits | None = None, owner: PageOwner = OWNER,
    wake: Callable[[], None] = lambda: None,
) -> Iterator[DiskStore]:  # fmt: skip
    store = DiskStore(folder, owner, own or limits(), wake)
    try:
        eventually(lambda: store.scanned.is_set() or not store._health.can_write)
        yield store
    finally:
        store.close()


def eventually(holds: Callable[[], object]) -> None:
    """Wait until the condition is true; fail after EVENTUALLY_S seconds, or after 30 if not set."""
    deadline = time.monotonic() + float(os.environ.get("EVENTUALLY_S", "30"))
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.002)


def payload(key: bytes, length: int = LENGTH) -> bytes:
    """Return bytes that belong to a key."""
    return (key.ljust(16, b".") * (length // 16 + 1))[:length]


def result(store: DiskStore, ticket: int) -> bool:
    found: dict[int, bool] = {}
    while ticket not in found:
        assert store.wait(30.0), "no result"
        found.update(store.poll())
    return found[ticket]


def put(store: DiskStore, *keys: bytes) -> None:
    """Write pages and wait until they are on the disk."""
    for key in keys:
        ticket = store.write(key, payload(key))
        assert ticket is not None and result(store, ticket)
        eventually(partial(lambda k: not store._transfers.is_writing(k), key))


def get(store: DiskStore, key: bytes) -> bytes | None:
    """Return a page's bytes; None for a miss, which must leave the buffer as it was."""
    into = bytearray(b"?" * LENGTH)
    if result(store, store.read(key, into)):
        return bytes(into)
    assert into == b"?" * LENGTH
    return None


def path_of(folder: Path, key: bytes, owner: PageOwner = OWNER) -> Path:
    name = owner.name(key)
    return folder / "pages" / name[:2] / name


def files(folder: Path) -> set[Path]:
    return {Path(where) / name for where, _, names in os.walk(folder / "pages") for name in names}
