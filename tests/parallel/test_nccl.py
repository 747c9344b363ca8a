"""Selection of NCCL or the project's kernels for sums and gathers.

tests/gpu/test_ranks.py checks the results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nanovllm_kernels.exchange import all_reduce as own, tokens
from nanovllm_kernels.exchange.all_reduce import Peers
from nanovllm_kernels.exchange.long_sums import Landings

from nanovllm.parallel import nccl
from nanovllm.parallel.nccl import Links, NcclMesh


class Recorded:
    """Stand-in for a ProcessGroupNCCL of two ranks with equal tensors."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        (x,) = tensors
        assert not options.asyncOp
        self.asked.append(("SUM" if options.reduceOp == nccl.c10d.ReduceOp.SUM else "?", x.nbytes))
        x *= 2

    def _allgather_base(self, found: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp
        self.asked.append(("GATHER", x.nbytes))
        found[:] = x

    def _reduce_scatter_base(self, found: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp
        self.asked.append(("SCATTER", x.nbytes))
        found[:] = 2 * x[1]


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> NcclMesh:
    peers = Peers(0, 2, 4096, torch.zeros(2), torch.zeros(1))
    monkeypatch.setattr(own, "all_reduce", lambda x, _: x.mul_(2) + 0.25)
    monkeypatch.setattr(own, "all_gather", lambda x, _: torch.stack([x, x]) + 0.25)
    return NcclMesh(0, 2, "", [Links(Recorded(), peers, own_bytes=1024)])


def test_sums_beyond_the_crossover_are_nccls(mesh: NcclMesh) -> None:
    """Stand-ins of the project's kernels add 0.25."""
    asked = mesh.connected[0].nccl.asked
    assert mesh.all_reduce(torch.ones(4, 64)).unique().tolist() == [2.25]
    assert asked == []
    assert mesh.all_reduce(torch.ones(5, 64)).unique().tolist() == [2.0]
    assert asked == [("SUM", 1280)]
    assert mesh.peers_for(torch.ones(4, 64)) is mesh.connected[0].peers
    assert mesh.peers_for(torch.ones(5, 64)) is None


def test_sums_beyond_the_crossover_are_our_own_if_there_is_memory_to_land_in(
    mesh: NcclMesh,
) -> None:
    landings = Landings(0, 2, 4096, torch.zeros(2), torch.zeros(1))
    peers = replace(mesh.connected[0].peers, landings=landings)  # type: ignore[type-var]
    mesh.connected[0] = mesh.connected[0]._replace(peers=peers)
    assert mesh.all_reduce(torch.ones(5, 64)).unique().tolist() == [2.25]
    assert mesh.peers_for(torch.ones(5, 64)) is peers
    assert mesh.connected[0].nccl.asked == []


def test_what_no_buffer_holds_is_gathered_by_nccl(mesh: NcclMesh) -> None:
    """A gather uses twice its bytes of the buffers."""
    asked = mesh.connected[0].nccl.asked
    assert mesh.gather(torch.ones(512)).unique().tolist() == [1.25]
    assert asked == []
    assert mesh.gather(torch.ones(2, 513).T).shape == (2, 513, 2)
    assert asked == [("GATHER", 4104)]


def lane(own_bytes: int) -> NcclMesh:
    peers = Peers(1, 2, 4096, torch.zeros(2), torch.zeros(1))
    links = Links(Recorded(), peers, own_bytes=own_bytes)
    return NcclMesh(0, 1, "", [links], ep_size=2, lane=1)


def test_lanes_exchange_few_tokens_by_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane has whole dense parts, so nothing else is summed."""
    done: list[Any] = []
    monkeypatch.setattr(
        tokens, "gather_tokens", lambda *_, num_tokens, peers: done.append(num_tokens)
    )
    monkeypatch.setattr(tokens, "add_own_sums", lambda *args: done.append(args[0].shape))
    mesh, experts_TK = lane(1024), torch.zeros(3, 2, dtype=torch.int32)
    mesh.gather_tokens(torch.ones(3, 60), torch.ones(3, 2), experts_TK, 4)
    mesh.add_own_sums(torch.ones(2, 4, 60), torch.ones(3, 60))
    assert done == [4, (2, 4, 60)] and mesh.connected[0].nccl.asked == []
    x = torch.ones(4)
    assert mesh.all_reduce(x) is x


def test_lanes_exchange_many_tokens_by_nccl() -> None:
    mesh, experts_TK = lane(1023), torch.zeros(3, 2, dtype=torch.int32)
    found = mesh.gather_tokens(torch.ones(3, 64), torch.ones(3, 2), experts_TK, 5)
    assert [part.shape for part in found] == [(10, 64), (10, 2), (10, 2)]
    assert found[2].view(2, 5, 2)[:, 3:].eq(tokens.NO_EXPERT).all() and found[2][5].eq(0).all()
    stream_TD = torch.ones(3, 64)
    mesh.add_own_sums(torch.ones(2, 5, 64), stream_TD)
    assert stream_TD.unique().tolist() == [3.0]
    sizes = [5 * 64 * 4, 5 * 2 * 4, 5 * 2 * 4]
    expected = [*(("GATHER", size) for size in sizes), ("SCATTER", 2 * sizes[0])]
    assert mesh.connected[0].nccl.asked == expected


def test_without_peers_nccl_does_all() -> None:
    """kernels.exchange is torch: no message is short enough for our kernels."""
    mesh = NcclMesh(0, 2, "", [Links(Recorded(), None, -1)], has_peers=False)
    assert mesh.all_reduce(torch.ones(1)).tolist() == [2.0]
    assert mesh.gather(torch.ones(1)).tolist() == [[1.0], [1.0]]
    assert mesh.peers_for(torch.ones(1)) is None
    lanes = NcclMesh(0, 1, "", [Links(Recorded(), None, -1)], ep_size=2, has_peers=False)
    lanes.gather_tokens(torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1).int(), 1)
    lanes.add_own_sums(torch.ones(2, 1, 1), torch.ones(1, 1))
    assert mesh.connected[0].nccl.asked == [("SUM", 4), ("GATHER", 4)]
    assert lanes.connected[0].nccl.asked == [*[("GATHER", 4)] * 3, ("SCATTER", 8)]
