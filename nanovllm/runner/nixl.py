"""Access to the memory of another process by NIXL, inside one host or from host to host.

Theory of operation:

1. P has one agent of NIXL, which registers P's caches. P's card has the agent's metadata, and the
   address of each cache.
2. D has one agent per connection. It registers a landing area of two halves, and nothing else.
3. A copy reads blocks of P's pages to one half, in the thread of the connection. Meanwhile, D
   copies the blocks in the other half to its own pages.
4. A read that has not ended after `silence_s` fails the copy, which ends the connection. NIXL
   cannot revoke the read. So the agent and the landing area stay until the read has ended.

Decision: a read never writes to D's cache. The pages of a failed copy are therefore free at once,
and a late byte cannot reach another request's page. The copy from the landing area runs at the rate
of D's memory, which is at least 30 times that of a network.

Decision: D closes an agent only after its reads have ended. Otherwise, the library of a P that
sends by TCP would end P's process.

Decision: the agent of P has a thread of NIXL, which takes a core also while it is idle, since P
answers reads over TCP. The agents of D have none: they make progress when D looks at a read.

Decision: D builds all descriptors from addresses and lengths that it has checked. It never reads
descriptors of a peer, which are in Python's pickle format.
"""

from __future__ import annotations

import importlib
import logging
import logging.config
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import ConfigError
from nanovllm.runner.cuda_ipc import EXPANDABLE, Driver, part_of, runs
from nanovllm.transfer.device_pages import (
    AgentCard,
    DeviceMemory,
    MemoryPart,
    OfferedMemory,
    OpenMemory,
)
from nanovllm.transfer.sealed import PeerError

MODULES = ("nixl_cu12", "nixl_cu13")  # of the wheels for CUDA 12 and 13
BACKEND = "UCX"
HALF_BYTES = 32 << 20  # of the landing area, of which there are two per peer
MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 100e-6  # between looks at the state of a read
END_S = 1.0  # for the other reads after a failed one, before they are left to a thread
LATE_PAUSE_S = 0.005
MOST_LATE = 4  # landing areas of reads that do not end
SLOW_RATE = 1e9  # bytes per second, below which GPUs are probably connected by TCP
log = logging.getLogger("transfer")


def nixl_library() -> Any:  # noqa: ANN401
    """Return the module of NIXL that is installed. Raise ConfigError if there is none."""
    names = MODULES[::-1] if (torch.version.cuda or "").startswith("13") else MODULES
    error: Exception | None = None
    for name in names:
        try:
            with unchanged_logging():
                return importlib.import_module(name)
        except Exception as missing:
            error = error or missing
    remedy = "pip install 'nanovllm[nixl]', or nixl-cu13 for CUDA 13"
    raise ConfigError(f"transfer.backend nixl needs the package nixl-cu12 ({error}): {remedy}")


@contextmanager
def unchanged_logging() -> Iterator[None]:
    """Keep an import from configuring all of the process's logging.

    NIXL's does, which closes our handlers and sets raiseExceptions to False.
    """
    raises, configure = logging.raiseExceptions, logging.config.dictConfig
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.raiseExceptions, logging.config.dictConfig = raises, configure
        logging.getLogger("nixl").setLevel(logging.WARNING)


