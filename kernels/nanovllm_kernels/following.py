"""How a kernel that is launched before the one ahead of it ends waits for that one, and lets the
next one come. Which kernels are launched so: device.follows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait(is_early: tl.constexpr):
    """Until the kernel ahead has ended, and what it wrote can be read."""
    if is_early:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_come(is_time: tl.constexpr):
    if is_time:
        tl.extra.cuda.gdc_launch_dependents()
