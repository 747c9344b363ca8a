"""Access to memory of other ranks, with a stand-in for torch's symmetric memory."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from nanovllm_kernels.exchange.all_reduce import Peers
from nanovllm_kernels.exchange.long_sums import landing_bytes

from nanovllm.config import ConfigError
from nanovllm.parallel import peers as module
from nanovllm.parallel.peers import connect_peers, crossover, has_atomics

DEVICE = torch.device("cpu", 5)  # of rank 1; the ranks have devices 4 to 6


def test_a_gpu_out_of_reach_is_said(monkeypatch) -> None:
    asked = []

    def reaches(device: torch.device, other: int) -> bool:
        asked.append((device.index, other))
        return other != 6

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    with pytest.raises(ConfigError) as raised:
        connect_peers(None, 1, 3, DEVICE)
    assert str(raised.value) == (
        "parallel needs 3 ranks; GPU 5 cannot reach the memory of GPU 6, which kernels over peer "
        "memory require"
    )
    assert asked == [(5, 4), (5, 6)]


@pytest.mark.parametrize("sums_long", [True, False], ids=["long sums", "short sums"])
def test_buffers_are_empty_before_any_rank_has_their_addresses(monkeypatch, sums_long) -> None:
    done = []
    short = 2 * 4 * 64
    landed = landing_bytes(3, 256) if sums_long else 0

    class SymmetricMemory:
        @staticmethod
        def empty_strided_p2p(size, stride, dtype, device):
            return torch.zeros(size, dtype=dtype)

        @staticmethod
        def rendezvous(buffer, group):
            assert (buffer[:short] == 0xFF).all() and (buffer[short:] == 0).all()
            assert len(buffer) == short + landed
            done.append(f"met as {group}")
            return SimpleNamespace(buffer_ptrs=[7 << 40, buffer.data_ptr(), 9 << 40])

    stand_in = SimpleNamespace(
        ProcessGroup=lambda *place: place,
        _register_process_group=lambda name, group: done.append(f"registered {group}"),
        _unregister_process_group=lambda name: done.append("unregistered"),
        _SymmetricMemory=SymmetricMemory,
    )
    monkeypatch.setattr(module, "c10d", stand_in)
    monkeypatch.setattr(module, "LANDED", 1000)
    monkeypatch.setattr(module, "has_atomics", lambda *pair: bool(pairs.append(pair)) or True)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("filled"))
    monkeypatch.setattr(os, "putenv", lambda *variable: done.append(variable))
    pairs: list[tuple[int, int]] = []
    peers = connect_peers("store", 1, 3, DEVICE, 64, sums_long=sums_long)
    assert done == [
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        "registered ('store', 1, 3)",
        "filled",
        "met as nanovllm.peers",
        "unregistered",
    ]
    assert (peers.rank, peers.size, peers.capacity) == (1, 3, 64)
    assert peers.addresses_I.tolist()[::2] == [7 << 40, 9 << 40]
    assert peers.calls_X.tolist() == [0] * 64
    assert (peers.landings is not None) == sums_long
    if peers.landings is not None:
        assert pairs == [(4, 5), (4, 6), (5, 4), (5, 6), (6, 4), (6, 5)]
        assert (peers.landings.rank, peers.landings.share_bytes) == (1, 256)
        assert peers.landings.addresses_I.tolist()[::2] == [(7 << 40) + short, (9 << 40) + short]


@pytest.mark.parametrize(
    ("failed", "value", "expected"), [(0, 1, True), (0, 0, False), (1, 1, False)]
)
def test_long_sums_need_atomic_operations_on_all_gpus(monkeypatch, failed, value, expected) -> None:
    asked = []

    def attribute(found, kind: int, device, other) -> int:
        found._obj.value = value
        asked.append((kind, device.value, other.value))
        return failed

    driver = SimpleNamespace(cuDeviceGetP2PAttribute=attribute)
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: driver)
    assert has_atomics(4, 6) is expected and asked == [(3, 4, 6)]


@pytest.mark.parametrize(
    ("another_rank_stops_at", "expected"), [(9, 256 << 10), (2, 128 << 10), (1, 64 << 10)]
)
def test_the_crossover_is_the_first_that_any_rank_finds(
    monkeypatch, another_rank_stops_at, expected
) -> None:
    """The project's kernel takes 1 us per 64 KiB, the other 5 us."""
    peers = Peers(0, 2, 4 << 20, torch.zeros(2), torch.zeros(64))
    asked = []

    def least(count: int) -> int:
        asked.append(count)
        return count if len(asked) < another_rank_stops_at else 0

    def graph_us(calls) -> float:
        sums, (x_TD,) = calls[0].func, calls[0].args
        assert x_TD.dtype == torch.bfloat16
        return 5.0 if sums is other else x_TD.nbytes / (64 << 10)

    def other(x_TD) -> None: ...

    monkeypatch.setattr(module, "graph_us", graph_us)
    assert crossover(peers, torch.neg, other, least) == expected


def test_the_crossover_is_within_capacity(monkeypatch) -> None:
    monkeypatch.setattr(module, "graph_us", lambda calls: 1.0)
    peers = Peers(0, 2, 1 << 20, torch.zeros(2), torch.zeros(64))
    assert crossover(peers, torch.neg, torch.abs, lambda count: count) == 1 << 20
