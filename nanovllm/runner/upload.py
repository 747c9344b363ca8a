"""Copy of several host arrays to the device in one pinned, asynchronous transfer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import Int32
from nanovllm.sampling.columns import upload


def upload_together(arrays: Sequence[Int32], device: torch.device) -> list[Tensor]:
    """Return the arrays as int32 device tensors, in order. Do not wait."""
    sizes = [len(array) for array in arrays]
    return list(torch.split(upload(np.concatenate(arrays), device), sizes))
