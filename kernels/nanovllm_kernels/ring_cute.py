"""Parts shared by CuTe DSL kernels: TMA copies to a ring of stages, barriers, and shuffles.

Importing this imports CuTe DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int16, Int32, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync

READ_ONCE = 0x12F0000000000000  # L2 cache policy: evict first


@cute.jit
def next_stage(stage: Int32, phase: Int32, stages: cutlass.Constexpr) -> tuple:
    """Return the next stage and the phase of its barriers, which flips with each round."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def sync_cluster(cluster: cutlass.Constexpr) -> None:
    """Synchronise all threads of the cluster, or of the block if `cluster` is 1."""
    if cutlass.const_expr(cluster > 1):
        arch.cluster_arrive()
        arch.cluster_wait()
    else:
        arch.sync_threads()


def of_four(combine: Callable[[Any, Any], Any], x: Float32) -> Float32:
    """Combine the values of four neighbouring threads. All four get the result."""
    for distance in (1, 2):
        x = combine(x, arch.shuffle_sync_bfly(x, distance))
    return x


def box_of(matrix: cute.Tensor, ring: cute.ComposedLayout, ranks: int) -> tuple:
    """Return the TMA atom and tensor for stages that `ranks` thread blocks read together."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    if ranks > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    tma = cpasync.make_tiled_tma_atom(
        op, matrix, cute.select(ring, [0, 1]), stage_shape(ring), ranks
    )
    return tma[0], tma[1]


def stage_shape(ring: cute.ComposedLayout | cute.Tensor) -> tuple[int, int]:
    return cute.size(ring, mode=[0]), cute.size(ring, mode=[1])


def partition(box: tuple, ring: cute.Tensor, first: Int32, rank: Int32, ranks: int) -> tuple:
    """Return the target [stage] and source [block of inputs] of copies of rows from `first` on."""
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
    """Start a copy to a stage. With several `ranks`, their parts are multicast to all of them."""
    more = {"mcast_mask": Int16((1 << ranks) - 1)} if ranks > 1 else {}
    cute.copy(atom, from_, to, tma_bar_ptr=full, **more)


def four_words(y: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    """Return 16 bytes of y, from `column` on, as four words."""
    count = 128 // y.element_type.width
    return cute.recast_tensor(cute.local_tile(y[row, None], (count,), (column // count,)), Int32)


def in_order(words: Any) -> None:  # noqa: ANN401
    """Reorder exchanged words: the lower 16 bits of all of them, then the upper 16 bits."""
    lower = [words[n] & 0xFFFF | words[n + 1] << 16 for n in (0, 2)]
    upper = [words[n] >> 16 & 0xFFFF | words[n + 1] & -65536 for n in (0, 2)]
    for n, word in enumerate(lower + upper):
        words[n] = word


def exchange(words: cute.Tensor) -> None:
    """Transpose words among four threads: word j of thread i becomes word i of thread j."""
    lane = arch.lane_idx()
    for distance in (1, 2):
        is_upper = lane & distance != 0
        for low in (0, 3 - distance):
            high = low + distance
            a, b = words[low], words[high]
            other = arch.shuffle_sync_bfly(Int32(cutlass.select_(is_upper, a, b)), distance)
            words[low] = Int32(cutlass.select_(is_upper, other, a))
            words[high] = Int32(cutlass.select_(is_upper, b, other))


def send_bulk(source: Any, to: Any, barrier: Any, num_bytes: Int32) -> None:  # noqa: ANN401
    """Send bytes to another block of the cluster, whose barrier counts them when they are there."""
    arch.inline_ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[
            Int32(to.toint()),
            Int32(source.toint()),
            num_bytes,
            Int32(barrier.toint()),
        ],
    )
