"""Reading of safetensors files at the speed of the disk.

Threads read adjacent tensors in one call, in the order of the file, into a few staging buffers.
The buffers are copied to the device unchanged. A rank reads its own rows. It reads only its own
columns if the others are more than GAP bytes of a tensor.

Decision: columns are copied from a memory map of the file. A row is too short for a read call of
its own: half a row of 4,096 columns of 2 bytes is a page, a quarter of an expert's row in fp8 is
512 bytes. A map touches nearly the same pages as reading everything. Those pages are shared
by the ranks of a host, which together need all of them. A map saves the copies of other ranks'
columns to the staging buffer and to the device: 7 of 8 with 8 ranks. One thread processed a cached
file at the following GB/s. Columns are the bytes of a row and the number of ranks that share it.

| | 2,048, 2 | 2,048, 4 | 8,192, 2 | 8,192, 4 | 16,384, 8 |
|---|--:|--:|--:|--:|--:|
| everything is read | 12 | 20 | 20 | 20 | 20 |
| columns of a map | 16 | 31 | 21 | 33 | 57 |
| a read for each row | 2 | 2 | 5 | 6 | 12 |

From a cold disk the first two take the same time, the third takes ten times as long. Truncating a
mapped file ends the process (SIGBUS).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from nanovllm.config import NOT_JSON, ConfigError
from nanovllm.models.destination import Destination

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32,
          "F8_E4M3": torch.float8_e4m3fn}  # fmt: skip
MOST_THREADS = 8
MOST_HEADER = 100_000_000  # bytes; the format's own limit
STAGING = 16 << 20  # bytes of one read, unless one block of rows is larger
GAP = 64 << 10  # largest run of unneeded bytes that is read along


class Entry(Struct, frozen=True):
    """Entry of a tensor in a file's header. The entry __metadata__ is ignored."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)  # bytes from the end of the header


class Stored(NamedTuple):
    """A tensor in a file, or some rows of one."""

    path: Path
    begin: int  # bytes from the start of the file
    end: int
    dtype: str
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """Rows of a tensor, from row `first` on, and their destination.

    `stride` is 0 for whole rows. For a range of columns it is the bytes between row starts in the
    file. The size of `rows` is then that of the packed columns.
    """

    rows: Stored
    first: int
    to: Destination
    stride: int


def contents(tensor: Stored) -> Tensor:
    """Return the elements of a small tensor; none if its dtype is not supported."""
    size = tensor.end - tensor.begin if tensor.dtype in DTYPES else 0
    data = torch.from_numpy(np.fromfile(tensor.path, np.uint8, size, offset=tensor.begin))
    return data.view(DTYPES[tensor.dtype]) if size else data


