"""A Mesh whose ranks are processes (or threads) of one machine that compute on its CPU.

Decision: a backend of its own instead of torch.distributed's default group, so that there is no
global rank and a test's ranks may be threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed

from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.places import RankLostError


@dataclass(frozen=True)
class GlooMesh(Mesh):
    """Every rank gets the same bits from every operation, so all go on alike."""

    rendezvous: str = ""  # a path that no file has yet

    @cached_property
    def backend(self) -> Any:  # noqa: ANN401
        """A ProcessGroupGloo: torch's stubs know neither its options nor its operations."""
        gloo: Any = distributed.ProcessGroupGloo
        store = distributed.FileStore(self.rendezvous, self.tp_size)  # type: ignore[attr-defined]
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        with told():
            return gloo(store, self.tp_rank, self.tp_size, options)

    def connect(self) -> None:
        _ = self.backend

    def all_reduce(self, x: Tensor) -> Tensor:
        with told():
            self.backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        shares = [torch.empty_like(x) for _ in range(self.tp_size)]
        with told():
            self.backend.allgather([shares], [x]).wait()
        return torch.cat(shares, dim=-1)

    def least(self, count: int) -> int:
        options: Any = distributed.AllreduceOptions()
        options.reduceOp, found = distributed.ReduceOp.MIN, torch.tensor([count])
        with told():
            self.backend.allreduce([found], options).wait()
        return int(found[0])


@contextmanager
def told() -> Iterator[None]:
    """What gloo says when a connection breaks becomes RankLostError."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(str(error)) from None
