"""Mesh of processes on one machine, each with its own GPU.

Sums and gathers of decode steps use our kernels over peer memory. Above a size that is measured at
start, sums use another kernel of ours, and everything else NCCL. NCCL also sums where GPUs lack
atomic operations on each other's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from nanovllm_kernels.exchange import all_reduce as own, tokens as exchange
from nanovllm_kernels.exchange.all_reduce import Peers
from torch import Tensor

from nanovllm.parallel.mesh import Mesh, padded
from nanovllm.parallel.peers import c10d, connect_peers, crossover

log = logging.getLogger("engine")


class Links(NamedTuple):
    """Connections of this rank to the others."""

    nccl: Any  # a ProcessGroupNCCL, whose methods torch's stubs lack
    peers: Peers | None  # None: NCCL alone
    own_bytes: int  # longest message for our kernels of short messages; -1: none


@dataclass(frozen=True, slots=True)
class NcclMesh(Mesh):
    """Collectives on the current stream of the current device. All ranks get the same bits.

    The host never waits for NCCL, which also runs on that stream (`asyncOp` False).
    """

    rendezvous: str = ""  # path of a file that does not exist yet
    connected: list[Links] = field(default_factory=list)  # one element once connected
    has_peers: bool = field(default=True, kw_only=True)  # False: kernels.exchange is torch

    def connect(self) -> None:
        """Connect the ranks. Raise ConfigError if a GPU cannot access another's memory."""
        if self.connected:
            return
        store = c10d.FileStore(self.rendezvous, self.size)
        device = torch.device("cuda", torch.cuda.current_device())
        options = c10d.ProcessGroupNCCL.Options()
        nccl_store, peers_store = c10d.PrefixStore("nccl", store), c10d.PrefixStore("peers", store)
        nccl = c10d.ProcessGroupNCCL(nccl_store, self.rank, self.size, options)
        if not self.has_peers:
            self.connected.append(Links(nccl, None, own_bytes=-1))
            return
        peers = connect_peers(peers_store, self.rank, self.size, device, sums_long=self.tp_size > 1)
        self.connected.append(Links(nccl, peers, own_bytes=peers.capacity))
        short = replace(peers, landings=None)
        ours: Callable[[Tensor], object] = partial(own.all_reduce, peers=short)
        theirs: Callable[[Tensor], object] = self._nccl
        if peers.landings is not None:
            theirs = partial(own.all_reduce, peers=peers)
        if self.lanes > 1:
            ours, theirs = (partial(self._exchanged, most) for most in (peers.capacity, 0))
        own_bytes = crossover(peers, ours, theirs, self.least)
        above = "NCCL" if peers.landings is None else "the kernel of long sums"
        log.info(
            "exchanges between ranks use kernels of short messages up to %d KiB, %s above",
            own_bytes >> 10,
            above,
        )
        self.connected[0] = Links(nccl, replace(peers, short_bytes=own_bytes), own_bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.tp_size == 1:
            return x
        peers = self.peers_for(x)
        return self._nccl(x) if peers is None else own.all_reduce(x, peers)

    def peers_for(self, x: Tensor) -> Peers | None:
        _, peers, own_bytes = self.connected[0]
        if x.nbytes <= own_bytes or (peers is not None and peers.landings is not None):
            return peers
        return None

    def gather(self, x: Tensor) -> Tensor:
        peers = self.connected[0].peers
        if peers is not None and 2 * x.nbytes <= peers.capacity:
            return own.all_gather(x.contiguous(), peers)
        return self._nccl_gather(x)

    def _nccl_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        self.connected[0].nccl._allgather_base(gathered, x.contiguous(), options)
        return gathered

    def own_sum(self, parts_ITD: Tensor) -> Tensor:
        found_TD = parts_ITD[0].new_empty(parts_ITD.shape[1:])
        options = c10d.ReduceScatterOptions()
        options.asyncOp = False
        self.connected[0].nccl._reduce_scatter_base(found_TD, parts_ITD.contiguous(), options)
        return found_TD

    def gather_tokens(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_tokens: int
    ) -> tuple[Tensor, ...]:
        _, peers, own_bytes = self.connected[0]
        num_bytes = num_tokens * exchange.token_bytes(x_TD, weights_TK.shape[1])
        most = own_bytes + own_bytes // 8
        if peers is not None and num_bytes <= min(most, peers.capacity):
            return exchange.gather_tokens(
                x_TD, weights_TK, experts_TK, num_tokens=num_tokens, peers=peers
            )
        parts = padded(x_TD, weights_TK, experts_TK, num_tokens)
        return tuple(self._nccl_gather(part).flatten(0, 1) for part in parts)

    def add_own_sums(self, parts_ITD: Tensor, stream_TD: Tensor) -> None:
        links = self.connected[0]
        if links.peers is not None and parts_ITD[0].nbytes <= links.own_bytes:
            exchange.add_own_sums(parts_ITD, stream_TD, links.peers)
        else:
            Mesh.add_own_sums(self, parts_ITD, stream_TD)

    def _exchanged(self, own_bytes: int, x_TD: Tensor) -> None:
        """Run one exchange of lanes, with our kernels up to `own_bytes`, to time it."""
        self.connected[0] = self.connected[0]._replace(own_bytes=own_bytes)
        weights_TK = x_TD.new_zeros(len(x_TD), 8, dtype=torch.float32)
        gathered = self.gather_tokens(x_TD, weights_TK, weights_TK.int(), len(x_TD))
        self.add_own_sums(gathered[0].view(self.size, *x_TD.shape), x_TD)

    def least(self, count: int) -> int:
        least = torch.tensor([count], device="cuda")
        self._nccl(least, c10d.ReduceOp.MIN)
        return int(least)

    def _nccl(self, x: Tensor, operation: Any = c10d.ReduceOp.SUM) -> Tensor:  # noqa: ANN401
        """Reduce x in place and return it."""
        options = c10d.AllreduceOptions()
        options.reduceOp, options.asyncOp = operation, False
        self.connected[0].nccl.allreduce([x], options)
        return x


class OrderedMesh(NcclMesh):
    """Sums in the order of ranks, for any number of rows (kernels.invariant).

    NCCL's order depends on the size of the message. Our kernels sum in the order of ranks and round
    once, so a large message is cut into rows that fit their buffers.
    """

    __slots__ = ()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.tp_size == 1:
            return x
        peers = self.connected[0].peers
        assert peers is not None
        for piece in x.split(peers.capacity // x[0].nbytes):
            own.all_reduce(piece, peers)
        return x

    def peers_for(self, x: Tensor) -> Peers | None:
        """Return None: an addition in the same kernel would round otherwise than one apart."""
        return None
