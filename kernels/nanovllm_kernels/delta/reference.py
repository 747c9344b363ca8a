"""Plain torch reference of the gated delta rule over rows with states. Also runs on CPUs.

A row is the next tokens of one request. Row r has tokens starts_R1[r] to before starts_R1[r + 1],
none if these are equal. Its states are in row slots_R[r] of the state tensors, and are updated in
place. Rows of a step have different slots, except rows that pad a CUDA graph, whose states are
meaningless.

The numerics are those of transformers' Qwen3Next. The convolution's results and the outputs are
rounded to the model's dtype; everything else is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm_kernels.activations import sigmoid, silu, softplus

L2_EPS = 1e-6  # added to the sum of squares of a query or key


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a layer of the gated delta rule, without its projections."""

    conv_CW: Tensor
    a_log_H: Tensor
    dt_bias_H: Tensor
    norm_V: Tensor
    eps: float  # epsilon of the norm


def mix_rows(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, starts_R1: Tensor,
    parts_X: Tensor | None = None, targets_X: Tensor | None = None, *saved: Tensor,
) -> Tensor:  # fmt: skip
    """Return x_THV, computing all between a layer's projections. Tokens of no row are undefined.

    qkv_TC has queries, keys and values one after the other, each as heads. A row may have two
    parts. The starts of both parts of each row, and the end of the last part, are in parts_X. Also
    in pairs, targets_X has the target row of the state after the first part, or -1 for none, and
    the slot. The target is a row of `saved`, two other state tensors, perhaps in host memory.
    Without `saved`, it is a row of conv_NCW and recurrent_NHKV.
    """
    tokens, states = (qkv_TC, a_TH, b_TH), (conv_NCW, recurrent_NHKV)
    if parts_X is None or targets_X is None:
        o_THV = _outputs(*tokens, weights, *states, slots_R, starts_R1)
        return gated_norm(o_THV, z_THV, weights.norm_V, weights.eps)
    o_THV = torch.empty_like(z_THV)
    for part, lengths_R in enumerate(parts_X.diff().view(-1, 2).T):
        begins_R, ends_R = parts_X[part:-1:2], lengths_R.cumsum(0)
        before_R1 = F.pad(ends_R, (1, 0))
        shifts_T = (begins_R - before_R1[:-1]).repeat_interleave(lengths_R)
        at_T = torch.arange(len(shifts_T), device=shifts_T.device) + shifts_T
        part_tokens = (each[at_T] for each in tokens)
        o_THV[at_T] = _outputs(*part_tokens, weights, *states, slots_R, before_R1)
        targets_R = targets_X[part::2].long()
        wanted_R = targets_R >= 0
        for to, of_rows in zip(states if part else saved or states, states, strict=True):
            to[targets_R[wanted_R].to(to.device)] = of_rows[slots_R[wanted_R]].to(to.device)
    return gated_norm(o_THV, z_THV, weights.norm_V, weights.eps)


def mix_drafted(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, z_THV: Tensor, weights: DeltaWeights,
    conv_NCW: Tensor, recurrent_NHKV: Tensor, slots_R: Tensor, starts_R1: Tensor,
    inputs_NWX: Tensor, replays_R: Tensor, *_: Tensor,
) -> Tensor:  # fmt: skip
    """Return x_THV as mix_rows does, for rows of few tokens, of which the last may be rejected
    later.

    inputs_NWX has the inputs of each slot's previous tokens: qkv, a and b. The first replays_R of
    these were accepted, and update the states before the row's own tokens. The inputs of the row's
    own tokens replace them in inputs_NWX and do not update the states. Only kernels use further
    arguments.
    """
    inputs_TX, num_heads = torch.cat([qkv_TC, a_TH, b_TH], 1), a_TH.shape[1]
    sizes = [qkv_TC.shape[1], num_heads, num_heads]
    is_right_RW = torch.arange(inputs_NWX.shape[1], device=slots_R.device) < replays_R[:, None]
    right_TX = inputs_NWX[slots_R][is_right_RW]
    ends_R = replays_R.cumsum(0)
    replayed_R1 = F.pad(ends_R, (1, 0))
    _outputs(*right_TX.split(sizes, 1), weights, conv_NCW, recurrent_NHKV, slots_R, replayed_R1)
    states = conv_NCW[slots_R], recurrent_NHKV[slots_R]
    rows_R, lengths_R = torch.arange(len(slots_R), device=slots_R.device), starts_R1.diff()
    o_THV = _outputs(qkv_TC, a_TH, b_TH, weights, *states, rows_R, starts_R1)
    row_T = rows_R.repeat_interleave(lengths_R)
    of_T = torch.arange(len(row_T), device=row_T.device) + starts_R1[0]
    inputs_NWX[slots_R[row_T], of_T - starts_R1[row_T]] = inputs_TX[of_T].to(inputs_NWX.dtype)
    return gated_norm(o_THV, z_THV, weights.norm_V, weights.eps)


