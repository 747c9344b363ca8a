"""Elementwise products with activated gates: silu(gate) * up and sigmoid(gate) * x.

`silu_mul` takes gate and up as the two halves of one matrix. `sigmoid_mul` gates the output of
attention. The reference is reference.py. The activated gate is rounded before the product, as in
torch.
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

BLOCK = 1024  # elements per program, 8 per thread: one 16-byte load of each operand


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """Return y_TF = silu(gate) * up. The first F columns of gate_up_T2F are the gate."""
    return _launch(gate_up_T2F, gate_up_T2F[:, gate_up_T2F.shape[1] // 2 :], is_silu=True)


def sigmoid_mul(gate: Tensor, x_TF: Tensor) -> Tensor:
    """Return y_TF = sigmoid(gate) * x. The gate is [T, F], or slices [I, T, F] of a sum."""
    return _launch(gate, x_TF, is_silu=False)


def _launch(gate: Tensor, x_TF: Tensor, *, is_silu: bool) -> Tensor:
    num_rows, width = x_TF.shape
    assert x_TF.stride(1) == gate.stride(-1) == 1
    y_TF = torch.empty(num_rows, width, dtype=x_TF.dtype, device=x_TF.device)
    num_blocks, waits = triton.cdiv(width, BLOCK), launches_early(num_rows, x_TF.device)
    activate_mul_kernel[(num_rows * num_blocks,)](
        gate, x_TF, y_TF, gate.stride(0), gate.stride(-2), x_TF.stride(0), width, num_blocks,
        SLICES=len(gate) if gate.ndim == 3 else 1, SILU=is_silu, BLOCK=BLOCK, WAITS=waits,
        launch_pdl=waits,
    )  # fmt: skip
    return y_TF


@triton.jit
def activate_mul_kernel(
    gate_ITF, x_TF, y_TF, slice_stride, gate_stride, x_stride, width, num_blocks,
    SLICES: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    launch_dependents(WAITS and not SILU)  # the out projection prefetches its weights
    wait(WAITS)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    f = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    gate_at = gate_ITF + row * gate_stride + f
    gate = tl.load(gate_at, inside, 0.0).to(tl.float32)
    for nth in tl.static_range(1, SLICES):
        gate += tl.load(gate_at + nth * slice_stride, inside, 0.0).to(tl.float32)
    x = tl.load(x_TF + row * x_stride + f, inside, 0.0)
    activated = ((gate if SILU else 1.0) / (1 + tl.exp(-gate))).to(x.dtype)
    y = activated.to(tl.float32) * x.to(tl.float32)
    tl.store(y_TF + row * width + f, y.to(x.dtype), inside)


def inputs(kind: str, T: int, F: int, dtype: torch.dtype, device: torch.device) -> Args:
    """Return gate_up_T2F. `huge`: exp(-gate) overflows; `strided`: columns of a wider matrix."""
    gate_up_T2F = normal(device, T, 2 * F + 64 * (kind == "strided"), dtype=dtype)[:, : 2 * F]
    if kind == "huge":
        gate_up_T2F[:, ::2] *= 200
    return (gate_up_T2F,)


def sigmoid_inputs(kind: str, T: int, F: int, dtype: torch.dtype, device: torch.device) -> Args:
    """Return gate and x_TF. With `slices`, the gate is the sum of two slices."""
    halves_2TF = inputs(kind, T, F, dtype, device)[0].unflatten(1, (2, F)).transpose(0, 1)
    x_TF = normal(device, T, F, dtype=dtype, seed=1)
    return halves_2TF if kind == "slices" else halves_2TF[0], x_TF


def cases(inputs: Callable[..., Args]) -> tuple[Case, ...]:
    shapes = [
        ("normal", T, F, torch.bfloat16)
        for T, F in product((1, 7, 513), (24, 1024, 3072, 12288, 14336))
    ]
    shapes += [("normal", 7, 3072, torch.float32)]
    shapes += [(kind, 7, 1000, torch.bfloat16) for kind in ("huge", "strided", "slices")]
    checked = [
        Case(f"{kind} T={T} F={F} {bits(dtype)}", partial(inputs, kind, T, F, dtype), T <= 7)
        for kind, T, F, dtype in shapes
    ]
    timed = [
        Case(f"T={T} F={F}", partial(inputs, "normal", T, F, torch.bfloat16), num_bytes=6 * T * F)
        for T, F in ((1, 3072), (256, 3072), (256, 12288), (8192, 3072), (8192, 12288))
    ]
    return (*checked, *timed)


# In 16 bits, the gate and the product may each round to the neighbouring number. In 32 bits, the
# rounded argument of the exponential costs |gate| ulps, which is below 8 for the cases' numbers.
ULPS = {"ulps_16": 2, "ulps_32": 16}
SILU_MUL = Kernel("silu_mul", silu_mul, reference.silu_mul, cases(inputs), **ULPS)
SIGMOID_MUL = Kernel(
    "sigmoid_mul", sigmoid_mul, reference.sigmoid_mul, cases(sigmoid_inputs), **ULPS
)
