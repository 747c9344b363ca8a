"""Functions that compute everything between the projections of a gated delta layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from nanovllm_kernels.delta.reference import mix_drafted, mix_rows
from torch import Tensor


class DeltaKernels(NamedTuple):
    """One implementation. The plain torch one (TORCH) defines the meaning of each function.

    All take qkv_TC, a_TH, b_TH, z_THV, weights, states, slots_R, then the arguments in the comment,
    and return x_THV.
    """

    rows: Callable[..., Tensor]  # any rows: starts_R1, parts_X, targets_X, saved, out_THV=None
    decodes: Callable[..., Tensor]  # rows of one token: tickets_RG
    drafted: Callable[..., Tensor]  # rows with drafts: starts_R1, inputs_NWX, replays_R, tickets_RG
    taps: range = range(1, 1 << 30)  # supported sizes of the convolution


def rows(*tensors: Any, out_THV: Tensor | None = None) -> Tensor:  # noqa: ANN401
    x_THV = mix_rows(*tensors)
    return x_THV if out_THV is None else out_THV.copy_(x_THV)


def decodes(*tensors: Any) -> Tensor:  # noqa: ANN401
    *before, slots_R, _ = tensors
    starts_R1 = torch.arange(len(slots_R) + 1, dtype=torch.int32, device=slots_R.device)
    return rows(*before, slots_R, starts_R1)


TORCH = DeltaKernels(rows, decodes, mix_drafted)
