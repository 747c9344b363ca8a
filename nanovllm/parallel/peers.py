"""Buffers that all GPUs of an engine can read and write, for our all-reduce kernels.

Decision: torch's symmetric memory allocates and maps the buffers. None of its operations is used,
and no default process group. NVLink multicast is off: on shared hosts it can take GPUs out of
service.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import torch
from nanovllm_kernels.exchange import long_sums
from nanovllm_kernels.exchange.all_reduce import PROGRAMS, Peers, buffer_bytes
from nanovllm_kernels.exchange.long_sums import ALIGNED, Landings, landing_bytes
from nanovllm_kernels.timing import graph_us
from torch import Tensor
from torch._C import _distributed_c10d  # torch.distributed does not export all of it

from nanovllm.config import ConfigError

c10d: Any = _distributed_c10d  # torch's stubs lack most of it
CAPACITY = 8 << 20  # 512 rows of 8192 elements
LANDED = 64 << 20  # bytes of a long message that one launch sums
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
GROUP = "nanovllm.peers"
SHORTEST = 64 << 10  # bytes up to which our kernels are always used
CALLS = 4  # per graph


def connect_peers(
    store: Any,  # noqa: ANN401 - a torch.distributed.Store
    rank: int,
    size: int,
    device: torch.device,
    capacity: int = CAPACITY,
    *,
    sums_long: bool = True,
) -> Peers:
    """Allocate and exchange the buffers; block until all ranks have called.

    The ranks' device indices are consecutive, in the order of ranks. `store` connects the ranks and
    its keys have no other use. Raise ConfigError if this GPU cannot access another's memory.
    `sums_long`: with memory for long sums, which need atomic operations on other GPUs' memory.
    """
    first = device.index - rank
    refuse_unreached(device, first, size)
    os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    group = c10d.ProcessGroup(store, rank, size)
    c10d._register_process_group(GROUP, group)
    short = buffer_bytes(size, capacity)
    share_bytes = LANDED // size // ALIGNED * ALIGNED
    # All ranks ask for all pairs, so that they choose alike.
    pairs = permutations(range(first, first + size), 2)
    sums_long = sums_long and all(has_atomics(*pair) for pair in pairs)
    length = short + (landing_bytes(size, share_bytes) if sums_long else 0)
    buffer = c10d._SymmetricMemory.empty_strided_p2p((length,), (1,), torch.uint8, device)
    buffer[:short].fill_(0xFF)
    buffer[short:].zero_()
    torch.cuda.synchronize(device)
    # The rendezvous returns after all ranks have called it, so after all buffers are filled.
    handle = c10d._SymmetricMemory.rendezvous(buffer, GROUP)
    c10d._unregister_process_group(GROUP)
    addresses_I = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    landings = None
    if sums_long:
        landings = Landings(
            rank=rank,
            size=size,
            share_bytes=share_bytes,
            addresses_I=addresses_I + short,
            calls_P=torch.zeros(long_sums.PROGRAMS, dtype=torch.int32, device=device),
        )
    return Peers(
        rank=rank,
        size=size,
        capacity=capacity,
        addresses_I=addresses_I,
        calls_X=torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
        keepalive=(buffer, handle),
        landings=landings,
    )


def refuse_unreached(device: torch.device, first: int, size: int) -> None:
    """Raise ConfigError if the GPU cannot access those from index `first` on."""
    unreached = [
        str(other)
        for other in range(first, first + size)
        if other != device.index and not torch.cuda.can_device_access_peer(device, other)
    ]
    if unreached:
        raise ConfigError(
            f"parallel needs {size} ranks; GPU {device.index} cannot reach the memory of GPU "
            f"{', '.join(unreached)}, which kernels over peer memory require"
        )


def has_atomics(device: int, other: int) -> bool:
    """Return True if a GPU has atomic operations on the memory of another one, as by NVLink."""
    found, devices = ctypes.c_int(0), (ctypes.c_int(index) for index in (device, other))
    driver = ctypes.CDLL("libcuda.so.1")  # loaded by torch
    failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), NATIVE_ATOMICS, *devices)
    return not failed and bool(found.value)


def crossover(
    peers: Peers,
    ours: Callable[[Tensor], object],
    other: Callable[[Tensor], object],
    least: Callable[[int], int],
) -> int:
    """Return the bytes of the longest message for which `ours` is as fast as `other`.

    All ranks measure at the same time: bfloat16, CUDA graphs, powers of two. `least` returns the
    minimum over ranks, so that all choose alike.
    """
    device, longest = peers.calls_X.device, SHORTEST
    while 2 * longest <= peers.capacity:
        message = torch.zeros(longest, dtype=torch.bfloat16, device=device)
        x_TD = message.view(-1, min(4096, len(message)))
        own_us, other_us = (graph_us([partial(one, x_TD)] * CALLS) for one in (ours, other))
        if not least(int(own_us <= other_us)):
            break
        longest *= 2
    return longest
