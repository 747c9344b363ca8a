"""Weights in block fp8: as a checkpoint has them, with their scales, or made from other floats.

Blocks are 128 x 128 of a checkpoint's whole tensor, so no number depends on how ranks cut it. A
rank whose share starts within a block has the scale of that block, too.
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

SUFFIX = "_scale_inv"  # whatever it says: a weight is its fp8 number times its scale


@dataclass(frozen=True)
class Scales(Destination):
    """Where a tensor of scales goes: `start` and `count` are rows of the parameter's."""

    repeat: int  # rows of the parameter's that one row of the tensor stands for

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
    """Where a tensor of other floats goes: fp8 numbers, and scales that are made with them."""

    numbers: Destination
    scales: Destination
    granule: ClassVar[int] = BLOCK
    dtypes: ClassVar[tuple[str, ...]] = FLOATS

    @property
    def rows(self) -> range:
        """Whole blocks, whose other rows have their say in the scales."""
        rows = self.numbers.rows
        start, stop = rows.start // BLOCK * BLOCK, -(-rows.stop // BLOCK) * BLOCK
        return range(start, min(stop, self.shape[0]))

    def take(self, rows: Tensor, first: int) -> None:
        numbers, scales = quantise_weight(rows)
        self.numbers.take(numbers, first)
        self.scales.take(scales, first // BLOCK)


def scale_rules(rules: Iterable[Rule]) -> Iterator[Rule]:
    """By the rule of each weight, that of the scales beside it: of `weight`, `weight_scale`."""
    for source, target, *part in rules:
        yield source + SUFFIX, target + "_scale", "".join(part)


def in_blocks(wanted: dict[str, Destination], *, made: bool) -> dict[str, Destination]:
    """The same places, of scales as files have them: a row for each 128 rows of the weight.

    `made`: files have no scales. What they do have becomes fp8 as it comes.
    """
    found = dict(wanted)
    for name in [name for name in wanted if name.endswith(SUFFIX)]:
        weight, scales = wanted[name.removesuffix(SUFFIX)], wanted[name]
        places = scales_of(weight.shape, scales)
        if made:
            found.pop(name)
            found[name.removesuffix(SUFFIX)] = QuantisedOnLoad(*parts_of(weight), weight, places)
        else:
            found[name] = places
    return found


def scales_of(shape: tuple[int, ...], scales: Destination) -> Destination:
    """`shape`: of the whole weight. As many of its rows share a scale as the parameter's number of
    scales allows; that is a power of two."""
    if isinstance(scales, Scattered):
        return scales.each(lambda span: scales_of(shape, span))
    each = BLOCK
    while -(-shape[0] // each) < scales.shape[0]:
        each //= 2
    blocks = tuple(-(-size // BLOCK) for size in shape)
    return Scales(scales.into, blocks, *parts_of(scales)[2:], BLOCK // each)


def parts_of(to: Destination) -> tuple[Tensor, tuple[int, ...], int, int, int]:
    return to.into, to.shape, to.dim, to.start, to.count
