"""Which engines and ranks a recipe has, and what each rank is given to find the others. Imports
no torch.

Rank 0 is the engine process: it plans. The other ranks hear of every step through a ring, and sleep
while there is nothing in it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from nanovllm.config import Config, Parallel
from nanovllm.parallel.ring import RingReader, RingWriter, ring


class RankLostError(RuntimeError):
    """Another rank of the engine has gone, so this one cannot go on."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among the ranks of its engine, and how they talk."""

    rank: int
    size: int  # how many ranks its engine has
    device: int  # the index of its GPU
    rendezvous: str  # a path, of a file that the ranks make when they meet
    ring: RingWriter | RingReader | None  # rank 0 writes, others read; None: a rank alone
    engine: int | None = None  # its number, where there are several
    # Of lanes: a ring of each other rank, which that writes and rank 0 reads.
    back: RingWriter | list[RingReader] | None = None

    @property
    def lanes(self) -> int:
        return 1 if self.back is None else self.size

    @property
    def name(self) -> str:
        """The name of its process."""
        kind = f"nanovllm-rank{self.rank}" if self.rank else "nanovllm-engine"
        return kind if self.engine is None else f"{kind}.{self.engine}"

    def send(self, message: bytes) -> None:
        """Rank 0's, to all others. Raises RankLostError if one has gone, or hangs."""
        assert isinstance(self.ring, RingWriter)
        try:
            self.ring.send(message)
        except OSError as error:
            raise RankLostError(f"a rank does not listen any more: {error}") from None

    def recv(self) -> bytes | None:
        """The next message of rank 0, blocking; None when that has gone."""
        assert isinstance(self.ring, RingReader)
        return self.ring.recv()

    def reply(self, message: bytes) -> None:
        """Another rank's, to rank 0. Raises OSError if that has gone."""
        assert isinstance(self.back, RingWriter)
        self.back.send(message)

    def recv_all(self) -> list[bytes]:
        """Rank 0's: the next reply of each other rank, blocking. Raises RankLostError."""
        assert isinstance(self.back, list)
        found = [message for end in self.back if (message := end.recv()) is not None]
        if len(found) < len(self.back):
            raise RankLostError("a rank does not reply any more")
        return found

    def close(self) -> None:
        ends = self.back if isinstance(self.back, list) else [self.back]
        for end in filter(None, (self.ring, *ends)):
            end.close()


def num_ranks(parallel: Parallel) -> int:
    """How many ranks each engine has."""
    return max(parallel.tp, parallel.ep)


def places_of(config: Config, folder: str, engine: int = 0) -> list[Place]:
    """The places of an engine's ranks, which may leave files in `folder`.

    `engine: paper` has one rank.
    """
    size = num_ranks(config.recipe.parallel) if config.recipe.engine == "model" else 1
    rendezvous = os.path.join(folder, "ranks")
    number = engine if config.recipe.parallel.dp > 1 else None
    ends: list[RingWriter | RingReader | None] = [None]
    backs: list[RingWriter | list[RingReader] | None] = [None] * size
    if size > 1:
        writer, readers = ring(size - 1)
        ends = [writer, *readers]
    if config.recipe.parallel.tp == 1 and size > 1:
        rings = [ring(1) for _ in readers]
        backs = [[end for _, (end,) in rings], *[back for back, _ in rings]]
    return [
        Place(rank, size, engine * size + rank, rendezvous, end, number, back)
        for rank, (end, back) in enumerate(zip(ends, backs, strict=True))
    ]
