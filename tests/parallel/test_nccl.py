"""Which sums and gathers go where. That they are right is for tests/gpu/test_ranks.py to say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nanovllm_kernels import all_reduce as own
from nanovllm_kernels.all_reduce import Peers

from nanovllm.parallel import nccl
from nanovllm.parallel.nccl import Links, NcclMesh


class Recorded:
    """As a ProcessGroupNCCL of two ranks with equal tensors."""

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


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> NcclMesh:
    peers = Peers(0, 2, 4096, torch.zeros(2), torch.zeros(1))
    monkeypatch.setattr(own, "all_reduce", lambda x, _: x.mul_(2) + 0.25)
    monkeypatch.setattr(own, "all_gather", lambda x, _: torch.stack([x, x]) + 0.25)
    return NcclMesh(0, 2, "", [Links(Recorded(), peers, own_bytes=1024)])


def test_sums_beyond_the_crossover_are_nccls(mesh: NcclMesh) -> None:
    """0.25: marks what our kernels did."""
    asked = mesh.connected[0].nccl.asked
    assert mesh.all_reduce(torch.ones(4, 64)).unique().tolist() == [2.25]
    assert asked == []
    assert mesh.all_reduce(torch.ones(5, 64)).unique().tolist() == [2.0]
    assert asked == [("SUM", 1280)]
    assert mesh.peers_for(torch.ones(4, 64)) is mesh.connected[0].peers
    assert mesh.peers_for(torch.ones(5, 64)) is None


def test_what_no_buffer_holds_is_gathered_by_nccl(mesh: NcclMesh) -> None:
    """A gather takes twice its bytes of the buffers."""
    asked = mesh.connected[0].nccl.asked
    assert mesh.gather(torch.ones(512)).unique().tolist() == [1.25]
    assert asked == []
    assert mesh.gather(torch.ones(2, 513).T).shape == (2, 513, 2)
    assert asked == [("GATHER", 4104)]
