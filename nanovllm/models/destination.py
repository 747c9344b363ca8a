"""Destination of a checkpoint tensor: the slice that this rank keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nanovllm_kernels.fp8_reference import FP8 as FP8
from torch import Tensor

FLOATS = ("BF16", "F16", "F32")  # dtypes of files, converted to the parameter's dtype


@dataclass(frozen=True, slots=True)
class Destination:
    """Slice of a tensor along `dim`: `count` indices from `start` on.

    `count` is 0 if the tensor belongs to another rank.
    """

    into: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    dim: int
    start: int
    count: int
    granule: ClassVar[int] = 1  # `take` gets rows that start at a multiple of it

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the dtypes that the tensor may have in the file."""
        return ("F8_E4M3",) if self.into.dtype == FP8 else FLOATS

    @property
    def rows(self) -> range:
        """Return the range of the tensor's rows that are needed."""
        if self.dim == 0:
            return range(self.start, self.start + self.count)
        return range(self.shape[0] if self.count else 0)

    def take(self, rows: Tensor, first: int) -> None:
        """Copy this slice of rows that start at row `first` of the tensor.

        The rows are whole, or contain only the slice's columns.
        """
        before, own = first, rows
        if self.dim == 0:
            before -= self.start
            own = rows[max(0, -before) : self.count - before]
        elif rows.shape[1] != self.count:
            own = rows.narrow(1, self.start, self.count)
        self.into[max(0, before) :][: len(own)].copy_(own)
