"""What the CuTe DSL kernels share: the way around a ring of stages, meetings of a cluster, and sums
of the threads that hold a row together. Imports CuTe DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute import arch

READ_ONCE = 0x12F0000000000000  # a cache policy: the first to be evicted


@cute.jit
def next_stage(stage: Int32, phase: Int32, stages: cutlass.Constexpr) -> tuple:
    """The stage behind this one, and the phase of its barriers, which turns with each round."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def meet(cluster: cutlass.Constexpr) -> None:
    """All threads of a cluster of so many blocks, or of the one block."""
    if cutlass.const_expr(cluster > 1):
        arch.cluster_arrive()
        arch.cluster_wait()
    else:
        arch.sync_threads()


def of_four(combine: Callable[[Any, Any], Any], x: Float32) -> Float32:
    """What four neighbouring threads have, combined: each of them gets it."""
    for distance in (1, 2):
        x = combine(x, arch.shuffle_sync_bfly(x, distance))
    return x
