"""State that threads share in the simulator of ptx.py: memory, barriers and copies in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Array = np.ndarray
SHARED_BYTES = 228 * 1024


class Memory:
    """Global memory: tensors, with gaps between them in which any access is an error."""

    def __init__(self, num_bytes: int) -> None:
        self.content = np.full(num_bytes, 0xFF, np.uint8)
        self.is_there, self.may_change = np.zeros((2, num_bytes), bool)
        self.times_written = np.zeros(num_bytes, int)
        self.end = 4096

    def place(self, content: Array, may_change: bool = False) -> slice:
        """Copy the content to a free place and return its addresses."""
        placed = slice(self.end, self.end + content.nbytes)
        assert placed.stop + 4096 <= len(self.content)
        self.content[placed] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self.is_there[placed], self.may_change[placed] = True, may_change
        self.end = -(-placed.stop // 4096) * 4096 + 4096
        return placed

    def at(self, address_X: Array, num_bytes: int, allowed: Array) -> Array:
        assert (address_X % num_bytes == 0).all(), "an address is not aligned"
        at_XB = address_X[:, None] + np.arange(num_bytes)
        beside = (at_XB < 0) | (at_XB >= len(allowed))
        assert not beside.any() and allowed[at_XB].all(), "beside the tensors in global memory"
        return at_XB

    def load(self, address_X: Array, num_bytes: int) -> Array:
        """Return bytes [address, byte]."""
        return self.content[self.at(address_X, num_bytes, self.is_there)]

    def store(self, address_X: Array, content_XB: Array) -> None:
        at_XB = self.at(address_X, content_XB.shape[1], self.may_change)
        self.content[at_XB] = content_XB
        np.add.at(self.times_written, at_XB, 1)


@dataclass
class Barrier:
    """An mbarrier. A phase ends when all threads have arrived and no bytes are missing."""

    of: int
    parity: int = 0
    missing: int = 0
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.missing = self.of

    def count(self, arrivals: int, num_bytes: int) -> None:
        self.missing -= arrivals
        self.num_bytes += num_bytes
        assert self.missing >= 0, "more threads arrive at a barrier than it is for"
        if self.missing == self.num_bytes == 0:
            self.parity ^= 1
            self.missing = self.of


@dataclass
class Meeting:
    """A barrier at which `of` threads meet, round by round."""

    of: int
    round: int = 0
    arrived: int = 0

    def arrive(self, count: int) -> None:
        self.arrived += count
        if self.arrived == self.of:
            self.round, self.arrived = self.round + 1, 0


class Block:
    """Shared memory and barriers of a block of threads."""

    def __init__(self, num_threads: int) -> None:
        self.content = np.full(SHARED_BYTES, 0xFF, np.uint8)  # NaN
        self.barriers: dict[int, Barrier] = {}
        self.num_threads = num_threads
        self.meetings: dict[int, Meeting] = {}

    def meeting(self, number: int, count: int = 0) -> Meeting:
        """Return the barrier of this number, for `count` threads or all."""
        found = self.meetings.setdefault(number, Meeting(count or self.num_threads))
        assert found.of == (count or self.num_threads), "a barrier is for two numbers of threads"
        return found

    def named(self, address: int) -> str:
        """Describe a barrier, which is numbered in the order of addresses."""
        found = self.barriers[address]
        nth = sorted(self.barriers).index(address)
        return f"barrier {nth}, {found.missing} arrivals and {found.num_bytes} bytes are missing"


class Copy(NamedTuple):
    """A copy in flight to the shared memory of one block."""

    block: Block
    at: Array
    content: Array
    barrier: int

    def arrive(self) -> None:
        self.block.content[self.at] = self.content
        self.block.barriers[self.barrier].count(0, -self.content.size)
