"""Parts of kernels in Triton: waits for the previous kernel, and products in full precision.

The waits belong to programmatic dependent launch (PDL). `device.launches_early` chooses the kernels
that are launched before the previous one ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def wait(is_early: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if is_early:
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_dependents(is_time: tl.constexpr):
    if is_time:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def dot(a, b, sum):
    """Multiply in full precision: float32 operands are split in three (tf32x3).

    Products of 16-bit operands are exact anyway.
    """
    if INTERPRETED:  # NumPy has no bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sum, input_precision="tf32x3")
