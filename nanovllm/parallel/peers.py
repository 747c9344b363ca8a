"""Buffers that all GPUs of an engine read and write, for kernels that add up over ranks.

Decision: torch's symmetric memory, which allocates and maps them, but none of its operations, and
no default process group. Without NVLink multicast: on shared hosts it can take GPUs out of service.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from nanovllm_kernels.all_reduce import PROGRAMS, Peers, buffer_bytes
from nanovllm_kernels.timing import graph_us
from torch import Tensor
from torch._C import _distributed_c10d  # what torch.distributed gives no name to

from nanovllm.config import ConfigError

c10d: Any = _distributed_c10d  # torch's stubs lack most of what is used of it
CAPACITY = 8 << 20  # 512 rows of 8192 elements
GROUP = "nanovllm.peers"
SHORTEST = 64 << 10  # bytes of a message for which nothing else is ever tried
CALLS = 4  # in a graph


def connect_peers(
    store: Any,  # noqa: ANN401 - a torch.distributed.Store
    rank: int,
    size: int,
    device: torch.device,
    capacity: int = CAPACITY,
) -> Peers:
    """Blocks until all ranks are there. Their devices follow each other in the order of ranks.

    `store` is where they meet, with no other use for its keys. Raises ConfigError if this GPU
    cannot reach the memory of another.
    """
    first = device.index - rank
    unreached = [
        str(other)
        for other in range(first, first + size)
        if other != device.index and not torch.cuda.can_device_access_peer(device, other)
    ]
    if unreached:
        raise ConfigError(
            f"parallel asks for {size} ranks; GPU {device.index} cannot reach the memory of GPU "
            f"{', '.join(unreached)}, as kernels over peer memory must"
        )
    os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    group = c10d.ProcessGroup(store, rank, size)
    c10d._register_process_group(GROUP, group)
    length = buffer_bytes(size, capacity)
    buffer = c10d._SymmetricMemory.empty_strided_p2p((length,), (1,), torch.uint8, device)
    buffer.fill_(0xFF)
    torch.cuda.synchronize(device)
    # No rank gets addresses before all have come, which is after they have filled theirs.
    handle = c10d._SymmetricMemory.rendezvous(buffer, GROUP)
    c10d._unregister_process_group(GROUP)
    return Peers(
        rank,
        size,
        capacity,
        torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
        torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
        keeps=(buffer, handle),
    )


def crossover(
    peers: Peers,
    ours: Callable[[Tensor], object],
    other: Callable[[Tensor], object],
    least: Callable[[int], int],
) -> int:
    """Bytes of the longest message that `ours` does over peer memory as fast as `other`.

    Measured with bfloat16 in CUDA graphs, at powers of two, by all ranks at the same time. `least`
    gives all of them the least of their counts, so that they choose alike.
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
