"""The meaning of each fused operation, in plain torch. What every kernel is checked against.

Also what a CPU runs. Signatures and shapes: nanovllm/layers/ops.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, of any width and any number of leading dimensions."""
    x_float = x.float()
    scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return (x_float * scale).to(x.dtype) * norm_weight


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    sum_TD = (summed(x_TD) + residual_TD.float()).to(residual_TD.dtype)
    return rms_norm(sum_TD, norm_weight_D, eps), sum_TD


def summed(x: Tensor) -> Tensor:
    """The sum x_TN of slices x_ITN, in float32; x where it has no slices."""
    return x.float().sum(0) if x.ndim == 3 else x


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def rope_store(
    qkv_TX: Tensor,
    q_norm_A: Tensor | None,
    k_norm_A: Tensor | None,
    eps: float,
    cos_sin_LA: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    k_PSGA: Tensor,
    v_PSGA: Tensor,
) -> Tensor:
    page_tokens, num_kv_heads, head_size = k_PSGA.shape[1:]
    qkv_TX = summed(qkv_TX).to(qkv_TX.dtype)
    heads_TXA = qkv_TX.view(qkv_TX.shape[0], -1, head_size)
    num_heads = heads_TXA.shape[1] - 2 * num_kv_heads
    q_THA, k_TGA, v_TGA = torch.split(heads_TXA, [num_heads, num_kv_heads, num_kv_heads], 1)
    if q_norm_A is not None:
        q_THA = rms_norm(q_THA, q_norm_A, eps)
    if k_norm_A is not None:
        k_TGA = rms_norm(k_TGA, k_norm_A, eps)
    cos_sin_TA = cos_sin_LA[positions_T]
    pages_T, offsets_T = slot_mapping_T // page_tokens, slot_mapping_T % page_tokens
    k_PSGA[pages_T, offsets_T] = rotate(k_TGA, cos_sin_TA)
    v_PSGA[pages_T, offsets_T] = v_TGA
    return rotate(q_THA, cos_sin_TA)


def rotate(x_THA: Tensor, cos_sin_TA: Tensor) -> Tensor:
    """Half-split: element i of a head pairs with element i + A/2."""
    cos, sin = cos_sin_TA[:, None].chunk(2, dim=-1)
    a, b = x_THA.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_THA.dtype)
