"""Plain torch reference of routed experts whose products have deltas of adapters.

Decision: a step with an adapter of experts runs the products expert by expert, with the numbers of
rows on the host. The delta comes before the gate, which the kernels of experts include. Such steps
have no CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm_kernels.activations import silu
from nanovllm_kernels.adapters.reference import add_deltas
from nanovllm_kernels.experts.reference import combine, dequantised


@dataclass(frozen=True, slots=True)
class ExpertDeltas:
    """Matrices of all adapters for one layer's experts on this rank, as views of rows of ranks.

    I is 2: the gate and the projection next to it (up), each with its own A.
    """

    gate_up_a_REID: Tensor
    gate_up_b_RE2F: Tensor
    down_a_REF: Tensor
    down_b_RED: Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of this rank's experts, with their scales if they are block fp8."""

    gate_up_E2FD: Tensor
    gate_up_scale: Tensor | None
    down_EDF: Tensor
    down_scale: Tensor | None


def adapted_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    local_TK: Tensor,
    *,
    weights: ExpertWeights,
    deltas: ExpertDeltas,
    adapter_T: Tensor,
    owner_P: Tensor,
    stream_TD: Tensor | None = None,
    shared_TD: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of this rank's pairs, plus shared_TD, plus stream_TD.

    A pair is a token and one of its experts. May overwrite stream_TD, the residual stream.
    `local_TK` are indices of experts among those of this rank; others are out of range. The last
    arguments are those of reference.add_deltas.
    """
    num_chosen = local_TK.shape[1]
    local_X, num_experts = local_TK.flatten(), len(weights.gate_up_E2FD)
    y_XD = x_TD.new_zeros(len(local_X), x_TD.shape[1])
    inner = weights.down_EDF.shape[2]
    for expert in local_X[(local_X >= 0) & (local_X < num_experts)].unique().tolist():
        pairs = (local_X == expert).nonzero()[:, 0]
        tokens = pairs // num_chosen
        adapter_X, x_XD = adapter_T[tokens], x_TD[tokens]
        gate_up = dequantised(weights.gate_up_E2FD, weights.gate_up_scale, expert, 2)
        gate_up_X2F = add_deltas(
            x_XD,
            partial(F.linear, x_XD, gate_up.to(x_XD.dtype)),
            deltas.gate_up_a_REID[:, expert],
            deltas.gate_up_b_RE2F[:, expert],
            widths=(inner, inner),
            adapter_T=adapter_X,
            owner_P=owner_P,
        )
        gate_XF, up_XF = gate_up_X2F.chunk(2, 1)
        y_XF = silu(gate_XF) * up_XF
        down = dequantised(weights.down_EDF, weights.down_scale, expert, 1)
        down_XD = add_deltas(
            y_XF,
            partial(F.linear, y_XF, down.to(y_XF.dtype)),
            deltas.down_a_REF[:, expert, None],
            deltas.down_b_RED[:, expert],
            widths=(len(down),),
            adapter_T=adapter_X,
            owner_P=owner_P,
        )
        y_XD[pairs] = down_XD
    is_local_TK = (local_TK >= 0) & (local_TK < num_experts)
    row_of_TK = torch.arange(len(local_X), device=x_TD.device).view_as(local_TK)
    row_of_TK = row_of_TK.where(is_local_TK, -1)
    return combine(y_XD, weights_TK, row_of_TK, shared_TD=shared_TD, residual_TD=stream_TD)
