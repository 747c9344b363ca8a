"""Plain torch reference of quantised activations in block fp8, and cases of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal
from nanovllm_kernels.experts.cases import MoECase
from nanovllm_kernels.fp8_reference import BLOCK, FP8, LARGEST, Quantised
from nanovllm_kernels.norms import norm
from nanovllm_kernels.norms.reference import add_rms_norm, rms_norm
from nanovllm_kernels.products import quantise

STEP = 2**20 * 1.001  # float32 ulps: an eighth (one step of e4m3), and rounding of scales


def reference(x_TD: Tensor, row_of_TK: Tensor | None = None) -> Quantised:
    x_TD = x_TD.float()
    padded_TD = functional.pad(x_TD, (0, -x_TD.shape[1] % BLOCK))
    largest_TB = padded_TD.unflatten(1, (-1, BLOCK)).abs().amax(-1)
    scale_TB = torch.where(largest_TB > 0, largest_TB / LARGEST, 1.0)
    values_TD = x_TD / scale_TB.repeat_interleave(BLOCK, 1)[:, : x_TD.shape[1]]
    if row_of_TK is None:
        return Quantised(values_TD.to(FP8), scale_TB.t())
    row_of_X = row_of_TK.flatten().long()
    pair_X = (row_of_X >= 0).nonzero().flatten()
    token_X = torch.zeros_like(row_of_X)  # of sorted rows
    token_X[row_of_X[pair_X]] = pair_X // row_of_TK.shape[1]
    return Quantised(values_TD[token_X].to(FP8), scale_TB[token_X].t())


def silu_mul_reference(gate_up_X2F: Tensor) -> Quantised:
    gate_XF, up_XF = gate_up_X2F.float().chunk(2, -1)
    return reference(functional.silu(gate_XF) * up_XF)


def norm_reference(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float
) -> Quantised:
    sum_TD = x_TD
    if residual_TD is not None:
        sum_TD = residual_TD.copy_(add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)[1])
    ones = torch.ones_like(norm_weight_D)
    return reference(rms_norm(sum_TD, ones, eps).float() * norm_weight_D.float())


def few_reference(x_TD: Tensor, norm_weight_D: Tensor | None, eps: float) -> Quantised:
    """Quantise rows or their norm, which is not rounded to 16 bits. Its factor is applied last."""
    x_TD = x_TD.float()
    if norm_weight_D is None:
        return reference(x_TD)
    values_TD, scale_BT = reference(x_TD * norm_weight_D.float())
    return Quantised(values_TD, scale_BT * torch.rsqrt(x_TD.square().mean(1) + eps))


def written(result: Quantised, args: Args) -> Tensors:
    """Return the numbers in float32, their scales, and the residual stream if it is updated.

    For experts, return only the rows that are written.
    """
    rows, stream = slice(None), args[1:2] if len(args) == 4 and args[1] is not None else ()
    if len(args) == 2:
        rows = slice(int((args[1] >= 0).sum()))
    whole = Quantised(result.values_XD[rows], result.scale_BX[:, rows])
    return whole.dequantised(), whole.scale_BX, *stream


def sizes(expected: Tensors, args: Args) -> Tensors:
    """Return the error scales.

    A number near the middle of two e4m3 neighbours may be rounded to either; the smallest may
    become 0. Scales may be off by 2 ** -7, as rows may have been rounded to bfloat16 at another
    step.
    """
    values_XD, scale_BX, *stream = expected
    smallest_XD = scale_BX.t().repeat_interleave(BLOCK, 1)[:, : values_XD.shape[1]] / 16
    return values_XD.abs().maximum(smallest_XD), scale_BX / 16, *(each.abs() for each in stream)


def inputs(kind: str, T: int, D: int, device: torch.device) -> Args:
    """Return rows. "strided": part of a wider matrix; "zeros": blocks of 0, and a huge number."""
    x_TD = normal(device, T, D + 64 * (kind == "strided"), dtype=torch.bfloat16)[:, :D]
    if kind == "zeros":
        x_TD[:, : D // 2] = 0
        x_TD[T // 2, D // 2] = 3e38
    return (x_TD,)


def of_tokens(routed: MoECase, device: torch.device) -> Args:
    return *inputs("normal", routed.T, routed.D, device), routed.rows(64, device).row_of_TK


def of_norm(kind: str, T: int, D: int, device: torch.device) -> Args:
    """Return inputs of a norm. "first": without residual; other kinds are norm.add_norm_inputs'."""
    x_TD, residual_TD, *rest = norm.add_norm_inputs(kind, T, D, torch.bfloat16, device)
    return x_TD, None if kind == "first" else residual_TD, *rest


def of_few(kind: str, T: int, D: int, device: torch.device) -> Args:
    """Return inputs without a norm, or with one for kind "normed"."""
    (x_TD,) = inputs("strided", T, D, device)
    is_normed = kind == "normed"
    return x_TD, normal(device, D, dtype=x_TD.dtype, seed=3) if is_normed else None, 1e-6


def kernel(
    run: Callable[..., Quantised], definition: Callable[..., Quantised], *cases: Case
) -> Kernel:
    name = run.__name__
    return Kernel(name, run, definition, cases, 2, STEP, scale=sizes, outputs=written)


def dense(of: Callable[..., Args], *kinds: tuple[str, int, int]) -> Iterator[Case]:
    for kind, T, D in kinds:
        yield Case(f"{kind} T={T} D={D}", partial(of, kind, T, D), small=T < 9)


SHARE = MoECase(40, 3, 7, 72, 1200, first=1, num=4)
LARGE = MoECase(8192, 8, 128, 768, 2048)
QUANTISE = kernel(
    quantise.quantise,
    reference,
    *dense(
        inputs, ("normal", 1, 8), ("strided", 7, 1160), ("zeros", 3, 384), ("normal", 513, 4096)
    ),
    Case(str(SHARE), partial(of_tokens, SHARE), small=True),
    Case(str(LARGE), partial(of_tokens, LARGE), num_bytes=LARGE.T * LARGE.D * (2 + LARGE.K)),
)
SILU_MUL_QUANTISE = kernel(
    quantise.silu_mul_quantise,
    silu_mul_reference,
    *dense(inputs, ("strided", 7, 2320), ("strided", 40, 4352)),
    Case("T=64 D=24576", partial(inputs, "normal", 64, 24576), num_bytes=64 * 24576 * 5 // 2),
)
NORM_QUANTISE = kernel(
    quantise.norm_quantise,
    norm_reference,
    *dense(of_norm, ("first", 1, 64), ("normal", 7, 1160), ("slices", 5, 1024), ("spike", 2, 640)),
    *(
        Case(f"T={T} D=4096", partial(of_norm, "strided", T, 4096), num_bytes=T * 4096 * 7)
        for T in (64, 8192)
    ),
)
FEW_QUANTISE = kernel(
    quantise.few_quantise,
    few_reference,
    *dense(of_few, ("plain", 1, 256), ("normed", 3, 1152)),
    *(
        Case(f"{kind} T={T} {D=}", partial(of_few, kind, T, D), num_bytes=T * D * 3)
        for kind, T, D in (("plain", 16, 12288), ("normed", 16, 4096), ("normed", 4, 7168))
    ),
)
