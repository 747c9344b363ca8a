"""A Mesh whose ranks are processes (or threads) of one machine that compute on its CPU.

Decision: a backend of its own instead of torch.distributed's default group, so that there is no
global rank and a test's ranks may be threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.places import RankLostError


@dataclass(frozen=True, slots=True)
class GlooMesh(Mesh):
    """Every rank gets the same bits from every operation, so all go on alike."""

    rendezvous: str = ""  # a path that no file has yet
    # A ProcessGroupGloo, once connected: torch's stubs know neither its options nor its operations.
    backend: list[Any] = field(default_factory=list)

    def connect(self) -> None:
        if self.backend:
            return
        gloo: Any = distributed.ProcessGroupGloo
        store = distributed.FileStore(self.rendezvous, self.size)  # type: ignore[attr-defined]
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        with told():
            self.backend.append(gloo(store, self.rank, self.size, options))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.tp_size > 1:
            with told():
                self.backend[0].allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        shares = [torch.empty_like(x) for _ in range(self.size)]
        with told():
            self.backend[0].allgather([shares], [x]).wait()
        return torch.stack(shares)

    def own_sum(self, parts_ITD: Tensor) -> Tensor:
        found_ITD = torch.empty_like(parts_ITD)
        with told():
            self.backend[0].alltoall_base(found_ITD, parts_ITD.contiguous(), [], []).wait()
        return found_ITD.sum(0)

    def least(self, count: int) -> int:
        options: Any = distributed.AllreduceOptions()
        options.reduceOp, found = distributed.ReduceOp.MIN, torch.tensor([count])
        with told():
            self.backend[0].allreduce([found], options).wait()
        return int(found[0])


@contextmanager
def told() -> Iterator[None]:
    """What gloo says when a connection breaks becomes RankLostError."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(str(error)) from None
