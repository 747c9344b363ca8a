"""Pages that D copies from P's memory to its own: by CUDA IPC inside one host, or by NIXL.

Theory of operation:

1. P's card describes the cache of each rank: the memory by handles or addresses, and the place of
   each page. A rank of D reads that of P's rank of the same number, so both have as many ranks.
2. D opens the memory once per connection, in the connection's thread. It closes it when the
   connection ends, so a handle of an earlier start of P is never read, and a dead P's memory is
   freed.
3. A fetch copies the ticket's pages to the request's own pages. The messages are those of the
   socket backend: P confirms after the copy that the lease still holds, and D ends the lease.

Decision: P is not involved in a copy by CUDA IPC, so a frozen or dead P does not delay it. The
answer about the lease that is then missing fails the fetch. NIXL has a limit of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from nanovllm.transfer.sealed import PeerError

AT_ONCE = 64  # pages of one copy; heartbeats are sent between copies
SLOW = 0.1  # of the link's rate, below which the first transfer is a warning
BOOT_ID = "/proc/sys/kernel/random/boot_id"
END_OF_ADDRESSES = 1 << 64
MAX_METADATA = 1 << 16  # bytes of an agent's metadata; one with 8 network cards has 4 KB
log = logging.getLogger("transfer")


class MemoryPart(Struct, frozen=True):
    """One tensor of a cache: [layers, rows, page_bytes], contiguous."""

    handle: bytes  # of the allocation, for CUDA IPC
    start: int  # byte of the allocation at which the tensor begins; its address, for NIXL
    layers: int
    rows: int  # pages, including the padding page 0
    page_bytes: int  # of one layer

    @property
    def num_bytes(self) -> int:
        return self.layers * self.rows * self.page_bytes


class AgentCard(Struct, frozen=True):
    """P's agent of NIXL."""

    metadata: bytes
    kind: Literal["DRAM", "VRAM"]
    device: int  # index of P's GPU; 0 for DRAM


class DeviceMemory(Struct, frozen=True):
    """An engine's cache as other processes see it."""

    boot: str  # id of the host's start
    pids: str  # name of the PID namespace; CUDA IPC does not cross its border
    parts: list[MemoryPart]
    backend: Literal["cuda_ipc", "nixl"] = "cuda_ipc"
    agent: AgentCard | None = None  # for NIXL


@dataclass(frozen=True, slots=True, eq=False)
class OfferedMemory:
    """A rank's cache that D may read until `close`."""

    memory: DeviceMemory
    close: Callable[[], None] = lambda: None


class OpenMemory(Protocol):
    """P's memory, opened. One thread uses it."""

    def copy(self, pages: Sequence[tuple[int, int]], ready: object) -> float:
        """Copy (page of P, page of D) after `ready`, and wait for the end. Return the seconds.

        Raise PeerError if P has no such page, or the copy failed.
        """
        ...

    def link_rate(self) -> float:
        """Measure and return the bytes per second of one large copy; 0.0 for unknown."""
        ...

    def close(self) -> None: ...


class MemoryReader(Protocol):
    """Access to the memory of peers."""

    own: DeviceMemory  # D's, without handles or an agent
    usable: threading.Event  # set once threads may use the device; peers are connected after it
    is_required: bool  # False: a peer whose memory cannot be opened sends its pages by socket

    def open(self, memory: DeviceMemory) -> OpenMemory:
        """Open P's memory for the calling thread. Raise PeerError if that is not possible."""
        ...


@dataclass(slots=True, eq=False)
class Arrivals:
    """D's pages that a load may fill directly, by the key of their content."""

    pages: Mapping[bytes, int]
    ready: object = None  # event after which nothing reads or writes the pages
    filled: set[int] = field(default_factory=set)  # once their fetch has succeeded
    were_awaited: bool = False  # P was still computing some pages, so times say little of the link


def this_process() -> tuple[str, str]:
    """Return the id of the host's start, and the name of this process's PID namespace."""
    try:
        boot = Path(BOOT_ID).read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return boot, ""


