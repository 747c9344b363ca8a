"""A Mesh whose ranks are processes of one machine, each with a GPU of its own.

What a decode step sums up or gathers goes through kernels over peer memory. Larger messages go
through NCCL, from a size that is measured at start, because it depends on the machine's links.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from nanovllm_kernels import all_reduce as own
from nanovllm_kernels.all_reduce import Peers
from torch import Tensor, distributed

from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.peers import connect_peers

log = logging.getLogger("engine")
SIZES = [1 << power for power in range(16, 24)]  # bytes of the sums that are timed
AT_ONCE, ROUNDS = 10, 5  # sums in a graph, and replays of which the fastest counts


class Links(NamedTuple):
    """What connects this rank to the others."""

    nccl: Any  # a ProcessGroupNCCL; torch's stubs do not know what is asked of it here
    peers: Peers
    own_bytes: int  # of the largest sum for which our kernels are faster


@dataclass(frozen=True, slots=True)
class NcclMesh(Mesh):
    """Works on the current stream of the current device. Every rank gets the same bits.

    Nothing that NCCL does is waited for: it is asked to work on that stream (`asyncOp`) as well.
    """

    rendezvous: str = ""  # a path that no file has yet
    connected: list[Links] = field(default_factory=list)  # one, once it is

    def connect(self) -> None:
        """Raises ConfigError if GPUs do not reach each other's memory."""
        if self.connected:
            return
        c10d = torch_distributed()
        store = c10d.FileStore(self.rendezvous, self.tp_size)
        device = torch.device("cuda", torch.cuda.current_device())
        place = self.tp_rank, self.tp_size
        options = c10d.ProcessGroupNCCL.Options()
        nccl = c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), *place, options)
        peers = connect_peers(c10d.PrefixStore("peers", store), *place, device)
        self.connected.append(Links(nccl, peers, own_bytes=peers.capacity))
        own_bytes = self.least(crossover(peers, self._nccl_sum, device))
        self.connected[0] = Links(nccl, peers, own_bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        peers = self.peers_for(x)
        return self._nccl_sum(x) if peers is None else own.all_reduce(x, peers)

    def peers_for(self, x: Tensor) -> Peers | None:
        links = self.connected[0]
        return links.peers if x.nbytes <= links.own_bytes else None

    def gather(self, x: Tensor) -> Tensor:
        x, links = x.contiguous(), self.connected[0]
        if 2 * x.nbytes <= links.peers.capacity:
            return own.all_gather(x, links.peers)
        found = x.new_empty(self.tp_size, *x.shape)
        options = torch_distributed().AllgatherOptions()
        options.asyncOp = False
        links.nccl._allgather_base(found, x, options)
        return found

    def least(self, count: int) -> int:
        found = torch.tensor([count], device="cuda")
        self._nccl(found, distributed.ReduceOp.MIN)
        return int(found)

    def _nccl_sum(self, x: Tensor) -> Tensor:
        self._nccl(x, distributed.ReduceOp.SUM)
        return x

    def _nccl(self, x: Tensor, operation: Any) -> None:  # noqa: ANN401
        options = torch_distributed().AllreduceOptions()
        options.reduceOp, options.asyncOp = operation, False
        self.connected[0].nccl.allreduce([x], options)


def torch_distributed() -> Any:  # noqa: ANN401
    """The module, of which torch's stubs lack most of what is used here."""
    return distributed


def crossover(peers: Peers, nccl: Callable[[Tensor], object], device: torch.device) -> int:
    """Bytes of the largest timed sum up to which our kernels are at least as fast as NCCL."""
    found, lines = 0, []
    all_won = True
    for num_bytes in (size for size in SIZES if size <= peers.capacity):
        x_TD = torch.zeros(num_bytes >> 13, 4096, dtype=torch.bfloat16, device=device)
        ours = seconds_of(partial(own.all_reduce, x_TD, peers))
        theirs = seconds_of(partial(nccl, x_TD))
        all_won = all_won and ours <= theirs
        found = num_bytes if all_won else found
        lines.append(f"{num_bytes >> 10} KiB {ours * 1e6:.1f} and {theirs * 1e6:.1f}")
    log.info(
        "sums over ranks by our kernels up to %d KiB, beyond by NCCL; us by ours and NCCL: %s",
        found >> 10,
        ", ".join(lines),
    )
    return found


def seconds_of(run: Callable[[], object]) -> float:
    """The seconds of one run in a CUDA graph of some, the fastest of some replays."""
    run()  # compiles, connects
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(AT_ONCE):
            run()
    times: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / AT_ONCE)
    return min(times)
