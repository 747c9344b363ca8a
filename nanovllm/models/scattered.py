"""Destinations of checkpoint tensors whose rows are reordered, or that are stored minus one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from nanovllm.models.destination import Destination


@dataclass(frozen=True)
class Scattered(Destination):
    """Several spans of a tensor, which are adjacent in `into`."""

    members: tuple[Destination, ...]

    @property
    def rows(self) -> range:
        each = [member.rows for member in self.members]
        return range(min(rows.start for rows in each), max(rows.stop for rows in each))

    def take(self, rows: Tensor, first: int) -> None:
        for member in self.members:
            if member.rows.start < first + len(rows) and first < member.rows.stop:
                member.take(rows, first)

    def each(self, change: Callable[[Destination], Destination]) -> Scattered:
        """Return a copy with each member changed. Their shapes may change."""
        members = tuple(map(change, self.members))
        return replace(self, shape=members[0].shape, members=members)


@dataclass(frozen=True)
class PlusOne(Destination):
    """Destination of a norm weight that the checkpoint stores as weight - 1."""

    def take(self, rows: Tensor, first: int) -> None:
        super().take(rows.float() + 1, first)


def plus_one(destinations: dict[str, Destination], names: str) -> dict[str, Destination]:
    """Return `destinations` with one added to the tensors whose names match the pattern."""
    return destinations | {
        name: PlusOne(into=to.into, shape=to.shape, dim=to.dim, start=to.start, count=to.count)
        for name, to in destinations.items()
        if re.fullmatch(names, name)
    }


def joined(first: Destination, second: Destination) -> Scattered:
    """Return one destination for two spans of a tensor's rows. They must be adjacent in `into`."""
    assert first.dim == 0
    members = (*getattr(first, "members", (first,)), second)
    count = first.count + second.count
    size = [*first.into.shape]
    size[first.dim] = count
    return Scattered(
        into=first.into.as_strided(size, first.into.stride()),
        shape=first.shape,
        dim=first.dim,
        start=min(first.start, second.start),
        count=count,
        members=members,
    )
