"""Weights in block fp8: loaded with their scales, or quantised from other floats while loading.

Blocks are 128 x 128 elements of a checkpoint's whole tensor, so no value depends on the number of
ranks. A rank whose slice starts within a block also has the scale of that block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from nanovllm_kernels.fp8_reference import BLOCK, quantise_weight
from torch import Tensor

from nanovllm.models.decoder import Rule
from nanovllm.models.destination import FLOATS, Destination
from nanovllm.models.scattered import Scattered

SUFFIX = "_scale_inv"  # despite this name, a weight is its fp8 number times its scale


@dataclass(frozen=True)
class Scales(Destination):
    """Destination of a tensor of scales. `start` and `count` refer to the parameter's rows."""

    repeat: int  # rows of the parameter per row of the tensor

    @property
    def rows(self) -> range:
        rows = super().rows
        if self.dim:
            return rows
        return range(rows.start // self.repeat, -(-rows.stop // self.repeat))

    def take(self, rows: Tensor, first: int) -> None:
        super().take(rows.repeat_interleave(self.repeat, 0), first * self.repeat)


@dataclass(frozen=True)
class QuantisedOnLoad(Destination):
    """Destination of a tensor of other floats, quantised to fp8 numbers and scales."""

    numbers: Destination
    scales: Destination
    granule: ClassVar[int] = BLOCK
    dtypes: ClassVar[tuple[str, ...]] = FLOATS

    @property
    def rows(self) -> range:
        """Return the rows of whole blocks, since a scale depends on all rows of its block."""
        rows = self.numbers.rows
        start, stop = rows.start // BLOCK * BLOCK, -(-rows.stop // BLOCK) * BLOCK
        return range(start, min(stop, self.shape[0]))

    def take(self, rows: Tensor, first: int) -> None:
        numbers, scales = quantise_weight(rows)
        self.numbers.take(numbers, first)
        self.scales.take(scales, first // BLOCK)


def scale_rules(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yield for the rule of each weight that of its scales, which fills `weight_scale`."""
    for source, target, *part in rules:
        yield source + SUFFIX, target + "_scale", "".join(part)


def in_blocks(destinations: dict[str, Destination], *, made: bool) -> dict[str, Destination]:
    """Return `destinations` with scales as files have them: one row per 128 rows of the weight.

    With `made`, files have no scales, and their weights are quantised while loading.
    """
    blocks = dict(destinations)
    for name in [name for name in destinations if name.endswith(SUFFIX)]:
        weight, scales = destinations[name.removesuffix(SUFFIX)], destinations[name]
        places = scales_of(weight.shape, scales)
        if made:
            blocks.pop(name)
            blocks[name.removesuffix(SUFFIX)] = QuantisedOnLoad(*parts_of(weight), weight, places)
        else:
            blocks[name] = places
    return blocks


def scales_of(shape: tuple[int, ...], scales: Destination) -> Destination:
    """Return the destination of scales as files have them. `shape` is that of the whole weight.

    In the parameter a row of scales applies to a power of two of the weight's rows, derived from
    the number of its rows.
    """
    if isinstance(scales, Scattered):
        return scales.each(lambda span: scales_of(shape, span))
    each = BLOCK
    while -(-shape[0] // each) < scales.shape[0]:
        each //= 2
    blocks = tuple(-(-size // BLOCK) for size in shape)
    return Scales(scales.into, blocks, *parts_of(scales)[2:], BLOCK // each)


def parts_of(to: Destination) -> tuple[Tensor, tuple[int, ...], int, int, int]:
    return to.into, to.shape, to.dim, to.start, to.count
