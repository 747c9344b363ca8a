"""RMSNorm, alone or after a residual addition, with one program per row, which is read once.

The reference is reference.py. The mean and the scaling are float32. The scaled row is rounded to
the row's dtype before it is multiplied by norm_weight, as in transformers, and the product is
rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, bits, normal
from nanovllm_kernels.device import launches_early
from nanovllm_kernels.norms import reference
from nanovllm_kernels.triton_parts import launch_dependents, wait

MAX_WIDTH = 16384  # elements of a row, which must fit in a program's registers
HELD = 16384  # router weights that a program holds in registers


def rms_norm(x_TD: Tensor, norm_weight_D: Tensor, eps: float) -> Tensor:
    """Return y_TD, the RMSNorm of each row. D is at most MAX_WIDTH."""
    num_rows, width = x_TD.shape
    y_TD = torch.empty(num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, None, norm_weight_D, y_TD, eps)
    return y_TD


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x_TD (or its slices) to residual_TD in place, and replace x_TD by the sum's RMSNorm.

    Returns x_TD, or its first slice, and residual_TD.
    """
    y_TD = x_TD if x_TD.ndim == 2 else x_TD[0]
    _launch(x_TD, residual_TD, norm_weight_D, y_TD, eps)
    return y_TD, residual_TD


def norm_router(
    x_TD: Tensor, norm_weight_D: Tensor, eps: float, router_ED: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y_TD = rms_norm(x) and a router's logits_TE of it, in the dtype of the router's
    weight.

    This is for few rows. A program normalises a row for some experts, whose weights it loads before
    the row is available. The library would split the inner dimension of so small a product, and sum
    the parts in another launch.
    """
    y_TD = x_TD.new_empty(x_TD.shape)
    logits_TE = router_ED.new_empty(len(x_TD), len(router_ED))
    assert router_ED.is_contiguous()
    _launch(x_TD, None, norm_weight_D, y_TD, eps, router_ED, logits_TE)
    return y_TD, logits_TE


def _launch(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    y_TD: Tensor,
    eps: float,
    router_ED: Tensor | None = None,
    logits_TE: Tensor | None = None,
) -> None:
    num_rows, width = y_TD.shape
    assert width <= MAX_WIDTH and x_TD.stride(-1) == 1 and norm_weight_D.stride(0) == 1
    block = triton.next_power_of_2(width)
    waits = launches_early(num_rows, x_TD.device)
    num_experts = 0 if router_ED is None else len(router_ED)
    experts = min(8, triton.cdiv(HELD, block))  # per program
    warps = 8 if num_experts else min(max(block // 512, 1), 16)  # two 16-byte loads of bf16
    rms_norm_kernel[(num_rows, max(1, triton.cdiv(num_experts, experts)))](
        x_TD, residual_TD, norm_weight_D, y_TD, router_ED, logits_TE, x_TD.stride(0),
        x_TD.stride(-2), 0 if residual_TD is None else residual_TD.stride(0), y_TD.stride(0), eps,
        SLICES=len(x_TD) if x_TD.ndim == 3 else 1, WIDTH=width, BLOCK=block, E=num_experts,
        EXPERTS=experts, WAITS=waits, launch_pdl=waits, num_warps=warps,
    )  # fmt: skip


@triton.jit
def rms_norm_kernel(
    x_TD, residual_TD, norm_weight_D, y_TD, router_ED, logits_TE, slice_stride, x_stride,
    residual_stride, y_stride, eps, SLICES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    norm_weight = tl.load(norm_weight_D + d, inside, 0.0)
    if router_ED is not None:
        expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
        exists = (expert < E)[:, None] & inside[None, :]
        router = tl.load(router_ED + expert[:, None] * WIDTH + d[None, :], exists, 0.0)
    launch_dependents(WAITS)
    wait(WAITS)
    x = tl.load(x_TD + row * x_stride + d, inside, 0.0)
    if residual_TD is not None:
        total = x.to(tl.float32)
        for nth in tl.static_range(1, SLICES):
            at = x_TD + nth * slice_stride + row * x_stride + d
            total += tl.load(at, inside, 0.0).to(tl.float32)
        at = residual_TD + row * residual_stride + d
        x = (total + tl.load(at, inside, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(at, x, inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    y = (wide * scale).to(x.dtype).to(tl.float32) * norm_weight.to(tl.float32)
    y = y.to(x.dtype)
    tl.store(y_TD + row * y_stride + d, y, d < tl.where(tl.program_id(1) == 0, WIDTH, 0))
    if router_ED is not None:
        logits = tl.sum(router.to(tl.float32) * y.to(tl.float32)[None, :], 1)
        tl.store(logits_TE + row * E + expert, logits.to(router.dtype), expert < E)


def norm_inputs(kind: str, T: int, D: int, dtype: torch.dtype, device: torch.device) -> Args:
    """Return inputs of rms_norm.

    `spike`: one huge element per row; `flat`: constant rows; `strided`: columns of a wider matrix.
    """
    x_TD = normal(device, T, D + 128 * (kind == "strided"), dtype=dtype)[:, :D]
    if kind == "spike":
        x_TD[:, D // 3] = 3e4
    if kind == "flat":
        x_TD.fill_(0.37)
    return x_TD, normal(device, D, dtype=dtype, seed=1), 1e-6


def add_norm_inputs(kind: str, T: int, D: int, dtype: torch.dtype, device: torch.device) -> Args:
    x_TD, norm_weight_D, eps = norm_inputs(kind, T, D, dtype, device)
    if kind == "slices":
        x_TD = normal(device, 3, T, D, dtype=dtype)
    return x_TD, normal(device, T, D, dtype=dtype, seed=2), norm_weight_D, eps


def cases(inputs: Callable[..., Args], passes: int, *kinds: str) -> tuple[Case, ...]:
    """Return cases. A row crosses the memory bus `passes` times. `kinds` are further inputs."""
    widths = (64, 1024, 2560, 4096, 5120, 8192)
    shapes = [("normal", T, D, torch.bfloat16) for T, D in product((1, 7, 513), widths)]
    shapes += [("normal", T, D, torch.float32) for T, D in ((1, 64), (7, 1024), (513, 8192))]
    shapes += [(kind, 7, 2560, torch.bfloat16) for kind in ("spike", "flat", "strided", *kinds)]
    checked = [
        Case(f"{kind} T={T} D={D} {bits(dtype)}", partial(inputs, kind, T, D, dtype), T <= 7)
        for kind, T, D, dtype in shapes
    ]
    timed = [
        Case(
            f"T={T} D={D}",
            partial(inputs, "normal", T, D, torch.bfloat16),
            num_bytes=2 * (passes * T * D + D),
        )
        for T, D in ((1, 1024), (256, 1024), (256, 4096), (8192, 1024), (8192, 4096))
    ]
    return (*checked, *timed)


# In 16 bits, the row and then its product may each round to the neighbouring number. In 32 bits,
# sums are 13 additions deep in both implementations, and the root halves their relative error.
# There are three more roundings.
RMS_NORM = Kernel(
    "rms_norm", rms_norm, reference.rms_norm, cases(norm_inputs, 2), ulps_16=2, ulps_32=16
)
ADD_RMS_NORM = Kernel(
    "add_rms_norm",
    add_rms_norm,
    reference.add_rms_norm,
    cases(add_norm_inputs, 4, "slices"),
    ulps_16=2,
    ulps_32=16,
)