class Agent:
    """An agent of NIXL that has registered `tensors`. One thread at a time uses it.

    Its methods raise exceptions of the library, whose only common base is Exception.
    """

    def __init__(self, tensors: Sequence[Tensor], *, answers: bool) -> None:
        """`answers`: other agents read from this one."""
        library = nixl_library()
        config = library.nixl_agent_config(enable_prog_thread=answers, backends=[BACKEND])
        self._agent = library.nixl_agent(f"nanovllm-{secrets.token_hex(16)}", config)
        if BACKEND not in self._agent.backends:
            raise RuntimeError(f"this build of NIXL has no backend {BACKEND}")
        device = tensors[0].device
        self.kind = kind_of(device)
        self.device = device.index or 0
        places = [(one.data_ptr(), one.nbytes, self.device, "") for one in tensors]
        self._registered = self._agent.register_memory(places, self.kind)

    def card(self) -> AgentCard:
        return AgentCard(self._agent.get_agent_metadata(), self.kind, self.device)

    def connect(self, metadata: bytes) -> Any:  # noqa: ANN401
        """Return the name of a peer's agent."""
        return self._agent.add_remote_agent(metadata)

    def read(
        self,
        peer: Any,  # noqa: ANN401
        card: AgentCard,
        places_N3: np.ndarray[Any, Any],
        start: int,
    ) -> Any:  # noqa: ANN401
        """Prepare to read places (address, bytes, device) of the peer to consecutive bytes.

        `start` is the address of the first one. Return the read for `post` and `state`.
        """
        own_N3 = places_N3.copy()
        ends_N = np.cumsum(places_N3[:, 1])
        own_N3[:, 0] = np.uint64(start) + ends_N - places_N3[:, 1]
        own_N3[:, 2] = self.device
        descriptors = self._agent.get_xfer_descs
        own, theirs = descriptors(own_N3, self.kind), descriptors(places_N3, card.kind)
        return self._agent.initialize_xfer("READ", own, theirs, peer)

    def post(self, read: Any) -> None:  # noqa: ANN401
        """Start a read. This takes the time of the whole read where the CPU copies."""
        self._agent.transfer(read)

    def state(self, read: Any) -> str:  # noqa: ANN401
        """Return PROC for a read that goes on, DONE, or ERR with the reason."""
        try:
            return str(self._agent.check_xfer_state(read))
        except Exception as error:
            return f"ERR {error}"

    def release(self, read: Any) -> None:  # noqa: ANN401
        """Free a read that has ended."""
        try:
            read.release()
        except Exception as error:
            log.debug("a read of NIXL was not released: %s", error)

    def close(self) -> None:
        """Deregister the memory, and end the agent's threads. All reads must have ended."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.deregister_memory(self._registered)
            agent.agent = None  # the library's own object, which its reads refer to as well


def registered_memory(tensors: Sequence[Tensor]) -> OfferedMemory:
    """Register P's cache for reads of decode servers. Raise ConfigError if that is not possible."""
    try:
        check_shareable(tensors)
        agent = Agent(tensors, answers=True)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"transfer.backend nixl: {error}; use backend socket") from None
    parts = [part_of(tensor, start=tensor.data_ptr()) for tensor in tensors]
    memory = DeviceMemory("", "", parts, backend="nixl", agent=agent.card())
    return OfferedMemory(memory, agent.close)


class NixlReader:
    """Access of D to the memory of peers. `tensors` are D's own caches."""

    is_required = True

    def __init__(
        self, tensors: Sequence[Tensor], usable: threading.Event, *, silence_s: float = 5.0
    ) -> None:
        """`silence_s` limits the time of one read, of at most HALF_BYTES. Raise ConfigError."""
        nixl_library()
        self.own = DeviceMemory("", "", [part_of(tensor) for tensor in tensors], backend="nixl")
        self.usable = usable
        self.silence_s = silence_s
        self.num_late = 0  # landing areas of which a read goes on after its connection
        self._tensors = tensors
        self._lock = threading.Lock()

    def open(self, memory: DeviceMemory) -> OpenMemory:
        """Open P's memory for the calling thread. Raise PeerError if that is not possible."""
        if self.num_late >= MOST_LATE:
            raise PeerError("memory", f"{self.num_late} earlier reads have not ended")
        device = self._tensors[0].device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            return OpenNixlMemory(self, memory, self._tensors)
        except Exception as error:
            raise PeerError("memory", f"its memory cannot be opened: {error}") from None

    def end_late(self, opened: OpenNixlMemory) -> None:
        """Close the memory in another thread, when its reads have ended."""
        log.warning("transfer.peers: a read has not ended; its 64 MiB stay reserved until then")
        with self._lock:
            self.num_late += 1
        threading.Thread(
            target=self._end, args=(opened,), name="transfer-late", daemon=True
        ).start()

    def _end(self, opened: OpenNixlMemory) -> None:
        while not opened.has_ended():
            time.sleep(LATE_PAUSE_S)
        opened.end()
        with self._lock:
            self.num_late -= 1


