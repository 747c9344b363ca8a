"""The residual stream between two products, as a value with named states.

A product that ends a block may add its result to the stream, or leave that to the norm that comes
next, which reads both anyway. What layers pass on says which of the two it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from nanovllm_kernels.all_reduce import Peers, all_reduce_add, all_reduce_add_norm
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slices:
    """A product as products of slices of its inputs: their sum, in float32, is the product."""

    parts_ITN: Tensor


Product: TypeAlias = Tensor | Slices


@dataclass(frozen=True, slots=True)
class Added:
    """The stream holds everything that came before."""

    stream_TD: Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """The newest product is still to be added to the stream, by the norm that comes next."""

    stream_TD: Tensor
    update: Product


@dataclass(frozen=True, slots=True)
class Parted:
    """Each rank has a part of the newest product: their sum is still to be added to the stream.

    One kernel sums the parts up, adds them and may normalise as well: who comes next decides.
    """

    stream_TD: Tensor
    part_TD: Tensor
    peers: Peers

    def added(self) -> Added:
        """Overwrites the stream."""
        return Added(all_reduce_add(self.part_TD, self.stream_TD, self.peers))

    def normed(self, weight_D: Tensor, eps: float) -> tuple[Tensor, Added]:
        """The normalised stream, and the stream. Overwrites both tensors."""
        tensors = self.part_TD, self.stream_TD, weight_D
        y_TD, stream_TD = all_reduce_add_norm(*tensors, eps, self.peers)
        return y_TD, Added(stream_TD)


Residual: TypeAlias = Added | Pending | Parted


def as_tensor(product: Product) -> Tensor:
    """What kernels take: y_TN, or the slices y_ITN, which they sum up themselves."""
    return product.parts_ITN if isinstance(product, Slices) else product
