"""Limits of the disk tier: sizes, threads, queues and times."""

from __future__ import annotations

from msgspec import Struct

from nanovllm.kv.disk.format import file_bytes
from nanovllm.typed_yaml import ConfigError


class DiskLimits(Struct, frozen=True, kw_only=True):
    """Sizes and times of a store. The cap applies to the folder, over all servers and ranks."""

    payload_bytes: int  # largest payload of a page
    cap_bytes: int
    state_parts: int = 0  # of `payload_bytes` each, of the recurrent states after a page
    read_threads: int = 4
    write_threads: int = 2
    max_writes: int = 256  # queued; reads are bounded by the host slots that they fill
    slow_s: float = 2.0  # a single read or write of this duration means that the disk hangs
    retry_s: float = 30.0  # time between trials of a disk that is not used
    quiet_s: float = 600.0  # time without a fault after which it is logged again
    scan_s: float = 1.0  # time between scans of a shard in an idle store

    @property
    def file_bytes(self) -> int:
        """Size of the largest file of a page."""
        return file_bytes(self.payload_bytes)

    def check(self) -> None:
        """Raise ConfigError if the cap is below one page and the recurrent state after it."""
        count = 1 + self.state_parts
        if self.cap_bytes < count * self.file_bytes:
            files = f"one page's file of {self.file_bytes} bytes"
            if self.state_parts:
                files += f", and {self.state_parts} more of its recurrent state"
            raise ConfigError(
                f"cache.disk.gib: {self.cap_bytes} bytes are less than {files}; raise it, or leave "
                "cache.disk out"
            )
