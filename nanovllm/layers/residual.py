"""The residual stream between two products, as one of three types.

A product at the end of a block adds its result to the stream, or leaves that to the next norm,
which reads both anyway. The type of the value that layers pass on shows which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from nanovllm_kernels.exchange.all_reduce import Peers, all_reduce_add, all_reduce_add_norm
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slices:
    """Partial products over slices of the inputs. Their sum, in float32, is the product."""

    parts_ITN: Tensor


Output: TypeAlias = Tensor | Slices  # of a product


@dataclass(frozen=True, slots=True)
class Added:
    """The stream includes all products so far."""

    stream_TD: Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """The latest product must still be added to the stream, by the next norm."""

    stream_TD: Tensor
    update: Output


@dataclass(frozen=True, slots=True)
class Parted:
    """Each rank has a partial product. Their sum must still be added to the stream.

    One kernel sums over ranks and adds; it can also apply the next norm.
    """

    stream_TD: Tensor
    part_TD: Tensor
    peers: Peers

    def added(self) -> Added:
        """Return the stream with the sum added. Overwrites the stream."""
        return Added(all_reduce_add(self.part_TD, self.stream_TD, self.peers))

    def normed(self, weight_D: Tensor, eps: float) -> tuple[Tensor, Added]:
        """Return the normalised stream, and the stream. Overwrites both tensors."""
        y_TD, stream_TD = all_reduce_add_norm(
            self.part_TD, self.stream_TD, weight_D, eps=eps, peers=self.peers
        )
        return y_TD, Added(stream_TD)


Residual: TypeAlias = Added | Pending | Parted


def as_tensor(product: Output) -> Tensor:
    """Return y_TN, or the partial products y_ITN, which kernels sum."""
    return product.parts_ITN if isinstance(product, Slices) else product
