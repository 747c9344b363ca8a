"""Values by slot, on the host and on the device, sent in one copy per step.

Independent of features. There are two kinds: numbers (Columns) and lists of tokens (TokenLists).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.plan import Admit, Int32
from nanovllm.sampling.shards import Shard

Fields = tuple[tuple[str, str], ...]  # name and numpy type of each column

# Numbers of pinned blocks of each size, up to a number of bytes. A step uploads up to eight small
# arrays, and three steps may be in flight. The largest block takes the tokens, the pages and their
# places of admissions with 500,000 tokens.
PINNED = ((1 << 16, 32), (1 << 22, 4))
TYPES = {"f4": torch.float32, "i4": torch.int32, "i8": torch.int64}  # types on the device


def upload(array: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    """Copy to the device without waiting. The allocator keeps the pinned copy until it is sent."""
    host = torch.from_numpy(array)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def reserve_pinned(allocate: Callable[[int], object] | None = None) -> int:
    """Allocate pinned memory for later uploads and results, and return its bytes.

    `allocate` replaces torch's allocator, which keeps freed blocks by size, a power of two.

    Decision: work of two streams may not overlap if pinned memory is allocated between the calls
    that start it (CUDA's implicit synchronisation). A step that lacks a block while pages move
    could wait for the copies in flight, which take up to 12 ms in each direction.
    """
    if allocate is None:
        allocate = partial(torch.empty, dtype=torch.uint8, pin_memory=True)
    num_bytes, total, blocks = 1, 0, list[object]()  # none is freed before all are allocated
    for most, count in PINNED:
        while num_bytes <= most:
            blocks += [allocate(num_bytes) for _ in range(count)]
            total += count * num_bytes
            num_bytes *= 2
    return total


def indices(wanted: npt.NDArray[np.bool_], device: torch.device) -> Tensor:
    """Return the indices of True values: int64, on the device. Does not wait."""
    return upload(np.flatnonzero(wanted).astype(np.int32), device).long()


class Columns:
    """Structured array with one record per slot, which is sent as a whole. The last is padding.

    The device tensors never move, so a CUDA graph may read them. Records start as zeros; that of
    the padding slot stays zero.
    """

    def __init__(self, fields: Fields, num_slots: int, device: torch.device) -> None:
        record = np.dtype([("slot", "i8"), *fields], align=True)
        self.host = np.zeros(num_slots, record)
        self.host["slot"] = np.arange(num_slots)
        self._words_NX = torch.zeros(
            num_slots, record.itemsize // 4, dtype=torch.int32, device=device
        )

    def on_device(self, name: str) -> Tensor:
        """Return a column of all slots as a strided view."""
        return self._view(self._words_NX, name)

    def send(self, slots: Int32) -> None:
        """Copy the records of these slots to the device."""
        records = self.host[slots].view(np.int32).reshape(len(slots), -1)
        sent_RX = upload(records, self._words_NX.device)
        self._words_NX.index_copy_(0, self._view(sent_RX, "slot"), sent_RX)

    def _view(self, words_NX: Tensor, name: str) -> Tensor:
        assert self.host.dtype.fields is not None
        kind, offset = self.host.dtype.fields[name][:2]
        first = offset // 4
        words = words_NX[:, first : first + kind.itemsize // 4]
        return words.view(TYPES[kind.str[1:]])[:, 0]


class TokenLists:
    """A list of tokens per slot, with a number for each. K is the longest list so far.

    `num_slots` includes the padding slot.

    Unused entries are token 0 with the number 0, which has no effect in a sum.
    """

    def __init__(self, num_slots: int, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self.lengths = np.zeros(num_slots, np.int32)  # on the host
        self.tokens_NK = torch.zeros(num_slots, 0, dtype=torch.int32, device=device)
        self.values_NK = torch.zeros(num_slots, 0, dtype=torch.float32, device=device)

    def put(self, admits: Sequence[Admit], lists: Sequence[dict[int, float]]) -> None:
        """Replace the lists of slots. Tokens outside the vocabulary are dropped."""
        slots, size = np.array([admit.slot for admit in admits], np.int32), self.shard.span.full
        # Most lists are empty.
        kept = [entry and {t: v for t, v in entry.items() if 0 <= t < size} for entry in lists]
        lengths = np.array([len(entry) for entry in kept], np.int32)
        changed = np.flatnonzero((lengths > 0) | (self.lengths[slots] > 0))
        self.lengths[slots] = lengths
        if not len(changed):
            return
        self._widen(int(lengths.max()))
        width = self.tokens_NK.shape[1]
        records = np.zeros((len(changed), 1 + 2 * width), np.int32)
        records[:, 0] = slots[changed]
        values: npt.NDArray[np.float32] = records[:, 1 + width :].view(np.float32)
        for nth, at in enumerate(changed):
            records[nth, 1 : 1 + lengths[at]] = list(kept[at])
            values[nth, : lengths[at]] = list(kept[at].values())
        sent_RX = upload(records, self.tokens_NK.device)
        slots_R = sent_RX[:, 0].long()
        self.tokens_NK.index_copy_(0, slots_R, sent_RX[:, 1 : 1 + width])
        self.values_NK.index_copy_(0, slots_R, sent_RX[:, 1 + width :].view(torch.float32))

    def of(self, slots_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return columns of the shard and numbers, both [S, K]; 0 for tokens of other ranks."""
        return self.shard.own(self.tokens_NK[slots_S].long(), self.values_NK[slots_S])

    def _widen(self, width: int) -> None:
        missing = width - self.tokens_NK.shape[1]
        if missing > 0:
            self.tokens_NK = torch.nn.functional.pad(self.tokens_NK, (0, missing))
            self.values_NK = torch.nn.functional.pad(self.values_NK, (0, missing))
