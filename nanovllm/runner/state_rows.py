"""Layout of a recurrent state in bytes, and the parts of it that other numbers of ranks have.

The state of a rank is a row: the recurrences of all layers, then the inputs of their convolutions.
The inputs of a layer are those of its queries, of its keys and of its values. Each of these blocks
is in the order of heads, and ranks have equal parts of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from nanovllm.config import ConfigError
from nanovllm.kv.layout import StateGroup

WORD, ALIGNED = 4, 128  # bytes: alignment of the inputs in a row, and of rows


class RowPart(NamedTuple):
    """Bytes of a rank's row that are also in the row of another number of ranks."""

    rank: int  # with these bytes
    there: int  # offset in its row
    here: int  # offset in the other row
    num_bytes: int

    def within(self, begin: int, end: int) -> RowPart | None:
        """Return the bytes from `begin` to `end` of the other row; None if there are none."""
        start, stop = max(self.here, begin), min(self.here + self.num_bytes, end)
        if start >= stop:
            return None
        return RowPart(self.rank, self.there + start - self.here, start, stop - start)


class StateRow(NamedTuple):
    """Layout of one rank's row. An element of the convolution's inputs has `input_bytes`."""

    group: StateGroup
    input_bytes: int

    @property
    def inputs_at(self) -> int:
        """Offset of the inputs in the row, in bytes."""
        return -(-len(self.group.layers) * self._recurrence_bytes // WORD) * WORD

    @property
    def num_bytes(self) -> int:
        inputs = len(self.group.layers) * self.group.channels * self.group.taps * self.input_bytes
        return -(-(self.inputs_at + inputs) // ALIGNED) * ALIGNED

    @property
    def key_heads(self) -> int:
        group = self.group
        return (group.channels - group.heads * group.value_size) // (2 * group.key_size)

    def cut(self, ranks: int) -> StateRow:
        """Return the layout on each of `ranks` ranks, where this one is that of all heads.

        Raise ConfigError if the ranks cannot share them.
        """
        group = self.group
        if self.key_heads % ranks:
            raise ConfigError(f"{ranks} ranks cannot share {self.key_heads} key heads of a state")
        cut = replace(group, channels=group.channels // ranks, heads=group.heads // ranks)
        return StateRow(cut, self.input_bytes)

    def blocks(self) -> list[tuple[int, int]]:
        """Return the offset and bytes of each block. All ranks have the same number of blocks."""
        group, each = self.group, self._recurrence_bytes
        blocks = [(nth * each, each) for nth in range(len(group.layers))]
        keys = self.key_heads * group.key_size
        at = self.inputs_at
        for _ in group.layers:
            for channels in (keys, keys, group.heads * group.value_size):
                size = channels * group.taps * self.input_bytes
                blocks.append((at, size))
                at += size
        return blocks

    def parts(self, share: int, shares: int, ranks: int) -> Iterator[RowPart]:
        """Yield the parts of `ranks` ranks' rows that make up the row of rank `share` of `shares`.

        This layout is that of all heads. Raise ConfigError if the ranks cannot share them.
        """
        here_blocks, there_blocks = self.cut(shares).blocks(), self.cut(ranks).blocks()
        for (here, size), (there, each) in zip(here_blocks, there_blocks, strict=True):
            first, end = share * size, (share + 1) * size  # in the block of all heads
            at = first
            while at < end:
                rank, skipped = divmod(at, each)
                count = min(end - at, each - skipped)
                yield RowPart(rank, there + skipped, here + at - first, count)
                at += count

    @property
    def _recurrence_bytes(self) -> int:
        """Bytes of one layer's recurrence."""
        group = self.group
        return group.heads * group.key_size * group.value_size * group.recurrent_bytes
