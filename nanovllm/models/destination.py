"""Where one tensor of a checkpoint goes: the slice of it that this rank keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nanovllm_kernels.fp8_reference import FP8 as FP8
from torch import Tensor

FLOATS = ("BF16", "F16", "F32")  # as files call them: rounded to the parameter's dtype


@dataclass(frozen=True, slots=True)
class Destination:
    """`count` lines of a tensor, from `start` on, along `dim`: 0 of them if another rank has it."""

    into: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    dim: int
    start: int
    count: int
    granule: ClassVar[int] = 1  # rows are taken from multiples of it on

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the tensor may be in the file."""
        return ("F8_E4M3",) if self.into.dtype == FP8 else FLOATS

    @property
    def rows(self) -> range:
        """Which rows of the tensor it needs."""
        if self.dim == 0:
            return range(self.start, self.start + self.count)
        return range(self.shape[0] if self.count else 0)

    def take(self, rows: Tensor, first: int) -> None:
        """Keeps what it wants of these rows of the tensor, which begin at row `first`: whole ones,
        or its columns alone.
        """
        before, own = first, rows
        if self.dim == 0:
            before -= self.start
            own = rows[max(0, -before) : self.count - before]
        elif rows.shape[1] != self.count:
            own = rows.narrow(1, self.start, self.count)
        self.into[max(0, before) :][: len(own)].copy_(own)
