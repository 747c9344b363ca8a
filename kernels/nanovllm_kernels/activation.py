"""SiLU of the gate times the up projection, both halves of one matrix.

Meaning: nanovllm_kernels.reference. The activated gate is rounded before the product, as in torch.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels import reference
from nanovllm_kernels.case import Args, Case, Kernel, bits, normal
from nanovllm_kernels.device import follows

BLOCK = 1024  # 8 elements a thread: one 16-byte load of each half


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    num_rows, twice = gate_up_T2F.shape
    width = twice // 2
    assert gate_up_T2F.stride(1) == 1
    y_TF = torch.empty(num_rows, width, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    num_blocks, waits = triton.cdiv(width, BLOCK), follows(num_rows, gate_up_T2F.device)
    silu_mul_kernel[(num_rows * num_blocks,)](
        gate_up_T2F,
        y_TF,
        gate_up_T2F.stride(0),
        width,
        num_blocks,
        BLOCK=BLOCK,
        WAITS=waits,
        launch_pdl=waits,
    )
    return y_TF


@triton.jit
def silu_mul_kernel(
    gate_up_T2F, y_TF, stride, width, num_blocks, BLOCK: tl.constexpr, WAITS: tl.constexpr
):
    if WAITS:
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    f = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    gate = tl.load(gate_up_T2F + row * stride + f, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_T2F + row * stride + width + f, inside, 0.0)
    activated = (gate / (1 + tl.exp(-gate))).to(up.dtype)
    y = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(y_TF + row * width + f, y.to(up.dtype), inside)


def inputs(kind: str, T: int, F: int, dtype: torch.dtype, device: torch.device) -> Args:
    """`huge`: gates where exp overflows; `strided`: columns of a wider matrix."""
    gate_up_T2F = normal(device, T, 2 * F + 64 * (kind == "strided"), dtype=dtype)[:, : 2 * F]
    if kind == "huge":
        gate_up_T2F[:, ::2] *= 200
    return (gate_up_T2F,)


def cases() -> tuple[Case, ...]:
    shapes = [
        ("normal", T, F, torch.bfloat16)
        for T, F in product((1, 7, 513), (24, 1024, 3072, 12288, 14336))
    ]
    shapes += [("normal", 7, 3072, torch.float32)]
    shapes += [(kind, 7, 1000, torch.bfloat16) for kind in ("huge", "strided")]
    checked = [
        Case(f"{kind} T={T} F={F} {bits(dtype)}", partial(inputs, kind, T, F, dtype), T <= 7)
        for kind, T, F, dtype in shapes
    ]
    timed = [
        Case(
            f"T={T} F={F}",
            partial(inputs, "normal", T, F, torch.bfloat16),
            num_bytes=2 * 3 * T * F,
        )
        for T, F in ((1, 3072), (256, 3072), (256, 12288), (8192, 3072), (8192, 12288))
    ]
    return (*checked, *timed)


# 16 bit: the gate and the product may each round to the neighbouring number. 32 bit: the
# exponential's argument is rounded, which costs |gate| ulps, below 8 for the cases' numbers.
SILU_MUL = Kernel("silu_mul", silu_mul, reference.silu_mul, cases(), ulps_16=2, ulps_32=16)
