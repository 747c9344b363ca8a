"""Uploads of columns."""

from __future__ import annotations

import weakref
from collections import Counter

from nanovllm.sampling.columns import reserve_pinned


class Block:
    """Pinned memory of a size."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def test_pinned_memory_of_every_size_is_reserved_at_once() -> None:
    """A block that was freed before the next allocation would be the next one, too."""
    blocks = weakref.WeakSet[Block]()

    def allocate(num_bytes: int) -> Block:
        block = Block(num_bytes)
        blocks.add(block)
        most.append(len(blocks))
        sizes[num_bytes] += 1
        return block

    most, sizes = list[int](), Counter[int]()
    assert reserve_pinned(allocate) == 37_224_416
    assert sizes == {2**n: 32 if n <= 16 else 4 for n in range(23)}
    assert max(most) == sizes.total() == 568 and not blocks
