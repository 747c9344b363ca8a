"""The residual stream between two products, as a value with named states.

A product that ends a block may add its result to the stream, or leave that to the norm that comes
next, which reads both anyway. What layers pass on says which of the two it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

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


Residual: TypeAlias = Added | Pending


def as_tensor(product: Product) -> Tensor:
    """What kernels take: y_TN, or the slices y_ITN, which they sum up themselves."""
    return product.parts_ITN if isinstance(product, Slices) else product
