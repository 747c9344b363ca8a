"""Index of the page files of a folder: names, sizes, and the order of use, in memory.

The files of all servers, models and ranks of a folder are counted, since one limit applies to them.
"""

from __future__ import annotations

import heapq
import threading
import time

from nanovllm.kv.disk.folder import NUM_SHARDS, PageFile, shard_of


class PageIndex:
    """Files by name, and their total size. All methods may be called from any thread.

    Decision: a stamp is the time in nanoseconds, but always later than every stamp seen so far. So
    a clock that jumps cannot change the order of use of one server. The order is written to the
    files as their time of modification and survives a restart.
    """

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self._shards: list[dict[str, PageFile]] = [{} for _ in range(NUM_SHARDS)]
        self._by_use: list[tuple[int, str]] = []  # heap of stamps; some are out of date
        self._bytes = 0
        self._reserved = 0  # bytes of files that are being written
        self._latest = 0

    def __contains__(self, name: str) -> bool:
        return name in self._shards[shard_of(name)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def next_stamp(self) -> int:
        """Return a stamp later than all others."""
        with self._lock:
            self._latest = max(time.time_ns(), self._latest + 1)
            return self._latest

    def put(self, name: str, file: PageFile) -> None:
        """Add a file, or replace its size and stamp."""
        with self._lock:
            self._put(name, file)

    def use(self, name: str, stamp: int) -> None:
        """Note the use of a file, if it is in the index."""
        with self._lock:
            if (file := self._shards[shard_of(name)].get(name)) is not None:
                self._put(name, PageFile(file.size, stamp))

    def drop(self, name: str) -> None:
        with self._lock:
            self._drop(name)

    def reserve(self, size: int) -> None:
        """Count `size` bytes of a file that will be written; negative to return them."""
        with self._lock:
            self._reserved += size

    def take_oldest(self) -> tuple[str, PageFile] | None:
        """Remove the file that was unused for longest if the total is above the limit."""
        with self._lock:
            if self._bytes + self._reserved <= self.cap_bytes:
                return None
            while self._by_use:
                stamp, name = heapq.heappop(self._by_use)
                file = self._shards[shard_of(name)].get(name)
                if file is not None and file.stamp == stamp:
                    self._drop(name)
                    return name, file
            return None

    def clear(self) -> None:
        """Drop all files, since the folder is a new one."""
        with self._lock:
            for shard in self._shards:
                shard.clear()
            self._by_use.clear()
            self._bytes = 0

    def names(self, shard: int) -> frozenset[str]:
        """Return the names of one shard, for a later `update`."""
        with self._lock:
            return frozenset(self._shards[shard])

    def update(self, before: frozenset[str], files: dict[str, PageFile]) -> None:
        """Bring a shard up to date with a scan of the folder.

        `before` are the names of the shard when the scan started. Of these, files that were not
        found are gone. Files added during the scan stay.
        """
        with self._lock:
            for name in before - files.keys():
                self._drop(name)
            for name, file in files.items():
                old = self._shards[shard_of(name)].get(name)
                if old is None or old.size != file.size or old.stamp < file.stamp:
                    self._put(name, file)
                    self._latest = max(self._latest, file.stamp)

    def _put(self, name: str, file: PageFile) -> None:
        shard = self._shards[shard_of(name)]
        old = shard.get(name)
        self._bytes += file.size - (old.size if old is not None else 0)
        shard[name] = file
        heapq.heappush(self._by_use, (file.stamp, name))
        if len(self._by_use) > 64 + 2 * len(self):
            self._by_use = [(f.stamp, n) for files in self._shards for n, f in files.items()]
            heapq.heapify(self._by_use)

    def _drop(self, name: str) -> None:
        file = self._shards[shard_of(name)].pop(name, None)
        if file is not None:
            self._bytes -= file.size
