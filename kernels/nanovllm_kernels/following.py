"""Programmatic dependent launch: a wait for the previous kernel and the release of the next one.

`device.follows` chooses the kernels that are launched before the previous one ends.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait(is_early: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if is_early:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_come(is_time: tl.constexpr):
    if is_time:
        tl.extra.cuda.gdc_launch_dependents()
