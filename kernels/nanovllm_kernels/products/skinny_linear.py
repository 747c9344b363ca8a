"""GEMM of up to 128 rows, for Hopper, in CuTe DSL: all projections of a layer around its attention.

Computes y = f(x) W^T in bfloat16, where f is the identity or an RMSNorm. The epilogue is nothing,
SiLU-mul, or the addition of the residual stream. The references are in skinny_cases.py.

Decision: the time is that of reading W, so each multiprocessor gets an equal part of W at once
(split-K in clusters). A thread block has some features of W and a slice of their inputs. Blocks
with the same features form a cluster. Each of them finishes an equal share of these features. Its
peers send their partial sums to its shared memory in one bulk copy. Stores of single numbers took
10 us.

Decision: the norm has no launch of its own. Its weight is applied to x in registers, between shared
memory and the tensor cores. The squares are summed there, too. The norm's scale, a factor of a row
of y, is applied at the end. The preceding GEMM has already added the residual stream, so x is the
only input.

Decision: if a slice is short, a block takes less than half of a multiprocessor's shared memory.
Then blocks of the next launch start while the last ones of this launch still run. They load their
weights before x is ready (programmatic dependent launch). A long slice, of a launch with one block
per multiprocessor, gets all of it: 14,336 features of 5,120 inputs take 35.7 us in place of 37.8.

Decision: if there are three blocks per multiprocessor, each takes a third of its shared memory, so
that all run at once. Prefetching more weights into the L2 cache before x is ready gains nothing in
any model. It made a token of 30B-A3B 3 to 8 % slower, and of 8B 1 to 14 %.

Decision: a block finishes a multiple of eight features, stored in 16 bytes. A weight that this
cannot divide evenly, or into small blocks only, is divided by two features. For example, 12,800
features are 128 blocks of 100, stored in 4 bytes. Each half of a gated block begins on eight lines
of shared memory, as the tensor cores require. The lines between the halves are never set, and their
sums are ignored.

Decision: large blocks are better than small ones that use the multiprocessors equally well. Each
block loads x and multiplies all its rows by the norm's weight. 34,816 gated features of 5,120
inputs took 119 us in 1,088 blocks of 32, which is 3.0 TB/s, and take 86 us in 256 blocks of 136.

Decision: the last block may be partial, so weights such as 16,480 = 32 x 515 features have blocks
of 128 (41 us in place of 58). It begins in the block before and does not store that block's
features. If it ended beyond W instead, its copies would be slow. 12,352 features of 2,048 inputs
take 14.8 us in 129 blocks of 96, and took 16.4 in 386 of 32.

Decision: x is loaded in TMA boxes of 16 rows. Boxes that end far after x's last row are slow: 8
rows in a box of 64 took twice the time of 64 rows.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma
from torch import Tensor

from nanovllm_kernels.compile_cache import CachedCompile, Compiled
from nanovllm_kernels.like import compiled, like
from nanovllm_kernels.ring_cute import READ_ONCE, next_stage, of_four, send_bulk

DEEP = 64  # inputs in a swizzled 128-byte line of shared memory
LINE_BYTES = 2 * DEEP
BOX_ROWS = 16
GROUP_ROWS = 64  # rows of x per wgmma of four warps
MOST_ROWS = 2 * GROUP_ROWS
LARGE = 16 * 1024 * 1024  # elements of W, above which more than GROUP_ROWS rows are faster
LEAST_FEATURES, MOST_FEATURES = 32, 144  # of a block
MOST_OF_MANY_ROWS = 192  # features of a block with more than GROUP_ROWS rows
MOST_PARTIAL = 128  # features of a block if the last one is partial
X_FEATURES = 8  # features of W that take as long as a block's x and its norm
ODD_TIME = 1.1  # factor of time that a partial block or stores of less than 16 bytes must save
PROCESSORS = 132
EVEN = 0.9  # minimum utilisation of multiprocessors
ROOM_BYTES = {1: 225 * 1024, 2: 112 * 1024, 3: 74 * 1024}  # by blocks per multiprocessor
# Inputs of a slice from which more loads in flight are better than an early start of the next
# launch; twice as many with a norm.
LONG = 2048
LOG2_E = math.log2(math.e)


class Kind(NamedTuple):
    normed: bool = False
    gated: bool = False
    added: bool = False


class Shape(NamedTuple):
    """Division of a product among the thread blocks of a cluster."""

    features: int  # rows of W; if gated, half of them gates and half the matching up features
    splits: int  # thread blocks per cluster, each with a slice of the inputs
    together: int = 2  # blocks that fit a multiprocessor
    groups: int = 1  # groups of GROUP_ROWS rows that a block multiplies


@cache
def shape_of(
    num_features: int, width: int, kind: Kind, num_rows: int, *, ordered: bool = False
) -> Shape | None:
    """Return the shape, or None if other kernels are faster or W cannot be cut evenly.

    `ordered`: all inputs of a sum are in one slice, so they are added in their order.
    """
    has_many_rows = num_rows > GROUP_ROWS
    splits = 1 if num_features >= 8192 or ordered else 2 if num_features >= 4096 else 4
    is_small = has_many_rows and num_features * width < LARGE
    if num_rows > MOST_ROWS or is_small or width % (DEEP * splits):
        return None
    most = min(num_features, MOST_OF_MANY_ROWS if has_many_rows else MOST_FEATURES)
    most_partial = 0 if has_many_rows or kind.gated or num_features % 8 else MOST_PARTIAL
    unit = splits * (1 + kind.gated)
    block_features = most_even(num_features, splits, most, unit, most_partial=most_partial)
    waves = waves_of(num_features, splits, block_features) if block_features else 0
    if not block_features or (has_many_rows and waves > 1):
        return None
    is_long = width // splits >= LONG * (1 + kind.normed)
    together = 1 if has_many_rows or (is_long and waves == 1) else 3 if waves == 3 else 2
    return Shape(block_features, splits, together, 1 + has_many_rows)


def most_even(num_features: int, splits: int, most: int, unit: int, *, most_partial: int) -> int:
    """Return the features of a block that take the least time, a multiple of 2 * `unit`.

    The time is that of the busiest multiprocessor, which loads W and, for each block, x. Up to
    `most` features divide W. Up to `most_partial`, the last block may have fewer. Return 0 if the
    utilisation would be below EVEN.
    """
    least, block_features = math.inf, 0
    for features in range(2 * unit, most + 1, 2 * unit):
        is_partial, has_short_stores = num_features % features > 0, features % (8 * unit) > 0
        may_be_partial = features <= most_partial and not has_short_stores
        if features < LEAST_FEATURES or (is_partial and not may_be_partial):
            continue
        waves = waves_of(num_features, splits, features)
        time = waves * (features + X_FEATURES) * (ODD_TIME if is_partial or has_short_stores else 1)
        is_even = num_features * splits >= EVEN * waves * PROCESSORS * features
        if is_even and time <= least:
            least, block_features = time, features
    return block_features


def waves_of(num_features: int, splits: int, block_features: int) -> int:
    """Return the number of blocks of the busiest multiprocessor."""
    return -(-(-(-num_features // block_features) * splits) // PROCESSORS)


@dataclass(frozen=True, slots=True)
class SkinnyLinear:
    """Kernels of layers.products.Skinny. The first product compiles for a second or two.

    `ordered`: sums are in the order of the inputs, as the library's for any number of rows, bit by
    bit. So there is no norm, which would round otherwise, no gate and no addition.
    """

    ordered: bool = False

    def fits(
        self,
        num_rows: int,
        weight_ND: Tensor,
        *,
        normed: bool = False,
        gated: bool = False,
        added: bool = False,
    ) -> bool:
        if num_rows > MOST_ROWS or weight_ND.dtype != torch.bfloat16:
            return False  # early exit: large steps run without a CUDA graph
        kind = Kind(normed, gated, added)
        if self.ordered and any(kind):
            return False
        return shape_of(*weight_ND.shape, kind, num_rows, ordered=self.ordered) is not None

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        return self._launch(Kind(), x_TD, weight_ND)

    def linear_add(self, x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor) -> Tensor:
        """Add to the residual stream in place and return it."""
        return self._launch(Kind(added=True), x_TD, weight_ND, residual_TN=residual_TN)

    def norm_linear(
        self,
        x_TD: Tensor,
        norm_weight_D: Tensor,
        eps: float,
        weight_ND: Tensor,
        *,
        gated: bool = False,
    ) -> Tensor:
        return self._launch(Kind(True, gated), x_TD, weight_ND, norm_weight_D, eps)

    def _launch(
        self,
        kind: Kind,
        x_TD: Tensor,
        weight_ND: Tensor,
        norm_weight_D: Tensor | None = None,
        eps: float = 0.0,
        residual_TN: Tensor | None = None,
    ) -> Tensor:
        num_rows, num_features = len(x_TD), len(weight_ND)
        shape = shape_of(num_features, x_TD.shape[1], kind, num_rows, ordered=self.ordered)
        assert shape is not None and x_TD.stride(1) == weight_ND.stride(1) == 1
        y_TN = residual_TN
        if y_TN is None:
            y_TN = x_TD.new_empty(num_rows, num_features // (1 + kind.gated))
        run = compile_product(*shape, *kind)
        run(x_TD, weight_ND, y_TN, norm_weight_D, residual_TN, eps)
        return y_TN


SKINNY_LINEAR = SkinnyLinear()
ORDERED_LINEAR = SkinnyLinear(ordered=True)


@CachedCompile
def compile_product(
    features: int, splits: int, together: int, groups: int, normed: bool, gated: bool, added: bool
) -> Compiled:
    """Compile a product of a Shape and a Kind. Needs no GPU if CUTE_DSL_ARCH is set."""

    def of_rank(rank: int) -> Any:  # noqa: ANN401
        return like(BFloat16, *(cute.sym_int() for _ in range(rank)), divisibility=8)

    return compiled(
        Product(Shape(features, splits, together, groups), Kind(normed, gated, added)),
        of_rank(2),
        of_rank(2),
        of_rank(2),
        of_rank(1) if normed else None,
        of_rank(2) if added else None,
        Float32(0),
    )


def compiled_for(
    weight_ND: Tensor, kind: Kind, *, ordered: bool = False
) -> set[tuple[tuple[int, ...], CachedCompile[*tuple[int, ...]]]]:
    """Return the compile jobs of a weight, for all row counts: (arguments, function)."""
    kind = Kind() if ordered else kind
    counts = range(1, MOST_ROWS + 1)
    shapes = {shape_of(*weight_ND.shape, kind, n, ordered=ordered) for n in counts}
    return {((*shape, *kind), compile_product) for shape in shapes if shape is not None}


class Shared(NamedTuple):
    """Shared memory of a thread block."""

    x: cute.Tensor  # [row, input, stage]
    weight: cute.Tensor  # [feature, input, stage]
    norm_weight: cute.Tensor | None  # [input, stage]
    full: cute.Pointer  # mbarriers: the stage is filled
    empty: cute.Pointer  # mbarriers: all warps have read the stage
    own: cute.Tensor  # [feature of the share, row, target block]: this slice's sums
    parts: cute.Tensor  # [feature of this block's share, row, slice]
    landed: cute.Pointer  # mbarrier: all of `parts` has arrived


class Size(NamedTuple):
    rows: Int32
    active: Int32  # rows, rounded up to a whole box
    steps: Int32  # per slice


class Product:
    def __init__(self, shape: Shape, kind: Kind) -> None:
        self.kind, self.features, self.splits = kind, shape.features, shape.splits
        self.rows, self.threads = GROUP_ROWS * shape.groups, 128 * shape.groups
        self.halves = 1 + self.kind.gated
        self.box = self.features // self.halves  # adjacent features in W
        self.share = self.box // self.splits  # of these features, those that a block finishes
        assert self.share % 2 == 0, shape
        self.vector = math.gcd(self.share, 8)  # features that a thread finishes at a time
        self.pitch = (self.box + 7) // 8 * 8  # lines from a half to the next
        self.columns = self.pitch * self.halves  # of the tensor cores' product
        width = self.share * self.halves
        self.squares = width  # column of the sum of squares, after the sums of a row
        self.padded = width + 16 - (width + 8) % 16  # 8 past a multiple of 16: few bank conflicts
        self.part = self.rows * self.padded
        self.step_bytes = LINE_BYTES * (self.features + self.kind.normed)  # without x
        parts = 4 * self.splits * self.part
        room = ROOM_BYTES[shape.together] - 1024
        room -= parts if self.splits > 1 else 0
        lines = self.rows + self.columns
        self.stages = min(12, room // (LINE_BYTES * (lines + self.kind.normed)))
        assert self.stages >= 2, shape
        ring = self.stages * LINE_BYTES * lines
        self.ring_bytes = max(ring, parts)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        y: cute.Tensor,
        norm_weight: cute.Tensor | None,
        residual: cute.Tensor | None,
        eps: Float32,
        stream: Any,  # noqa: ANN401
    ) -> None:
        line = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        rings, boxes = [], []
        for matrix, size, box in ((x, self.rows, BOX_ROWS), (weight, self.columns, self.box)):
            rings.append(cute.tile_to_shape(line, (size, DEEP, self.stages), (0, 1, 2)))
            lines = cute.make_layout((box, DEEP), stride=(DEEP, 1))
            one = cute.make_composed_layout(line.inner, 0, lines)
            op = cpasync.CopyBulkTensorTileG2SOp()
            info = cpasync.make_tiled_tma_atom(op, matrix, one, (box, DEEP))
            boxes.append((info[0], info[1]))
        source = warpgroup.OperandSource
        mma = make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (self.rows // GROUP_ROWS, 1, 1),
            tiler_mn=(GROUP_ROWS, self.columns),
            a_source=source.RMEM if self.kind.normed else source.SMEM,
        )
        rows = x.shape[0]
        active = (rows + BOX_ROWS - 1) // BOX_ROWS * BOX_ROWS
        size = Size(rows, active, x.shape[1] // (DEEP * self.splits))
        self.kernel(*boxes, y, norm_weight, residual, eps, *rings, mma, size).launch(
            grid=[self.splits, (weight.shape[0] + self.features - 1) // self.features, 1],
            block=[self.threads + 32, 1, 1],
            cluster=[self.splits, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x_box: tuple,
        weight_box: tuple,
        y: cute.Tensor,
        norm_weight: cute.Tensor | None,
        residual: cute.Tensor | None,
        eps: Float32,
        x_ring: cute.ComposedLayout,
        weight_ring: cute.ComposedLayout,
        factor: Any,  # noqa: ANN401, the `mma` of compute
        size: Size,
    ) -> None:
        shared = self.allocate(x_ring, weight_ring)
        nth_warp = arch.make_warp_uniform(arch.warp_idx())
        is_loader = nth_warp == self.threads // 32
        if is_loader:
            with arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    arch.mbarrier_init(shared.full + stage, 1)
                    arch.mbarrier_init(shared.empty + stage, self.threads // 32)
                arch.mbarrier_init(shared.landed, 1)
            arch.mbarrier_init_fence()
            with arch.elect_one():
                num_bytes = size.active * (4 * self.padded * self.splits)
                arch.mbarrier_arrive_and_expect_tx(shared.landed, num_bytes)
        if cutlass.const_expr(self.splits > 1):
            arch.cluster_arrive()
        arch.sync_threads()
        if is_loader:
            weight = cute.domain_offset((self.first_feature(y), 0), weight_box[1])
            self.load(x_box, (weight_box[0], weight), norm_weight, shared, size)
            if cutlass.const_expr(self.splits > 1):
                arch.cluster_wait()
                arch.cluster_arrive()
        else:
            self.compute(shared, factor, size)
            self.finish(y, residual, eps, shared, size)
        if cutlass.const_expr(self.splits > 1):
            arch.cluster_wait()  # peers have received all sums, so this block's memory may be freed

    def first_feature(self, y: cute.Tensor) -> Int32:
        """Return the block's first feature. The last block may begin in the one before."""
        return cutlass.min(arch.block_idx()[1] * self.box, y.shape[1] - self.box)

    def allocate(self, x_ring: cute.ComposedLayout, weight_ring: cute.ComposedLayout) -> Shared:
        smem = cutlass.utils.SmemAllocator()
        ring = smem.allocate(self.ring_bytes, 1024)
        weight = ring + LINE_BYTES * self.stages * self.rows
        strides = (1, self.padded, self.part)
        sums = cute.make_layout((self.padded, self.rows, self.splits), stride=strides)
        own = cute.make_tensor(cute.recast_ptr(ring, dtype=Float32), sums)
        norm_weight = None
        if self.kind.normed:
            norm_weight = smem.allocate_tensor(BFloat16, cute.make_layout((DEEP, self.stages)), 128)
        return Shared(
            x=cute.make_tensor(cute.recast_ptr(ring, x_ring.inner, BFloat16), x_ring.outer),
            weight=cute.make_tensor(
                cute.recast_ptr(weight, weight_ring.inner, BFloat16), weight_ring.outer
            ),
            norm_weight=norm_weight,
            full=smem.allocate_array(Int64, self.stages),
            empty=smem.allocate_array(Int64, self.stages),
            own=own,
            parts=smem.allocate_tensor(Float32, sums, 128) if self.splits > 1 else own,
            landed=smem.allocate_array(Int64, 1),
        )

    @cute.jit
    def load(
        self,
        x_box: tuple,
        weight_box: tuple,
        norm_weight: cute.Tensor | None,
        shared: Shared,
        size: Size,
    ) -> None:
        """Fill the ring with this block's slice. Weights come first, since x may not be ready."""
        x_copy = self.copy_of(x_box, shared.x, BOX_ROWS, BOX_ROWS)
        weight_copy = self.copy_of(weight_box, shared.weight, self.box, self.pitch)
        first = arch.block_idx()[0] * size.steps
        early = cutlass.min(size.steps, self.stages)
        for i in cutlass.range(0, early, unroll=1):
            self.load_weight(weight_copy, norm_weight, shared, size, first + i, i)
        arch.griddepcontrol_wait()
        for i in cutlass.range(0, early, unroll=1):
            self.load_x(x_copy, shared, size, first + i, i)
        stage, phase = Int32(0), Int32(0)
        for i in cutlass.range(early, size.steps, unroll=1):
            arch.mbarrier_wait(shared.empty + stage, phase)
            self.load_weight(weight_copy, norm_weight, shared, size, first + i, stage)
            self.load_x(x_copy, shared, size, first + i, stage)
            stage, phase = next_stage(stage, phase, self.stages)
        arch.griddepcontrol_launch_dependents()

    def copy_of(self, box: tuple, ring: cute.Tensor, rows: int, pitch: int) -> tuple:
        """Return a copy's atom, source [nth box, step], and target [nth box, stage].

        Boxes of `rows` lines begin every `pitch` lines of a stage.
        """
        atom, matrix = box
        cpasync.prefetch_descriptor(atom)
        lines = cute.size(ring, mode=[0])
        places = cute.make_layout(
            ((rows, DEEP), lines // pitch, self.stages),
            stride=((DEEP, 1), pitch * DEEP, lines * DEEP),
        )
        to, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.make_tensor(ring.iterator, places),
            cute.group_modes(cute.flat_divide(matrix, (rows, DEEP)), 0, 2),
        )
        return atom, source, to

    @cute.jit
    def load_weight(
        self,
        copy: tuple,
        norm_weight: cute.Tensor | None,
        shared: Shared,
        size: Size,
        step: Int32,
        stage: Int32,
    ) -> None:
        atom, source, to = copy
        full = shared.full + stage
        with arch.elect_one():
            num_bytes = size.active * LINE_BYTES + self.step_bytes
            arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
        for half in cutlass.range_constexpr(self.halves):
            cute.copy(
                atom,
                source[None, half * arch.grid_dim()[1], step],
                to[None, half, stage],
                tma_bar_ptr=full,
                cache_policy=Int64(READ_ONCE),
            )
        if cutlass.const_expr(self.kind.normed):
            bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16)
            norm_weights = cute.local_tile(norm_weight, (DEEP,), (step,))
            with arch.elect_one():
                cute.copy(bulk, norm_weights, shared.norm_weight[None, stage], mbar_ptr=full)

    @cute.jit
    def load_x(self, copy: tuple, shared: Shared, size: Size, step: Int32, stage: Int32) -> None:
        atom, source, to = copy
        for nth in cutlass.range_constexpr(self.rows // BOX_ROWS):
            if nth * BOX_ROWS < size.rows:
                cute.copy(
                    atom,
                    source[None, nth, step],
                    to[None, nth, stage],
                    tma_bar_ptr=shared.full + stage,
                )

    @cute.jit
    def compute(self, shared: Shared, mma: cute.TiledMma, size: Size) -> None:
        """Compute this slice's sums for all features of the cluster, and sums of x's squares."""
        thread = arch.thread_idx()[0]
        slice_ = mma.get_slice(thread)
        weight = slice_.make_fragment_B(slice_.partition_B(shared.weight))
        sums = cute.make_rmem_tensor(slice_.partition_shape_C((self.rows, self.columns)), Float32)
        sums.fill(0.0)
        squares = cute.make_rmem_tensor(2, Float32)
        squares.fill(0.0)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        if cutlass.const_expr(self.kind.normed):
            plain = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
            x_copy = cute.make_tiled_copy_A(plain, mma).get_slice(thread)
            x_from = x_copy.partition_S(shared.x)
            one = cute.make_tensor(shared.x.iterator, cute.select(shared.x.layout, [0, 1]))
            x = slice_.make_fragment_A(slice_.partition_A(one))
        else:
            x = slice_.make_fragment_A(slice_.partition_A(shared.x))
        stage, phase = Int32(0), Int32(0)
        for _ in cutlass.range(0, size.steps, unroll=1):
            arch.mbarrier_wait(shared.full + stage, phase)
            if cutlass.const_expr(self.kind.normed):
                cute.copy(x_copy, x_from[None, None, None, stage], x_copy.retile(x))
                self.apply_norm_weight(x, shared.norm_weight[None, stage], squares)
            warpgroup.fence()
            for k in cutlass.range_constexpr(DEEP // 16):
                at = (None, None, k) if self.kind.normed else (None, None, k, stage)
                cute.gemm(atom, sums, x[at], weight[None, None, k, stage], sums)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            arch.sync_warp()
            with arch.elect_one():
                arch.mbarrier_arrive(shared.empty + stage)
            stage, phase = next_stage(stage, phase, self.stages)
        arch.barrier(barrier_id=1, number_of_threads=self.threads)  # all warps have read the ring
        self.store_sums(sums, squares, shared, size)

    def apply_norm_weight(
        self, x: cute.Tensor, norm_weight: cute.Tensor, squares: cute.Tensor
    ) -> None:
        """Multiply a thread's elements of x by the norm's weight, and add their squares.

        A thread has eight elements per 16 inputs: for each half, two inputs of two rows.
        """
        pair = 2 * (arch.lane_idx() % 4)
        for k in range(DEEP // 16):
            for n in range(8):
                value = x[8 * k + n].to(Float32)
                squares[n // 2 % 2] += value * value
                factor = norm_weight[16 * k + 8 * (n // 4) + pair + n % 2].to(Float32)
                x[8 * k + n] = (value * factor).to(BFloat16)

    @cute.jit
    def store_sums(
        self, sums: cute.Tensor, squares: cute.Tensor, shared: Shared, size: Size
    ) -> None:
        """Store the sums to the memory of the ring, ordered by share."""
        thread, lane = arch.thread_idx()[0], arch.lane_idx()
        row = thread // 32 * 16 + lane // 4
        if thread // 32 * 16 < size.active:
            pair = 2 * (lane % 4)
            for n in cutlass.range_constexpr(self.columns // 2):
                half, line = n // 4 * 8 // self.pitch, n // 4 * 8 % self.pitch
                if line + pair < self.box:
                    peer, place = self.place_of(line, pair)
                    column = half * self.share + place + n % 2
                    shared.own[column, row + n // 2 % 2 * 8, peer] = sums[n]
            if cutlass.const_expr(self.kind.normed):
                for n in cutlass.range_constexpr(2):
                    square = squares[n]
                    square = of_four(operator.add, square)
                    if lane % 4 == 0:
                        for peer in cutlass.range_constexpr(self.splits):
                            shared.own[self.squares, row + 8 * n, peer] = square
        self.exchange(shared, size)

    def place_of(self, line: int, pair: Int32) -> tuple:
        """Return the block that finishes feature `line` + `pair`, and its place in the share."""
        if self.share % 8 == 0:  # eight features have one block
            return line // self.share, line % self.share + pair
        return (line + pair) // self.share, (line + pair) % self.share

    @cute.jit
    def exchange(self, shared: Shared, size: Size) -> None:
        """Send each share of the sums to its block, and wait for this block's own."""
        thread = arch.thread_idx()[0]
        if cutlass.const_expr(self.splits == 1):
            arch.barrier(barrier_id=1, number_of_threads=self.threads)
        else:
            arch.fence_view_async_shared()
            arch.barrier(barrier_id=1, number_of_threads=self.threads)
            arch.cluster_wait()  # the peers have initialised their barriers
            if thread < 32:
                with arch.elect_one():
                    for peer in cutlass.range_constexpr(self.splits):
                        self.send(shared, peer, size.active * (4 * self.padded))
            arch.mbarrier_wait(shared.landed, 0)
            arch.cluster_arrive()

    def send(self, shared: Shared, peer: int, num_bytes: Int32) -> None:
        nth = arch.block_idx()[0]
        source = shared.own.iterator + peer * self.part
        to = arch.map_dsmem_ptr(shared.parts.iterator + nth * self.part, peer)
        send_bulk(source, to, arch.map_dsmem_ptr(shared.landed, peer), num_bytes)

    @cute.jit
    def finish(
        self,
        y: cute.Tensor,
        residual: cute.Tensor | None,
        eps: Float32,
        shared: Shared,
        size: Size,
    ) -> None:
        """Sum the slices of this block's share of features, and store y."""
        if cutlass.const_expr(self.kind.added):
            arch.griddepcontrol_wait()  # the preceding launch may write `residual`; no delay here
        count, per_row = self.vector, self.share // self.vector
        first = self.first_feature(y) // count + arch.block_idx()[0] * per_row
        own = arch.block_idx()[1] * (self.box // count)
        width = Float32(size.steps * (self.splits * DEEP))
        for at in cutlass.range(arch.thread_idx()[0], size.rows * per_row, self.threads, unroll=1):
            row, nth_some = at // per_row, at % per_row
            if first + nth_some >= own:  # not one of the block before
                result = self.total(shared, eps, width, row, nth_some)
                if cutlass.const_expr(self.kind.added):
                    added = some_of(residual[row, None], count, first + nth_some).load()
                    result += added.to(Float32)
                some_of(y[row, None], count, first + nth_some).store(result.to(BFloat16))

    def total(
        self, shared: Shared, eps: Float32, width: Float32, row: Int32, nth_some: Int32
    ) -> cute.TensorSSA:
        """Return `vector` features of a row: the slices' sum, with the norm's scale and gate."""
        count, per_row = self.vector, self.share // self.vector
        totals = []
        for half in range(self.halves):
            total = cute.full(count, 0.0, Float32)
            for nth in range(self.splits):
                part = shared.parts[None, row, nth]
                total += some_of(part, count, half * per_row + nth_some).load()
            totals.append(total)
        if self.kind.normed:
            square = Float32(0)
            for nth in range(self.splits):
                square += shared.parts[self.squares, row, nth]
            scale = cute.math.rsqrt(square / width + eps)
            totals = [total * scale for total in totals]
        result = totals[0]
        if self.kind.gated:
            result = result / (1.0 + cute.math.exp2(result * -LOG2_E)) * totals[1]
        return result


def some_of(line: cute.Tensor, count: int, nth: Int32) -> cute.Tensor:
    return cute.local_tile(line, (count,), (nth,))
