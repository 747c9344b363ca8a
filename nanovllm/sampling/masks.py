"""Grammar masks: tokens that a row's grammar does not allow next become impossible.

Knows bits, not grammars.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import Masks
from nanovllm.sampling.columns import upload


def allow(logits_SV: Tensor, rows: list[int], masks: Masks) -> Tensor:
    """A copy of the logits with the forbidden tokens of `rows` at minus infinity.

    Log-probabilities are those of the masked distribution: what the request could have drawn.
    """
    width, device = logits_SV.shape[1], logits_SV.device
    at_W = upload(np.array(rows, np.int32), device).long()
    words_WX = upload(np.ascontiguousarray(masks), device)
    bits_B = torch.arange(32, dtype=torch.int32, device=device)
    allowed_WV = (words_WX[:, :, None] >> bits_B & 1).flatten(1)[:, :width].bool()
    masked_SV = logits_SV.clone()
    masked_SV[at_W] = logits_SV[at_W].masked_fill(~allowed_WV, -torch.inf)
    return masked_SV
