"""Plain torch reference of the products of routed experts. Also runs on CPUs.

Rows are in the order of `route_reference.ExpertRows`. Block fp8 has a float32 scale for each 128 x
128 elements of a weight; gate and up begin blocks of their own. These products dequantise weights
to float32 and do not quantise activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.activations import silu
from nanovllm_kernels.compile_cache import Job
from nanovllm_kernels.experts.route_reference import ExpertRows
from nanovllm_kernels.fp8_reference import Scaled


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """One implementation of both products, with the tile size that it needs rows sorted in."""

    gate_up: Callable[..., Any]  # returns its result in the form that `down` takes
    down: Callable[..., Tensor]
    tile: Callable[[int, int], int]  # of (number of pairs, number of this rank's experts)
    fits: Callable[[int, Tensor], bool]  # (number of pairs, gate_up's weight)
    name: str = "torch"  # shown by `serve`
    jobs: Callable[[Tensor, int], list[Job]] = lambda gate_up, num_chosen: []  # kernels to compile


def expert_gate_up(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows,
    num_chosen: int,
    multiply: Callable[[Tensor, Tensor], Tensor] = functional.linear,
) -> Tensor:
    """Return y_XF = silu(gate) * up for sorted rows. Rows of other ranks' experts are not written.

    `gate_up_E2FD` has an expert's rows of the gate, then those of up.
    """
    y_XF = x_TD.new_empty(len(rows.pair_of_X), gate_up_E2FD.shape[1] // 2)
    for expert, start, end in used(rows):
        x_XD = x_TD[rows.pair_of_X[start:end].long() // num_chosen]
        weight_XD = dequantised(gate_up_E2FD, scale_EXX, expert, 2)
        gate_XF, up_XF = multiply(x_XD.to(weight_XD.dtype), weight_XD).chunk(2, -1)
        y_XF[start:end] = (silu(gate_XF) * up_XF).to(y_XF.dtype)
    return y_XF


def expert_down(
    y_XF: Tensor,
    down_EDF: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows,
    num_chosen: int,
    multiply: Callable[[Tensor, Tensor], Tensor] = functional.linear,
) -> Tensor:
    """Return y_XD of sorted rows. Rows of other ranks' experts are not written."""
    y_XD = y_XF.new_empty(len(y_XF), down_EDF.shape[1])
    for expert, start, end in used(rows):
        weight_DF = dequantised(down_EDF, scale_EXX, expert, 1)
        product_XD = multiply(y_XF[start:end].to(weight_DF.dtype), weight_DF)
        y_XD[start:end] = product_XD.to(y_XD.dtype)
    return y_XD


def combine(
    y_XD: Tensor,
    weights_TK: Tensor,
    row_of_TK: Tensor,
    shared_TD: Tensor | None = None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Return x_TD: the weighted sum of this rank's pairs, plus shared_TD, plus residual_TD.

    Terms are summed in float32, first in the order of K, then shared_TD, then residual_TD, and
    rounded once. May overwrite residual_TD.
    """
    num_tokens, num_chosen = row_of_TK.shape
    x_TD = y_XD.new_zeros(num_tokens, y_XD.shape[1], dtype=torch.float32)
    for k in range(num_chosen):
        row_T = row_of_TK[:, k].long()
        term_TD = y_XD[row_T.clamp(min=0)].float() * weights_TK[:, k, None]
        x_TD = x_TD + term_TD.where(row_T[:, None] >= 0, 0.0)
    for more_TD in (shared_TD, residual_TD):
        x_TD = x_TD if more_TD is None else x_TD + more_TD.float()
    return x_TD.to(y_XD.dtype)


def used(rows: ExpertRows) -> Iterator[tuple[int, int, int]]:
    """Yield each expert that has rows, with their start and end. Waits for the device."""
    starts = rows.starts_E1.tolist()
    for expert, (start, end) in enumerate(pairwise(starts)):
        if end > start:
            yield expert, start, end


def dequantised(
    weight_EXX: Tensor, scale_EXX: Tensor | None, expert: int, num_parts: int
) -> Tensor:
    """Return an expert's weight, dequantised to float32 if there are scales.

    The weight has `num_parts` parts of equal size, each of which begins blocks of its own.
    """
    weight_XX = weight_EXX[expert]
    if scale_EXX is None:
        return weight_XX
    parts = zip(weight_XX.chunk(num_parts), scale_EXX[expert].chunk(num_parts), strict=True)
    return torch.cat([Scaled(*both).dequantised() for both in parts])


def most_rows(num_pairs: int, num_experts: int) -> int:
    """Return a tile size with one tile per expert, since this implementation ignores tiles."""
    return max(1, num_pairs)


EXPERTS = ExpertProducts(expert_gate_up, expert_down, most_rows, lambda num_pairs, weight: True)