def _outputs(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, weights: DeltaWeights, conv_NCW: Tensor,
    recurrent_NHKV: Tensor, slots_R: Tensor, starts_R1: Tensor,
) -> Tensor:  # fmt: skip
    y_TC = conv_rows(qkv_TC, weights.conv_CW, conv_NCW, slots_R, starts_R1)
    num_heads, k_size, v_size = recurrent_NHKV.shape[1:]
    of_keys = (qkv_TC.shape[1] - num_heads * v_size) // 2
    q_TC, k_TC, v_TC = y_TC.split([of_keys, of_keys, num_heads * v_size], 1)
    return delta_rows(
        q_TC.unflatten(1, (-1, k_size)),
        k_TC.unflatten(1, (-1, k_size)),
        v_TC.unflatten(1, (-1, v_size)),
        *gates(a_TH, b_TH, weights.a_log_H, weights.dt_bias_H),
        recurrent_NHKV,
        slots_R,
        starts_R1,
    )


def conv_rows(
    x_TC: Tensor, weight_CW: Tensor, conv_NCW: Tensor, slots_R: Tensor, starts_R1: Tensor
) -> Tensor:
    """Return y_TC, SiLU of each channel's causal convolution over its stored inputs and its row.

    conv_NCW has one input less than weight_CW has weights, oldest first, and is updated.
    """
    y_TC, starts, before = x_TC.clone(), starts_R1.tolist(), conv_NCW.shape[-1]
    begin, end = starts[0], starts[-1]
    if begin == end:
        return y_TC
    stored = conv_NCW[slots_R].transpose(1, 2).unbind()
    rows = x_TC[begin:end].to(conv_NCW.dtype).split([b - a for a, b in pairwise(starts)])
    inputs_LC = torch.cat([each for pair in zip(stored, rows, strict=True) for each in pair])
    shifts_R = torch.arange(len(rows), device=x_TC.device) * before - begin
    conv_NCW[slots_R] = inputs_LC.unfold(0, before, 1)[starts_R1[1:] + shifts_R]
    first_T = torch.arange(begin, end, device=x_TC.device)
    first_T = first_T + shifts_R.repeat_interleave(starts_R1.diff())
    windows_TCW = inputs_LC.unfold(0, before + 1, 1)[first_T].float()
    y_TC[begin:end] = silu((windows_TCW * weight_CW.float()).sum(-1)).to(x_TC.dtype)
    return y_TC


def gates(a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 g_TH, logarithms of the state's decay, and beta_TH, factors of the updates."""
    g_TH = -a_log_H.float().exp() * softplus(a_TH.float() + dt_bias_H.float())
    return g_TH, sigmoid(b_TH.float())


def delta_rows(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor,
    recurrent_NHKV: Tensor, slots_R: Tensor, starts_R1: Tensor,
) -> Tensor:  # fmt: skip
    """Return o_THV, token by token: S = e^g S, S += k (beta (v - S^T k))^T, o = S^T q.

    q and k are L2-normalised here, and q is divided by the root of its size. Each head of q and k
    serves the same number of consecutive heads of v.
    """
    repeats = v_THV.shape[1] // q_THK.shape[1]
    q_THK, k_THK = (l2_norm(x_THK).repeat_interleave(repeats, 1) for x_THK in (q_THK, k_THK))
    q_THK = q_THK * q_THK.shape[-1] ** -0.5
    o_THV, starts = torch.empty_like(v_THV), starts_R1.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    counts = [sum(length > nth for length in lengths) for nth in range(max(lengths, default=0))]
    if not counts:
        return o_THV
    # Long rows come first, so the rows with an nth token are a slice. X has the nth tokens of all
    # rows next to each other.
    at = [starts[row] + nth for nth, count in enumerate(counts) for row in order[:count]]
    at_X, order_R = (torch.tensor(each, device=v_THV.device) for each in (at, order))
    factors = g_TH.float().exp()[..., None, None], k_THK[..., None], q_THK[..., None]
    tokens = v_THV.float(), beta_TH.float()[..., None], *factors
    states_RHKV, outputs = recurrent_NHKV[slots_R[order_R]].float(), []
    for v, beta, decay, k, q in zip(*(each[at_X].split(counts) for each in tokens), strict=True):
        state = states_RHKV[: len(v)]
        state *= decay
        update = (v - (state * k).sum(-2)) * beta
        state += k * update[..., None, :]
        outputs.append((state * q).sum(-2))
    o_THV[at_X] = torch.cat(outputs).to(o_THV.dtype)
    recurrent_NHKV[slots_R[order_R]] = states_RHKV.to(recurrent_NHKV.dtype)
    return o_THV


def l2_norm(x: Tensor) -> Tensor:
    """Normalise vectors along the last dimension to length one, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def gated_norm(o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """Return x_THV: RMSNorm of each head, times SiLU of the gate."""
    o = o_THV.float()
    o = (o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)).to(o_THV.dtype) * weight_V
    return (o.float() * silu(z_THV.float())).to(o_THV.dtype)
