"""Which functions compute the gated delta rule, with all that is between a layer's projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from nanovllm_kernels.delta_reference import mix_drafted, mix_rows
from torch import Tensor


class DeltaKernels(NamedTuple):
    """One implementation; the meaning of each part is that of the one for a CPU, in plain torch.

    Each takes qkv_TC, a_TH, b_TH, z_THV, weights, states, slots_R, and gives x_THV.
    """

    rows: Callable[..., Tensor]  # then starts_R1, parts_X, targets_X, saved, out_THV=None
    decodes: Callable[..., Tensor]  # of one token each; then tickets_RG
    drafted: Callable[..., Tensor]  # then starts_R1, kept_NWX, replays_R, tickets_RG
    taps: range = range(1, 1 << 30)  # weights that a channel of the convolution may have


def rows(*tensors: Any, out_THV: Tensor | None = None) -> Tensor:  # noqa: ANN401
    x_THV = mix_rows(*tensors)
    return x_THV if out_THV is None else out_THV.copy_(x_THV)


def decodes(*tensors: Any) -> Tensor:  # noqa: ANN401
    *before, slots_R, _ = tensors
    starts_R1 = torch.arange(len(slots_R) + 1, dtype=torch.int32, device=slots_R.device)
    return rows(*before, slots_R, starts_R1)


TORCH = DeltaKernels(rows, decodes, mix_drafted)
