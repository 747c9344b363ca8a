"""Engines and ranks of a recipe, with the handles that connect each rank to the others.

Rank 0 is the engine process; it plans. The other ranks receive every plan through a ring, and sleep
while it is empty. This module imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from nanovllm.config import Config, ConfigError, Parallel
from nanovllm.parallel.ring import RingReader, RingWriter, ring

# The fields of config.json with the number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class RankLostError(RuntimeError):
    """Another rank of the engine has ended, so this one cannot continue."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's rank in its engine, and its connections to the other ranks."""

    rank: int
    size: int  # number of ranks of the engine
    device: int  # index of its GPU
    rendezvous: str  # path of a file that the ranks create when they connect
    ring: RingWriter | RingReader | None  # rank 0 writes, others read; None with one rank
    engine: int | None = None  # number of the engine, if there are several
    # With lanes, a disk or pages of other servers: one ring for each other rank, written by that
    # rank and read by rank 0.
    back: RingWriter | list[RingReader] | None = None
    lanes: int = 1

    @property
    def name(self) -> str:
        """Name of the process."""
        kind = f"nanovllm-rank{self.rank}" if self.rank else "nanovllm-engine"
        return kind if self.engine is None else f"{kind}.{self.engine}"

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to all others. Raise RankLostError if one ended or hangs."""
        assert isinstance(self.ring, RingWriter)
        try:
            self.ring.send(message)
        except OSError as error:
            raise RankLostError(f"a rank no longer receives messages: {error}") from None

    def recv(self) -> bytes | None:
        """Block until rank 0's next message and return it; None if rank 0 has ended."""
        assert isinstance(self.ring, RingReader)
        return self.ring.recv()

    def reply(self, message: bytes) -> None:
        """Send a message to rank 0. Raise OSError if it has ended."""
        assert isinstance(self.back, RingWriter)
        self.back.send(message)

    def recv_all(self) -> list[bytes]:
        """Block until each other rank's next reply and return them. Raise RankLostError if one
        ended."""
        assert isinstance(self.back, list)
        messages = [message for end in self.back if (message := end.recv()) is not None]
        if len(messages) < len(self.back):
            raise RankLostError("a rank no longer replies")
        return messages

    def close(self) -> None:
        ends = self.back if isinstance(self.back, list) else [self.back]
        for end in filter(None, (self.ring, *ends)):
            end.close()


def num_ranks(parallel: Parallel) -> int:
    """Return the number of ranks of each engine."""
    return max(parallel.tp, parallel.ep)


def check_gpus(parallel: Parallel, num_visible: int) -> None:
    """Raise ConfigError if the ranks of all engines need more GPUs than are visible."""
    each = num_ranks(parallel)
    if (needed := each * parallel.dp) > num_visible:
        raise ConfigError(
            f"parallel needs {needed} GPUs, {each} for each of {parallel.dp} engines; "
            f"{num_visible} are visible. Lower parallel.tp, ep or dp, or use --device cpu"
        )


def places_of(config: Config, folder: str, engine: int = 0) -> list[Place]:
    """Return the places of an engine's ranks. The ranks may create files in `folder`.

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
    lanes = size if config.recipe.parallel.tp == 1 else 1
    transfer = config.recipe.transfer
    has_reads = config.recipe.cache.disk is not None or (transfer and transfer.role == "decode")
    if size > 1 and (lanes > 1 or has_reads):
        rings = [ring(1) for _ in readers]
        backs = [[end for _, (end,) in rings], *[back for back, _ in rings]]
    return [
        Place(
            rank=rank,
            size=size,
            device=engine * size + rank,
            rendezvous=rendezvous,
            ring=end,
            engine=number,
            back=back,
            lanes=lanes,
        )
        for rank, (end, back) in enumerate(zip(ends, backs, strict=True))
    ]
