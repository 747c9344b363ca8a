"""Host arrays to the device: everything of a kind in one pinned, asynchronous copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(arrays: Sequence[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """int32 arrays as int32 device tensors, in order. Never waits.

    The pinned buffer may be dropped at once: the host allocator does not reuse it before the copy
    has run.
    """
    sizes = [len(array) for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    if sum(sizes):
        np.concatenate(arrays, out=host.numpy())
    return list(host.to(device, non_blocking=True).split(sizes))
