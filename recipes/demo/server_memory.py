"""Memory and open files of a server's API process, as the hostile load watches them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path


def processes(supervisor: int) -> dict[int, str]:
    """Name by id, of its children and theirs."""
    parents: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            before, _, after = path.read_text().rpartition(") ")
            parents[int(path.parent.name)] = int(after.split()[1]), before.partition("(")[2]
    found: dict[int, str] = {}
    for pid, (parent, name) in parents.items():
        while parent in parents and parent != supervisor:
            parent = parents[parent][0]
        if parent == supervisor:
            found[pid] = name
    return found


def api_mib(supervisor: int) -> float:
    """Resident memory of the API process and the one it may have for large bodies."""
    total = 0
    for pid, name in processes(supervisor).items():
        if name.startswith(("nanovllm-api", "nanovllm-large")):
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_open_files(supervisor: int) -> int:
    names = processes(supervisor).items()
    (pid,) = (pid for pid, name in names if name.startswith("nanovllm-api"))
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def watched(supervisor: int) -> Iterator[list[float]]:
    """The one number in it grows to the greatest api_mib meanwhile."""
    peak, is_over = [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.1):
            peak[0] = max(peak[0], api_mib(supervisor))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()
