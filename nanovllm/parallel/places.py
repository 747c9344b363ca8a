"""Which engines and ranks a recipe has, and what each rank is given to find the others. Imports
no torch.

Rank 0 is the engine process: it plans. To each other rank leads a pipe of whole messages, of bytes,
in which it hears of every step. A rank that has nothing to do sleeps in a read of its pipe.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

from nanovllm.config import Config


class RankLostError(RuntimeError):
    """Another rank of the engine has gone, so this one cannot go on."""


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    size: int  # how many ranks its engine has
    rendezvous: str  # a path, of a file that the ranks make when they meet
    pipes: tuple[Pipe, ...]  # rank 0: where the others listen, in their order; else the one to read

    device: int = 0  # its index among those of its kind
    engine: int | None = None  # its number, where there are several

    @property
    def name(self) -> str:
        """The name of its process."""
        kind = f"nanovllm-rank{self.rank}" if self.rank else "nanovllm-engine"
        return kind if self.engine is None else f"{kind}.{self.engine}"

    def send(self, message: bytes) -> None:
        """To all other ranks. Raises RankLostError if one has gone."""
        try:
            for pipe in self.pipes:
                pipe.send_bytes(message)
        except OSError as error:
            raise RankLostError(f"a rank does not listen any more: {error}") from None

    def recv(self) -> bytes | None:
        """The next message of rank 0, blocking; None when that has gone."""
        try:
            return self.pipes[0].recv_bytes()
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()


def places_of(config: Config, folder: str, engine: int = 0) -> list[Place]:
    """The places of an engine's ranks, which may leave files in `folder`.

    `engine: paper` has one rank.
    """
    size = config.recipe.parallel.tp if config.recipe.engine == "model" else 1
    pairs = [multiprocessing.Pipe(duplex=False) for _ in range(size - 1)]
    pipes = [tuple(sends for _, sends in pairs), *((reads,) for reads, _ in pairs)]
    rendezvous = os.path.join(folder, f"ranks{engine}")
    number = engine if config.recipe.parallel.dp > 1 else None
    return [
        Place(rank, size, rendezvous, mine, device=engine * size + rank, engine=number)
        for rank, mine in enumerate(pipes)
    ]