def tensors_in(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors in a file's header. Raise ConfigError if the file contradicts it."""
    what = f"{path} is not a complete safetensors file"
    try:
        with path.open("rb") as file:
            start, size = 8 + int.from_bytes(file.read(8), "little"), path.stat().st_size
            if MOST_HEADER < start - 8 <= size:
                raise ConfigError(f"{what}: its header has more than {MOST_HEADER:,} bytes")
            header = file.read(start - 8) if start <= size else b""
        entries = msgspec.json.decode(header, type=dict[str, Entry])
    except (*NOT_JSON, OSError) as error:
        raise ConfigError(f"{what}: {error}") from None
    entries.pop("__metadata__", None)
    whole = start + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if whole != size:
        raise ConfigError(f"{what}: it has {size} bytes; its header requires {whole}")
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        dtype, shape = entry.dtype, entry.shape
        if begin < 0 or (dtype in DTYPES and end - begin != prod(shape) * DTYPES[dtype].itemsize):
            raise ConfigError(f"{what}: bytes {begin} to {end} are not {dtype} {list(shape)}")
        yield name, Stored(path, begin=start + begin, end=start + end, dtype=dtype, shape=shape)


def runs(tensors: Iterable[tuple[Stored, Destination]]) -> list[list[Piece]]:
    """Return the pieces to read, in file order, grouped into runs of one read each."""
    order: list[list[Piece]] = []
    pieces = (piece for tensor, to in tensors for piece in pieces_of(tensor, to))
    for piece in sorted(pieces, key=lambda piece: (str(piece.rows.path), piece.rows.begin)):
        if order and follows(order[-1], piece):
            order[-1].append(piece)
        else:
            order.append([piece])
    return order


def pieces_of(tensor: Stored, to: Destination) -> Iterator[Piece]:
    path, begin, end, dtype, (height, *others) = tensor
    width = (end - begin) // height  # bytes of a row in the file
    row_bytes = width  # bytes of a row that are read
    stride = 0
    if to.dim and to.count:
        column_bytes = width // others[0]
        own_bytes = column_bytes * to.count
        if height * (width - own_bytes) > GAP:
            begin += column_bytes * to.start
            row_bytes, others, stride = own_bytes, [to.count], width
    step = max(1, STAGING // (row_bytes * to.granule)) * to.granule
    for first in to.rows[::step]:
        num = min(step, to.rows.stop - first)
        at = begin + first * width
        rows = Stored(path, begin=at, end=at + num * row_bytes, dtype=dtype, shape=(num, *others))
        yield Piece(rows, first, to, stride)


def follows(run: list[Piece], piece: Piece) -> bool:
    start, before, rows = run[0].rows, run[-1].rows, piece.rows
    fits = rows.end - start.begin <= STAGING and rows.begin - before.end <= GAP
    is_aligned = (rows.begin - start.begin) % DTYPES[rows.dtype].itemsize == 0  # in the buffer
    return fits and is_aligned and rows.path == start.path and not run[0].stride + piece.stride


def num_bytes(run: list[Piece]) -> int:
    return run[-1].rows.end - run[0].rows.begin


def read(order: list[list[Piece]], device: torch.device) -> Iterator[int]:
    """Fill every destination on the device. Yield the bytes of each finished run.

    Raise ConfigError if a file can no longer be read.
    """
    num_threads = min(MOST_THREADS, os.cpu_count() or 1)
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if on_gpu else None
    size = max(map(num_bytes, order))
    buffers = SimpleQueue[Tensor]()
    for _ in range(num_threads):
        buffers.put(torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu))

    def fill(run: list[Piece]) -> int:
        buffer = buffers.get()
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():  # the allocating stream
                place(run, into(buffer, run).to(device))
        finally:
            buffers.put(buffer)
        return num_bytes(run)

    with ThreadPoolExecutor(num_threads) as pool:
        yield from pool.map(fill, order)


def into(buffer: Tensor, run: list[Piece]) -> Tensor:
    """Read a run into the buffer, and return the part of the buffer with its bytes."""
    (path, begin, *_, shape), stride = run[0].rows, run[0].stride
    size = count = num_bytes(run)
    target = buffer[:size].numpy()
    try:
        if stride:
            rows = target.reshape(shape[0], -1)
            mapped_bytes = stride * (shape[0] - 1) + rows.shape[1]
            mapped = np.memmap(path, np.uint8, mode="r", offset=begin, shape=mapped_bytes)
            np.copyto(rows, as_strided(mapped, rows.shape, (stride, 1)))
        else:
            with path.open("rb", buffering=0) as file:
                count = os.preadv(file.fileno(), [target.data], begin)
    except (OSError, ValueError) as error:  # ValueError: the file is shorter than the map
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    if count != size:
        raise ConfigError(f"{path} became shorter while it was read")
    return buffer[:count]


def place(run: list[Piece], there: Tensor) -> None:
    for rows, first, to, _ in run:
        raw = there[rows.begin - run[0].rows.begin : rows.end - run[0].rows.begin]
        to.take(raw.view(DTYPES[rows.dtype]).view(rows.shape), first)
