"""Copies between pages and pinned host memory: the bytes, their order with steps, and the rate."""

from __future__ import annotations

import time

import torch

from nanovllm.kv.layout import CacheLayout, PagedGroup
from nanovllm.plan import Copies, Moved, Moves
from nanovllm.runner.caches import make_caches
from nanovllm.runner.transfer import HostPages, Mover

QWEN3_8B = CacheLayout((PagedGroup(tuple(range(36)), 8, 128, 128, 2),))
COUNT = 48  # pages of a transfer


def ended(mover: Mover, count: int = 1) -> list[Moved]:
    found: list[Moved] = []
    while len(found) < count:
        found += mover.moved()
        time.sleep(0.001)
    return found


def pinned_rate(direction: str) -> float:
    """Return the bytes per second of one large copy."""
    host = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    source, target = (device, host) if direction == "stores" else (host, device)
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return (1 << 29) / (1e-3 * min(times))


def test_pages_go_to_host_memory_and_back_at_the_rate_of_the_bus() -> None:
    torch.cuda.set_stream(torch.cuda.Stream())
    device = torch.device("cuda", torch.cuda.current_device())
    caches = make_caches(QWEN3_8B, 2 * COUNT, 128, torch.bfloat16, device=device)
    for tensor in caches.tensors:
        tensor.normal_()
    mover = Mover(HostPages(caches, COUNT))
    woken: list[int] = []
    mover.call_when_moved(lambda: woken.append(1))
    there = [(1 + i, COUNT - 1 - i) for i in range(COUNT)]
    back = [(slot, COUNT + page) for page, slot in there]
    rates: dict[str, list[float]] = {"stores": [], "loads": []}
    for turn in range(3):
        for tensor in caches.tensors:
            tensor[:, 1 + COUNT :] = 0
        torch.cuda._sleep(50_000_000)  # the steps' stream is busy, and then writes the pages
        for tensor in caches.tensors:
            tensor[:, 1 : 1 + COUNT] += 1
        mover.move(Moves([], [Copies(2 * turn + 1, there)], []))
        (stored,) = ended(mover)
        mover.move(Moves([2 * turn + 1], [], [Copies(2 * turn + 2, back)]))
        for tensor in caches.tensors:
            tensor[:, 0] += 1  # steps go on during the load
        (loaded,) = ended(mover)
        mover.move(Moves([2 * turn + 2], [], []))
        for tensor in caches.tensors:
            assert tensor[:, 1 : 1 + COUNT].equal(tensor[:, 1 + COUNT :])
            assert not tensor[:, 1].equal(tensor[:, 2])
        for kind, moved in (("stores", stored), ("loads", loaded)):
            assert moved.num_bytes == COUNT * 36 * 2 * 128 * 8 * 128 * 2
            rates[kind].append(moved.num_bytes / moved.seconds)
    assert len(woken) == 6
    for kind, found in rates.items():
        bus = pinned_rate(kind)
        assert max(found) > 0.8 * bus
