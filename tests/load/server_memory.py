"""Memory and open files of a server's API process, as watched by the hostile load."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from nanovllm.bench.started import descendants


def api_mib(supervisor: int) -> float:
    """Return the resident memory of the API process and its process for large bodies, if any."""
    total = 0
    for pid, process in descendants(supervisor).items():
        if process.name.startswith(("nanovllm-api", "nanovllm-large")):
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_open_files(supervisor: int) -> int:
    below = descendants(supervisor).items()
    (pid,) = (pid for pid, process in below if process.name.startswith("nanovllm-api"))
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def watched(supervisor: int) -> Iterator[list[float]]:
    """Yield a list with one number: the maximum of api_mib so far, updated every 0.1 s."""
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
