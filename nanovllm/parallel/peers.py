"""Buffers that all GPUs of an engine can read and write, for our all-reduce kernels.

Decision: torch's symmetric memory allocates and maps the buffers. None of its operations is used,
and no default process group. NVLink multicast is off: on shared hosts it can take GPUs out of
service.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from nanovllm_kernels.exchange.all_reduce import PROGRAMS, Peers, buffer_bytes
from nanovllm_kernels.timing import graph_us
from torch import Tensor
from torch._C import _distributed_c10d  # torch.distributed does not export all of it

from nanovllm.config import ConfigError

c10d: Any = _distributed_c10d  # torch's stubs lack most of it
CAPACITY = 8 << 20  # 512 rows of 8192 elements
GROUP = "nanovllm.peers"
SHORTEST = 64 << 10  # bytes up to which our kernels are always used
CALLS = 4  # per graph


def connect_peers(
    store: Any,  # noqa: ANN401 - a torch.distributed.Store
    rank: int,
    size: int,
    device: torch.device,
    capacity: int = CAPACITY,
) -> Peers:
    """Allocate and exchange the buffers; block until all ranks have called.

    The ranks' device indices are consecutive, in the order of ranks. `store` connects the ranks and
    its keys have no other use. Raise ConfigError if this GPU cannot access another's memory.
    """
    first = device.index - rank
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
    os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    group = c10d.ProcessGroup(store, rank, size)
    c10d._register_process_group(GROUP, group)
    length = buffer_bytes(size, capacity)
    buffer = c10d._SymmetricMemory.empty_strided_p2p((length,), (1,), torch.uint8, device)
    buffer.fill_(0xFF)
    torch.cuda.synchronize(device)
    # The rendezvous returns after all ranks have called it, so after all buffers are filled.
    handle = c10d._SymmetricMemory.rendezvous(buffer, GROUP)
    c10d._unregister_process_group(GROUP)
    return Peers(
        rank=rank,
        size=size,
        capacity=capacity,
        addresses_I=torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
        calls_X=torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
        keepalive=(buffer, handle),
    )


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