class PageBlock(NamedTuple):
    """Consecutive pages of consecutive layers of one part of the cache."""

    part: int
    layer: int
    num_layers: int
    source: int  # first page of P
    target: int  # first page of D
    num_pages: int
    num_bytes: int


class Landing(NamedTuple):
    """A read to one half of the landing area."""

    read: Any
    blocks: Sequence[PageBlock]
    half: int


class OpenNixlMemory:
    """P's memory, read by an agent of its own. One thread uses it."""

    def __init__(self, reader: NixlReader, memory: DeviceMemory, tensors: Sequence[Tensor]) -> None:
        assert memory.agent is not None
        self._reader = reader
        self._parts = memory.parts
        self._card = memory.agent
        self._own = [pages_of(tensor) for tensor in tensors]
        device = tensors[0].device
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._half_bytes = max(HALF_BYTES, *(part.page_bytes for part in memory.parts))
        self._landing_X = torch.empty(2 * self._half_bytes, dtype=torch.uint8, device=device)
        self._agent = Agent([self._landing_X], answers=False)
        try:
            self._peer = self._agent.connect(memory.agent.metadata)
        except Exception:
            self._agent.close()
            raise
        self._reads: dict[int, Any] = {}  # that have not ended, by half
        self._is_slow = False  # has been logged

    def copy(self, pages: Sequence[tuple[int, int]], ready: Any) -> float:  # noqa: ANN401
        """Copy (page of P, page of D), and wait for the end. Return the seconds.

        D's pages are written after `ready`. Raise PeerError if a read fails or is silent.
        """
        began = time.perf_counter()
        started: deque[Landing] = deque()
        half = num_bytes = 0
        for blocks in batches(
            blocks_of(self._parts, runs(pages), self._half_bytes), self._half_bytes
        ):
            if len(started) == 2:
                self._store(started.popleft(), ready)
            started.append(self._start(blocks, half))
            half = 1 - half
            num_bytes += sum(block.num_bytes for block in blocks)
        while started:
            self._store(started.popleft(), ready)
        seconds = time.perf_counter() - began
        self._check_rate(num_bytes, seconds)
        return seconds

    def _start(self, blocks: Sequence[PageBlock], half: int) -> Landing:
        """Start to read blocks to one half of the landing area."""
        places_N3 = np.concatenate([self._places(block) for block in blocks])
        start = self._landing_X.data_ptr() + half * self._half_bytes
        try:
            read = self._agent.read(self._peer, self._card, places_N3, start)
            self._reads[half] = read
            self._agent.post(read)
        except Exception as error:
            raise PeerError("memory", f"a read could not be started: {error}") from None
        return Landing(read, blocks, half)

    def _places(self, block: PageBlock) -> np.ndarray[Any, Any]:
        """Return address, bytes and device of a block's pages in each layer."""
        part = self._parts[block.part]
        layers_N = np.arange(block.layer, block.layer + block.num_layers, dtype=np.uint64)
        rows_N = layers_N * np.uint64(part.rows) + np.uint64(block.source)
        places_N3 = np.empty((block.num_layers, 3), dtype=np.uint64)
        places_N3[:, 0] = np.uint64(part.start) + rows_N * np.uint64(part.page_bytes)
        places_N3[:, 1] = block.num_pages * part.page_bytes
        places_N3[:, 2] = self._card.device
        return places_N3

    @torch.inference_mode()
    def _store(self, landing: Landing, ready: Any) -> None:  # noqa: ANN401
        """Wait for a read, and copy its blocks to D's pages."""
        self._wait(landing)
        if self._stream is None:
            self._copy_blocks(landing)
            return
        if ready is not None:
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            self._copy_blocks(landing)
        self._stream.synchronize()

    def _copy_blocks(self, landing: Landing) -> None:
        at = landing.half * self._half_bytes
        for block in landing.blocks:
            source = self._landing_X[at : at + block.num_bytes]
            layers = slice(block.layer, block.layer + block.num_layers)
            rows = slice(block.target, block.target + block.num_pages)
            own = self._own[block.part][layers, rows]
            own.copy_(source.view(own.shape))
            at += block.num_bytes

    def _wait(self, landing: Landing) -> None:
        """Wait for the end of a read. Raise PeerError if it failed, or is silent."""
        limit_s = self._reader.silence_s
        deadline, pause = time.monotonic() + limit_s, MIN_PAUSE_S
        while (state := self._agent.state(landing.read)) == "PROC":
            if time.monotonic() > deadline:
                raise PeerError("memory", f"a read has not ended within {limit_s:.1f} s")
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)
        self._agent.release(self._reads.pop(landing.half))
        if state != "DONE":
            raise PeerError("memory", f"a read failed: {state}")

    def _check_rate(self, num_bytes: int, seconds: float) -> None:
        """Log one warning if GPUs seem to be connected by TCP."""
        is_slow = self._card.kind == "VRAM" and num_bytes < SLOW_RATE * seconds
        if is_slow and not self._is_slow and num_bytes >= HALF_BYTES:
            rate = num_bytes / seconds / 1e9
            text = "transfer.peers: NIXL reads at %.2f GB/s; UCX seems to use TCP: see UCX_TLS"
            log.warning(text, rate)
            self._is_slow = True

    def link_rate(self) -> float:
        """Return 0.0: P may be capturing graphs, which a read over TCP would break."""
        return 0.0

    def has_ended(self) -> bool:
        """Return True if no read goes on. Free the reads that have ended."""
        for half, read in [*self._reads.items()]:
            if self._agent.state(read) != "PROC":
                self._agent.release(self._reads.pop(half))
        return not self._reads

    def end(self) -> None:
        """End the agent and free the landing area. No read may go on."""
        self._agent.close()
        self._landing_X = torch.empty(0)

    def close(self) -> None:
        """End the agent and free the landing area, or leave that to a thread."""
        deadline = time.monotonic() + END_S
        while not self.has_ended():
            if time.monotonic() > deadline:
                self._reader.end_late(self)
                return
            time.sleep(MAX_PAUSE_S)
        self.end()


