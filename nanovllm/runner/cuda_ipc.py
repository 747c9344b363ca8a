"""Access to the device memory of another process of the host, by CUDA IPC.

Decision: these are calls of libcuda, since torch's own sharing counts readers in files, frees the
memory at times of its own, and opens it on P's device, which costs 500 MB of that device.

Decision: one two-dimensional copy moves consecutive pages of all layers. The copy engines do it at
the rate of the link, and take no multiprocessors from the steps. 8,000 tokens of Qwen3-8B are at
most 128 such copies.

All functions need a current device: each thread sets it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor

from nanovllm.config import ConfigError
from nanovllm.transfer.device_pages import DeviceMemory, MemoryPart, OpenMemory, this_process
from nanovllm.transfer.sealed import PeerError

HANDLE_BYTES = 64
ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
IS_SHAREABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
MAX_PITCH = (1 << 31) - 1  # bytes between the rows of a two-dimensional copy
PROBE_BYTES = 16 << 20  # of the copy that measures the link
PROBES = 4
EXPANDABLE = "expandable_segments of PYTORCH_CUDA_ALLOC_CONF"


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: a copy of `height` rows of `width` bytes."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class DriverError(RuntimeError):
    """An error of libcuda."""


class Driver:
    """The functions of libcuda that are needed. Addresses are integers."""

    def __init__(self) -> None:
        """Load the library. Raise OSError if there is none."""
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the first address and the bytes of the allocation that has this address."""
        first, size = ctypes.c_uint64(), ctypes.c_size_t()
        at = ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(size), at)
        return first.value, size.value

    def is_shareable(self, address: int) -> bool:
        """Return False for memory that CUDA IPC cannot share, as that of expandable segments."""
        value = ctypes.c_uint64()
        kind, at = ctypes.c_int(IS_SHAREABLE), ctypes.c_uint64(address)
        self._call("cuPointerGetAttribute", ctypes.byref(value), kind, at)
        return bool(value.value & 0xFF)

    def handle(self, first: int) -> bytes:
        """Return the handle of an allocation, by its first address."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(first))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation for the current device. Return its first address."""
        first = ctypes.c_uint64()
        own = IpcHandle.from_buffer_copy(handle)
        flags = ctypes.c_uint(ENABLE_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(first), own, flags)
        return first.value

    def close(self, first: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(first))

    def copy(self, copy: Copy2D, stream: int) -> None:
        """Enqueue a copy."""
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401
        if error := getattr(self._cuda, name)(*arguments):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(error), ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'error').decode()} ({error})")


def part_of(tensor_LPSGA: Tensor, handle: bytes = b"", start: int = 0) -> MemoryPart:
    """Return the place of a cache's pages."""
    assert tensor_LPSGA.is_contiguous(), "pages of all layers need one stride"
    layers, rows = tensor_LPSGA.shape[:2]
    return MemoryPart(
        handle=handle,
        start=start,
        layers=layers,
        rows=rows,
        page_bytes=tensor_LPSGA.nbytes // (layers * rows),
    )


def shared_memory(tensors: Sequence[Tensor]) -> DeviceMemory:
    """Return a description of P's cache with handles. Raise ConfigError if it cannot be shared."""
    boot, pids = this_process()
    parts = []
    try:
        driver = Driver()
        for tensor in tensors:
            if not driver.is_shareable(tensor.data_ptr()):
                remedy = f"drop {EXPANDABLE}, with which memory cannot be shared"
                raise ConfigError(f"transfer.backend cuda_ipc: {remedy}, or use backend socket")
            first, _ = driver.allocation(tensor.data_ptr())
            parts.append(part_of(tensor, driver.handle(first), tensor.data_ptr() - first))
    except (OSError, DriverError) as error:
        raise ConfigError(f"transfer.backend cuda_ipc: {error}; use backend socket") from None
    return DeviceMemory(boot, pids, parts)


class CudaReader:
    """Access of D to the memory of peers. `tensors` are D's own caches."""

    def __init__(self, tensors: Sequence[Tensor], usable: Event, *, is_required: bool) -> None:
        boot, pids = this_process()
        self.own = DeviceMemory(boot, pids, [part_of(tensor) for tensor in tensors])
        self.is_required = is_required
        self.usable = usable
        self._tensors = tensors

    def open(self, memory: DeviceMemory) -> OpenMemory:
        """Open P's memory for the calling thread. Raise PeerError if that is not possible."""
        torch.cuda.set_device(self._tensors[0].device)
        try:
            return OpenCudaMemory(memory, self._tensors)
        except (OSError, RuntimeError) as error:
            raise PeerError("memory", f"its memory cannot be opened: {error}") from None