def check_memory(memory: DeviceMemory, own: DeviceMemory) -> None:
    """Raise PeerError unless D can copy pages from this memory to its own."""
    if memory.backend != own.backend:
        remedy = f"set {own.backend} there, too"
        raise PeerError("memory", f"its transfer.backend is {memory.backend}: {remedy}")
    if own.backend == "cuda_ipc":
        if memory.boot != own.boot:
            raise PeerError("memory", "it runs on another host")
        if memory.pids != own.pids:
            remedy = "share one, as by --pid=host"
            raise PeerError("memory", f"it runs in another PID namespace: {remedy}")
    elif memory.agent is None or len(memory.agent.metadata) > MAX_METADATA:
        raise PeerError("memory", "its agent has no metadata, or too much")
    elif memory.agent.device < 0:
        raise PeerError("memory", "the description of its agent is malformed")
    shapes = [[(p.layers, p.page_bytes) for p in side.parts] for side in (memory, own)]
    if shapes[0] != shapes[1]:
        raise PeerError("memory", "its cache has other tensors: serve the same recipe")
    if any(
        part.rows < 1 or not 0 <= part.start <= END_OF_ADDRESSES - part.num_bytes
        for part in memory.parts
    ):
        raise PeerError("memory", "the description of its cache is malformed")


class PeerMemory:
    """The opened memory of one peer, whose first transfer is measured and logged."""

    def __init__(self, opened: OpenMemory, memory: DeviceMemory, peer: tuple[str, int]) -> None:
        self._opened = opened
        self._peer = peer
        self._rows = min(part.rows for part in memory.parts)
        self._page_bytes = sum(part.layers * part.page_bytes for part in memory.parts)
        self._link_rate = opened.link_rate()
        self._is_measured = False

    def copy(self, pages: Sequence[tuple[int, int]], ready: object) -> int:
        """Copy (page of P, page of D) after `ready`, and wait for the end. Return the bytes.

        Raise PeerError if P has no such page, or the copy failed.
        """
        if any(not 0 < page < self._rows for page, _ in pages):
            raise PeerError("memory", "a ticket has a page that its cache does not have")
        seconds = self._opened.copy(pages, ready)
        num_bytes = len(pages) * self._page_bytes
        if not self._is_measured and pages:
            self._is_measured = True
            self._log(num_bytes, max(seconds, 1e-9))
        return num_bytes

    def close(self) -> None:
        self._opened.close()

    def _log(self, num_bytes: int, seconds: float) -> None:
        rate = num_bytes / seconds
        text = f"first copy of {num_bytes / 1e6:.1f} MB ran at {rate / 1e9:.2f} GB/s"
        if self._link_rate:
            text += f", the link at {self._link_rate / 1e9:.2f}"
        write = log.warning if rate < SLOW * self._link_rate else log.info
        write("transfer.peers: %s:%d: %s", *self._peer, text)


def memory_of_rank(
    memories: Sequence[DeviceMemory], backend: str, rank: int, num_ranks: tuple[int, int]
) -> DeviceMemory:
    """Return the memory of P's `rank`. Raise PeerError if it cannot be read by the same rank of D.

    `num_ranks` are those of P and of D.
    """
    of_p, of_d = num_ranks
    if of_p != of_d:
        remedy = "set one number on both, or use transfer.backend socket"
        raise PeerError(
            "memory",
            f"its parallel.tp is {of_p}, and {of_d} here; {backend} needs equal ones: {remedy}",
        )
    if len(memories) != of_p or not memories[rank].parts:
        raise PeerError("memory", f"it offers no memory for {backend}")
    return memories[rank]


def opened_memory(
    reader: MemoryReader | None,
    memories: Sequence[DeviceMemory],
    peer: tuple[str, int],
    *,
    rank: int = 0,
    num_ranks: tuple[int, int] = (1, 1),
) -> PeerMemory | None:
    """Open the memory of a peer's `rank`; None if its pages come by socket.

    `memories` are those of its card, and `num_ranks` those of the peer and of this engine.
    Raise PeerError if the recipe requires the memory and it cannot be opened.
    """
    if reader is None:
        return None
    try:
        memory = memory_of_rank(memories, reader.own.backend, rank, num_ranks)
        check_memory(memory, reader.own)
        memory_of_peer = PeerMemory(reader.open(memory), memory, peer)
    except PeerError as error:
        if reader.is_required:
            raise
        log.info("transfer.peers: pages of %s:%d come by socket: %s", *peer, error)
        return None
    backend = reader.own.backend
    log.info("transfer.peers: pages of %s:%d are copied from its device by %s", *peer, backend)
    return memory_of_peer
