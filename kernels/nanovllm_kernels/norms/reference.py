"""Plain torch references of the fused operations. Also runs on CPUs.

The signatures and shapes are those of nanovllm/layers/ops.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanovllm_kernels.activations import sigmoid, silu
from nanovllm_kernels.fp8_reference import FP8, LARGEST


def rms_norm(x: Tensor, norm_weight: Tensor, eps: float, mean: Tensor | None = None) -> Tensor:
    """Return RMSNorm over the last dimension of any width, with any number of leading dimensions.

    `mean` is the mean of squares, if it is over more than the last dimension.
    """
    x_float = x.float()
    mean = x_float.square().mean(-1, keepdim=True) if mean is None else mean
    scale = torch.rsqrt(mean + eps)
    return (x_float * scale).to(x.dtype) * norm_weight


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of x + residual, and that sum, both [T, D]. x may be slices [I, T, D]."""
    sum_TD = (summed(x_TD) + residual_TD.float()).to(residual_TD.dtype)
    return rms_norm(sum_TD, norm_weight_D, eps), sum_TD


def summed(x: Tensor) -> Tensor:
    """Return the float32 sum x_TN of slices x_ITN, or x if it has no slices."""
    return x.float().sum(0) if x.ndim == 3 else x


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """Return y_TF = silu(gate) * up. The first F columns of gate_up_T2F are the gate."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return silu(gate_TF) * up_TF


def sigmoid_mul(gate: Tensor, x_TF: Tensor) -> Tensor:
    """Return y_TF = sigmoid(gate) * x. The gate is [T, F], or slices [I, T, F] of a sum."""
    return x_TF * sigmoid(summed(gate)).to(x_TF.dtype)


class Ranks(Protocol):
    """Tensor-parallel ranks with equal numbers of query heads and of key heads."""

    @property
    def tp_size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, which may overwrite x."""
        ...


def mean_squares(qkv_TX: Tensor, widths: tuple[int, int], num_ranks: int) -> Tensor:
    """Return float32 means_T2 of squares, divided by the number of ranks.

    They are over the first widths[0] features and over the next widths[1]. All ranks have the same
    widths, so the sum of means_T2 over ranks is the mean over all ranks' features.
    """
    qkv_TX = summed(qkv_TX).float()
    parts = qkv_TX[:, : sum(widths)].split(widths, dim=1)
    return torch.stack([part.square().mean(1) for part in parts], dim=1) / num_ranks


def rope_store(
    qkv_TX: Tensor,
    q_norm_X: Tensor | None,
    k_norm_X: Tensor | None,
    eps: float,
    cos_sin_LA: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    k_PSGA: Tensor,
    v_PSGA: Tensor,
    scales_2G: Tensor | None = None,
    ranks: Ranks | None = None,
) -> Tensor:
    """Return the rotated q_THA, and write rotated keys, and values, to the cells of slot_mapping_T.

    qkv_TX, or its slices [I, T, X], has H query heads, then G key heads, then G value heads. Norm
    weights, if any, have one row of A elements for all heads, or one for each. With `ranks`, the
    norm is over all heads of all ranks. cos_sin_LA is a table of L positions. `scales_2G` has the
    dequantisation factors of keys and values per head of a float8_e4m3fn cache.
    """
    page_tokens, num_kv_heads, head_size = k_PSGA.shape[1:]
    qkv_TX = summed(qkv_TX).to(qkv_TX.dtype)
    heads_TXA = qkv_TX.view(qkv_TX.shape[0], -1, head_size)
    num_heads = heads_TXA.shape[1] - 2 * num_kv_heads
    q_THA, k_TGA, v_TGA = torch.split(heads_TXA, [num_heads, num_kv_heads, num_kv_heads], 1)
    if q_norm_X is not None and k_norm_X is not None:
        # A norm's weight is one row for all heads, or one row for each.
        norms = q_norm_X.view(-1, head_size), k_norm_X.view(-1, head_size)
        means: tuple[Tensor | None, ...] = None, None
        if ranks is not None:
            widths = num_heads * head_size, num_kv_heads * head_size
            means_T2 = ranks.all_reduce(mean_squares(qkv_TX, widths, ranks.tp_size))
            means = means_T2[:, None, None].unbind(-1)
        q_THA = rms_norm(q_THA, norms[0], eps, means[0])
        k_TGA = rms_norm(k_TGA, norms[1], eps, means[1])
    cos_sin_TA = cos_sin_LA[positions_T]
    pages_T, offsets_T = slot_mapping_T // page_tokens, slot_mapping_T % page_tokens
    k_TGA = rotate(k_TGA, cos_sin_TA)
    if scales_2G is None:
        k_PSGA[pages_T, offsets_T], v_PSGA[pages_T, offsets_T] = k_TGA, v_TGA
    else:
        for x_TGA, x_PSGA, scale_G in zip((k_TGA, v_TGA), (k_PSGA, v_PSGA), scales_2G, strict=True):
            # The view is bytes, since torch cannot index float8 tensors.
            bytes_TGA = quantised(x_TGA, scale_G[:, None]).view(torch.uint8)
            x_PSGA.view(torch.uint8)[pages_T, offsets_T] = bytes_TGA
    return rotate(q_THA, cos_sin_TA)


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale rounded to float8_e4m3fn. NaN stays NaN; infinity becomes the largest."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def rotate(x_THA: Tensor, cos_sin_TA: Tensor) -> Tensor:
    """Apply rotary embeddings in the half-split layout.

    Let R be the number of columns of the table. In the first R elements of a head, element i pairs
    with element i + R/2. The other elements are unchanged.
    """
    cos, sin = cos_sin_TA[:, None].chunk(2, dim=-1)
    a, b = x_THA[..., : cos_sin_TA.shape[1]].float().chunk(2, dim=-1)
    parts = [a * cos - b * sin, b * cos + a * sin, x_THA[..., cos_sin_TA.shape[1] :]]
    return torch.cat(parts, dim=-1).to(x_THA.dtype)