def blocks_of(
    parts: Sequence[MemoryPart], page_runs: Sequence[tuple[int, int, int]], most_bytes: int
) -> Iterator[PageBlock]:
    """Yield blocks of at most `most_bytes`, for runs (page of P, page of D, number of pages).

    `most_bytes` is at least a page of each part.
    """
    for index, part in enumerate(parts):
        for source, target, count in page_runs:
            at_once = min(count, most_bytes // part.page_bytes)
            for at in range(0, count, at_once):
                num_pages = min(at_once, count - at)
                row_bytes = num_pages * part.page_bytes
                most_layers = most_bytes // row_bytes
                for layer in range(0, part.layers, most_layers):
                    num_layers = min(most_layers, part.layers - layer)
                    yield PageBlock(
                        part=index,
                        layer=layer,
                        num_layers=num_layers,
                        source=source + at,
                        target=target + at,
                        num_pages=num_pages,
                        num_bytes=num_layers * row_bytes,
                    )


def batches(blocks: Iterator[PageBlock], most_bytes: int) -> Iterator[list[PageBlock]]:
    """Yield lists of blocks, in their order, of at most `most_bytes` each."""
    batch: list[PageBlock] = []
    num_bytes = 0
    for block in blocks:
        if batch and num_bytes + block.num_bytes > most_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(block)
        num_bytes += block.num_bytes
    if batch:
        yield batch


def pages_of(tensor_LPSGA: Tensor) -> Tensor:
    """Return the bytes of a cache as [layers, pages, bytes], in the same memory."""
    layers, rows = tensor_LPSGA.shape[:2]
    return tensor_LPSGA.view(torch.uint8).view(layers, rows, -1)


def kind_of(device: torch.device) -> Literal["DRAM", "VRAM"]:
    return "VRAM" if device.type == "cuda" else "DRAM"


def check_shareable(tensors: Sequence[Tensor]) -> None:
    """Raise ConfigError for memory that UCX would read by TCP, without a message."""
    if tensors[0].device.type != "cuda":
        return
    if not all(Driver().is_shareable(tensor.data_ptr()) for tensor in tensors):
        raise ConfigError(f"transfer.backend nixl: drop {EXPANDABLE}, or use backend socket")