class OpenCudaMemory:
    """P's memory, mapped for D's device. One thread uses it."""

    def __init__(self, memory: DeviceMemory, tensors: Sequence[Tensor]) -> None:
        self._driver = Driver()
        self._parts = memory.parts
        self._device = tensors[0].device
        self._own = [(tensor.data_ptr(), part_of(tensor).rows) for tensor in tensors]
        self._stream = torch.cuda.Stream()
        self._by_rows = False
        self._first: dict[bytes, int] = {}  # addresses of allocations, by handle
        try:
            for part in memory.parts:
                self._open(part)
        except (RuntimeError, ValueError):
            self.close()
            raise

    def _open(self, part: MemoryPart) -> None:
        """Map the allocation of a part. Raise DriverError if the part is not within it."""
        if len(part.handle) != HANDLE_BYTES:
            raise DriverError(f"a handle has {len(part.handle)} bytes")
        if part.handle not in self._first:
            self._first[part.handle] = self._driver.open(part.handle)
        first, size = self._driver.allocation(self._first[part.handle])
        if self._first[part.handle] + part.start + part.num_bytes > first + size:
            raise DriverError(f"its cache ends after its allocation of {size} bytes")

    def copy(self, pages: Sequence[tuple[int, int]], ready: Any) -> float:  # noqa: ANN401
        """Copy (page of P, page of D) after `ready`, and wait for the end. Return the seconds."""
        begin, end = self._events()
        if ready is not None:
            self._stream.wait_event(ready)
        begin.record(self._stream)
        try:
            for source, target, count in runs(pages):
                self._copy_pages(source, target, count)
        except DriverError as error:
            raise PeerError("memory", f"a copy failed: {error}") from None
        finally:  # also after an error, since earlier copies write to the pages
            end.record(self._stream)
            end.synchronize()
        return float(1e-3 * begin.elapsed_time(end))

    def _copy_pages(self, source: int, target: int, count: int) -> None:
        """Enqueue the copies of consecutive pages to consecutive pages."""
        for part, (own, own_rows) in zip(self._parts, self._own, strict=True):
            size = part.page_bytes
            copy = Copy2D(
                src_type=UNIFIED,
                src=self._first[part.handle] + part.start + source * size,
                src_pitch=part.rows * size,
                dst_type=UNIFIED,
                dst=own + target * size,
                dst_pitch=own_rows * size,
                width=count * size,
                height=part.layers,
            )
            if self._by_rows or max(copy.src_pitch, copy.dst_pitch) > MAX_PITCH:
                self._copy_rows(copy)
                continue
            try:
                self._driver.copy(copy, self._stream.cuda_stream)
            except DriverError:  # CUDA may refuse pitches that it has not chosen
                self._by_rows = True
                self._copy_rows(copy)

    def _copy_rows(self, copy: Copy2D) -> None:
        """Enqueue each row as a copy of its own."""
        height, copy.height = copy.height, 1
        src_pitch, copy.src_pitch = copy.src_pitch, copy.width
        dst_pitch, copy.dst_pitch = copy.dst_pitch, copy.width
        for _ in range(height):
            self._driver.copy(copy, self._stream.cuda_stream)
            copy.src += src_pitch
            copy.dst += dst_pitch

    def link_rate(self) -> float:
        """Measure and return the bytes per second of one large copy; 0.0 if that failed."""
        part = max(self._parts, key=lambda p: p.num_bytes)
        width = min(PROBE_BYTES, part.num_bytes)
        try:
            scratch = torch.empty(width, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return 0.0
        copy = Copy2D(
            src_type=UNIFIED,
            src=self._first[part.handle] + part.start,
            src_pitch=width,
            dst_type=UNIFIED,
            dst=scratch.data_ptr(),
            dst_pitch=width,
            width=width,
            height=1,
        )
        seconds = []
        for _ in range(PROBES):
            begin, end = self._events()
            begin.record(self._stream)
            self._driver.copy(copy, self._stream.cuda_stream)
            end.record(self._stream)
            end.synchronize()
            seconds.append(1e-3 * begin.elapsed_time(end))
        return float(width / min(seconds))

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        return begin, end

    def close(self) -> None:
        """Unmap the memory, which frees that of a dead P."""
        self._stream.synchronize()
        for first in self._first.values():
            self._driver.close(first)
        self._first.clear()


def runs(pages: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (first page of P, first page of D, number) of the runs that are consecutive on both.

    No page of D may be in two pairs, so the order of the pairs does not matter.
    """
    merged: list[tuple[int, int, int]] = []
    for source, target in sorted(pages):
        if merged and (source, target) == (
            merged[-1][0] + merged[-1][2],
            merged[-1][1] + merged[-1][2],
        ):
            merged[-1] = merged[-1][0], merged[-1][1], merged[-1][2] + 1
        else:
            merged.append((source, target, 1))
    return merged
