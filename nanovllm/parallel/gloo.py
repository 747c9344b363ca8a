"""Mesh of processes or threads of one machine that compute on its CPU.

Decision: it has its own gloo backend instead of torch.distributed's default group, so that there is
no global rank and the ranks of a test can be threads.

Decision: gathers and sums have a limit of time. Without it, a rank that takes part in fewer of them
would stop all ranks without an error. `connect` and `least` have gloo's limit of half an hour,
because ranks load and compile before them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
from torch import Tensor, distributed

from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.places import RankLostError

log = logging.getLogger("engine")
EXCHANGE_S = 120.0  # longest time of a gather or a sum, which waits for the slowest rank


@dataclass(frozen=True, slots=True)
class GlooMesh(Mesh):
    """Collectives through gloo. All ranks get the same bits, so they decide alike.

    Decision: sums over ranks are in the order of ranks. In gloo's own sum, the order of a number's
    terms depends on its place in the tensor, and so on the other requests of a step.
    """

    rendezvous: str = ""  # path of a file that does not exist yet
    # A ProcessGroupGloo once connected. Torch's stubs lack its options and operations.
    backend: list[Any] = field(default_factory=list)

    def connect(self) -> None:
        if self.backend:
            return
        gloo: Any = distributed.ProcessGroupGloo
        store = distributed.FileStore(self.rendezvous, self.size)  # type: ignore[attr-defined]
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        with connection_errors():
            self.backend.append(gloo(store, self.rank, self.size, options))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.tp_size == 1:
            return x
        return x.copy_(reduce(torch.add, self.gather(x)))

    def gather(self, x: Tensor) -> Tensor:
        shares = [torch.empty_like(x) for _ in range(self.size)]
        with self._limited() as limit:
            self.backend[0].allgather(shares, x, timeout=limit).wait()
        return torch.stack(shares)

    def own_sum(self, parts_ITD: Tensor) -> Tensor:
        found_ITD = torch.empty_like(parts_ITD)
        with self._limited() as limit:
            self.backend[0].alltoall_base(
                output=found_ITD,
                input=parts_ITD.contiguous(),
                output_split_sizes=[],
                input_split_sizes=[],
                timeout=limit,
            ).wait()
        total_TD: Tensor = reduce(torch.add, found_ITD)
        return total_TD

    def least(self, count: int) -> int:
        options: Any = distributed.AllreduceOptions()
        options.reduceOp, least = distributed.ReduceOp.MIN, torch.tensor([count])
        with connection_errors():
            self.backend[0].allreduce([least], options).wait()
        return int(least[0])

    @contextmanager
    def _limited(self) -> Iterator[timedelta]:
        """Yield the limit of an exchange. Log an error, and raise RankLostError, if it passes."""
        limit, begun = timedelta(seconds=EXCHANGE_S), time.monotonic()
        try:
            with connection_errors():
                yield limit
        except RankLostError:
            if time.monotonic() - begun >= EXCHANGE_S:
                text = "rank %d has waited %g s for another rank, which hangs or computes less"
                log.error(text, self.rank, EXCHANGE_S)
            raise


@contextmanager
def connection_errors() -> Iterator[None]:
    """Turn gloo's error for a broken connection into RankLostError."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(str(error)) from None
