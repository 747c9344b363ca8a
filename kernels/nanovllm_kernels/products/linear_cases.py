"""Plain torch references of GEMMs with fused operations; inputs of cases, and error scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.case import Args, Tensors, normal
from nanovllm_kernels.norms.reference import rms_norm, silu_mul


def linear_reference(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    return functional.linear(x_TD.float(), weight_ND.float()).to(x_TD.dtype)


def norm_linear_reference(
    x_TD: Tensor, norm_weight_D: Tensor, eps: float, weight_ND: Tensor
) -> Tensor:
    return linear_reference(rms_norm(x_TD, norm_weight_D, eps), weight_ND)


def gate_up_reference(*args: Any) -> Tensor:  # noqa: ANN401
    """Apply SiLU-mul to norm_linear_reference's product of gate and up."""
    return silu_mul(norm_linear_reference(*args))


def linear_inputs(T: int, N: int, D: int, device: torch.device) -> Args:
    weight_ND = normal(device, N, D, dtype=torch.bfloat16, seed=1).mul_(D**-0.5)
    return normal(device, T, D + 32, dtype=torch.bfloat16)[:, :D], weight_ND


def norm_inputs(T: int, N: int, D: int, device: torch.device, kind: str = "normal") -> Args:
    """Return inputs. "spike": one huge element per row; "faint": squares of the size of eps."""
    x_TD, weight_ND = linear_inputs(T, N, D, device)
    if kind == "spike":
        x_TD[:, D // 3] = 3e4
    eps = 1.0 if kind == "faint" else 1e-6
    return x_TD, normal(device, D, dtype=x_TD.dtype, seed=3), eps, weight_ND


def sizes(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Return the root of the summed squares of each product's terms, as errors add up."""
    return functional.linear(x_TD.float().square(), weight_ND.float().square()).sqrt()


def linear_scale(expected: Tensors, args: Args) -> Tensors:
    return (expected[0].abs() + sizes(*args),)


def norm_scale(expected: Tensors, args: Args) -> Tensors:
    return (expected[0].abs() + sizes(rms_norm(*args[:3]), args[3]),)


def gate_up_scale(expected: Tensors, args: Args) -> Tensors:
    both = rms_norm(*args[:3]), args[3]
    return (expected[0].abs() + gated_sizes(linear_reference(*both).float(), sizes(*both)),)


def gated_sizes(gate_up_TN: Tensor, sizes_TN: Tensor) -> Tensor:
    """Return the error scale of silu(gate) * up. The slope of SiLU is at most 1.1."""
    (gate_TF, up_TF), (gate_size_TF, up_size_TF) = gate_up_TN.chunk(2, -1), sizes_TN.chunk(2, -1)
    return 1.1 * gate_size_TF * up_TF.abs() + functional.silu(gate_TF).abs() * up_size_TF
