"""Products with what may be fused to them, in plain torch; inputs of cases, and sizes of errors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels import reference
from nanovllm_kernels.case import Args, Tensors, normal


def linear_reference(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    return functional.linear(x_TD.float(), weight_ND.float()).to(x_TD.dtype)


def norm_linear_reference(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight_ND: Tensor,
    *,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    normed_TD, sum_TD = normed(x_TD, residual_TD, norm_weight_D, eps)
    y_TN = linear_reference(normed_TD, weight_ND)
    return reference.silu_mul(y_TN) if gated else y_TN, sum_TD


def normed(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if residual_TD is None:
        return reference.rms_norm(x_TD, norm_weight_D, eps), x_TD
    return reference.add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)


def linear_inputs(T: int, N: int, D: int, device: torch.device) -> Args:
    weight_ND = normal(device, N, D, dtype=torch.bfloat16, seed=1).mul_(D**-0.5)
    return normal(device, T, D + 32, dtype=torch.bfloat16)[:, :D], weight_ND


def norm_inputs(T: int, N: int, D: int, device: torch.device, kind: str = "normal") -> Args:
    """`first`: no residual yet; `spike`: one huge element a row; `faint`: squares of eps' size."""
    x_TD, weight_ND = linear_inputs(T, N, D, device)
    if kind == "spike":
        x_TD[:, D // 3] = 3e4
    residual_TD = None if kind == "first" else normal(device, T, D, dtype=x_TD.dtype, seed=2)
    eps = 1.0 if kind == "faint" else 1e-6
    return x_TD, residual_TD, normal(device, D, dtype=x_TD.dtype, seed=3), eps, weight_ND


def sizes(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """How large each product's terms are together, as errors add up: root of summed squares."""
    return functional.linear(x_TD.float().square(), weight_ND.float().square()).sqrt()


def linear_scale(expected: Tensors, args: Args) -> Tensors:
    return (expected[0].abs() + sizes(*args),)


def norm_scale(expected: Tensors, args: Args) -> Tensors:
    y_TN, sum_TD = (tensor.abs() for tensor in expected)
    return y_TN + sizes(normed(*args[:4])[0], args[4]), sum_TD


def gate_up_scale(expected: Tensors, args: Args) -> Tensors:
    y_TF, sum_TD = (tensor.abs() for tensor in expected)
    normed_TD, _ = normed(*args[:4])
    gate_up_TN = linear_reference(normed_TD, args[4]).float()
    return y_TF + gated_sizes(gate_up_TN, sizes(normed_TD, args[4])), sum_TD


def gated_sizes(gate_up_TN: Tensor, sizes_TN: Tensor) -> Tensor:
    """Errors of the gate, by at most 1.1 of which its activation moves, and of the other factor."""
    (gate_TF, up_TF), (gate_size_TF, up_size_TF) = gate_up_TN.chunk(2, -1), sizes_TN.chunk(2, -1)
    return 1.1 * gate_size_TF * up_TF.abs() + functional.silu(gate_TF).abs() * up_size_TF
