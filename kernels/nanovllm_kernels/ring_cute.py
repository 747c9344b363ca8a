"""What the CuTe DSL kernels share: a ring of stages and how it is filled, meetings of a cluster,
and what the threads that hold a row together give each other. Imports CuTe DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int16, Int32, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync

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


def box_of(matrix: cute.Tensor, ring: cute.ComposedLayout, ranks: int) -> tuple:
    """How a stage is read, by so many blocks of threads together."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    if ranks > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    found = cpasync.make_tiled_tma_atom(
        op, matrix, cute.select(ring, [0, 1]), stage_shape(ring), ranks
    )
    return found[0], found[1]


def stage_shape(ring: cute.ComposedLayout | cute.Tensor) -> tuple[int, int]:
    return cute.size(ring, mode=[0]), cute.size(ring, mode=[1])


def partition(box: tuple, ring: cute.Tensor, first: Int32, rank: Int32, ranks: int) -> tuple:
    """How to copy a block of inputs of rows from `first` on: to [stage], from [block]."""
    atom, matrix = box
    moved = cute.domain_offset((first, 0), matrix)
    boxes = cute.local_tile(moved, stage_shape(ring), (0, None))
    return cpasync.tma_partition(
        atom,
        rank if ranks > 1 else 0,
        cute.make_layout(ranks),
        cute.group_modes(ring, 0, 2),
        cute.group_modes(boxes, 0, 2),
    )


def copy(
    atom: cute.CopyAtom, from_: cute.Tensor, to: cute.Tensor, full: cute.Pointer, ranks: int
) -> None:
    """What `ranks` blocks of threads read together, each of them gets."""
    more = {"mcast_mask": Int16((1 << ranks) - 1)} if ranks > 1 else {}
    cute.copy(atom, from_, to, tma_bar_ptr=full, **more)


def four_words(y: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    """16 bytes of y, from `column` on."""
    count = 128 // y.element_type.width
    return cute.recast_tensor(cute.local_tile(y[row, None], (count,), (column // count,)), Int32)


def in_order(words: Any) -> None:  # noqa: ANN401
    """From what four threads gave each other: each two numbers of each of two eights."""
    lower = [words[n] & 0xFFFF | words[n + 1] << 16 for n in (0, 2)]
    upper = [words[n] >> 16 & 0xFFFF | words[n + 1] & -65536 for n in (0, 2)]
    for n, word in enumerate(lower + upper):
        words[n] = word


def exchange(words: cute.Tensor) -> None:
    """Thread i of four, each with four words, gives word j to thread j, whose word i it becomes."""
    lane = arch.lane_idx()
    for distance in (1, 2):
        is_upper = lane & distance != 0
        for low in (0, 3 - distance):
            high = low + distance
            a, b = words[low], words[high]
            other = arch.shuffle_sync_bfly(Int32(cutlass.select_(is_upper, a, b)), distance)
            words[low] = Int32(cutlass.select_(is_upper, other, a))
            words[high] = Int32(cutlass.select_(is_upper, b, other))
