"""GEMM of up to 16 rows with block-fp8 weights, for Hopper, in CuTe DSL: y = f(x) W^T.

f is the identity or an RMSNorm. The epilogue is nothing, SiLU-mul, or the addition of the residual
stream. The references are in few_fp8_cases.py. Weights that `shape_of` does not take are multiplied
with rows that are quantised first, in few_fp8.py; no shipped recipe has one.

Times here are of an H200, in us per layer of Qwen3, of four products that depend on each other,
with 1 / 4 / 8 / 16 rows. A Triton kernel, which quantised rows in its loop, took 67.8 / 69.2 / 71.3
/ 76.0 for 8B and 27.7 / 28.0 / 28.6 / 30.3 for 0.6B. This one took 52.3 / 55.4 / 55.9 / 64.3 and
12.6 / 15.3 / 15.4 / 20.3; blocks of gate_up of 8B had 37 KB for more than two rows then.

One warp loads by TMA and four warps multiply with wgmma. TILE rows of W are the tensor cores'
operand of 64 rows, and x that of 8 or 16.

Decision: a launch costs more than its bytes, because memory is idle from the last load of a launch
to the first load of the next one. So a block releases the next launch at its start, and loads its
weights before it waits for x (programmatic dependent launch). A block takes so little shared memory
that blocks of the next launch fit next to those of this one. With twice the memory, 8B takes 59.8
in place of 55.1, and 57.9 if the next launch is released only after the last load. A long slice
gets twice the memory nevertheless: gate_up of 8B alone takes 23.8 us in place of 27.8.

Decision: split-K is in clusters. A block of a cluster finishes an equal share of the features, and
its peers send their sums to its shared memory. There are no tickets and no sums in global memory.

Decision: with up to OWN_ROWS rows, each block quantises its slice of x once, while its first
weights arrive. With more rows, a launch before this one does, since each block would repeat that
work. One row takes 52.3 (8B) and 12.6 (0.6B) in place of 55.1 and 15.1 with a separate launch, two
rows 54.1 and 13.1 in place of 54.2 and 14.6. Eight rows would take 61.9 and 21.2 in place of 55.9
and 15.4.

Decision: the norm's weight is applied before quantisation, and its factor, common to a row, after
it. Nothing is rounded to 16 bits in between. With such a rounding, e4m3 numbers between two values
often go the other way, and errors reach 2.2 times the limit of check-kernels.
"""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma
from torch import Tensor

from nanovllm_kernels.compile_cache import CachedCompile, Compiled
from nanovllm_kernels.fp8_reference import BLOCK, FEW_ROWS, FP8, LARGEST, Scaled
from nanovllm_kernels.like import compiled, like
from nanovllm_kernels.products.quantise import few_quantise
from nanovllm_kernels.products.skinny_linear import PROCESSORS, Kind, some_of
from nanovllm_kernels.ring_cute import READ_ONCE, next_stage, send_bulk

DEEP = BLOCK  # inputs per scale; one 128-byte swizzled line of shared memory
TILE = 64  # rows of W per block; if gated, half of them gates and half the matching up features
THREADS = 128  # that multiply; a warp in addition loads
OWN_ROWS = 2
MOST_SPLITS = 8  # blocks of a cluster
MOST_STEPS = THREADS  # each thread loads a scale of the slice
AT_ONCE = 3  # blocks per multiprocessor up to which the inputs are split
LONG = 32  # steps of a slice; from here on more loads in flight are better than an early start
ROOM = {1: 74, 2: 55, 3: 37}  # KB of shared memory by a launch's blocks per multiprocessor
LONG_ROOM, LEAST_ROOM, TALL_ROOM = 74, 37, 44  # three, six and five blocks per multiprocessor
LEAST_STAGES, MOST_STAGES = 3, 24
PART = 16  # threads that quantise a block of 128 inputs, eight each
PARTS = THREADS // PART
LOG2_E = math.log2(math.e)
HUGE = 2.0**127  # largest factor, in place of infinity


class Shape(NamedTuple):
    """Division of a product among thread blocks."""

    rows: int  # of x in the tensor cores' operand: 8 or 16
    splits: int  # thread blocks per cluster, each with a slice of the inputs
    room: int  # KB of shared memory of a block
    steps: int  # blocks of 128 inputs in a slice
    own: bool  # the block quantises its slice of x; otherwise x is quantised

    @property
    def part(self) -> int:
        """Numbers that a block sends to another: for each row its sums, and sums of squares."""
        return self.rows * (TILE // self.splits + 8)

    @property
    def stages(self) -> int:
        """Depth of the load pipeline."""
        parts = 4 * self.splits * self.part if self.splits > 1 else 0
        scales = 4 * self.steps * (self.rows + 2)
        own = self.rows * self.steps * DEEP if self.own else 0
        room = 1024 * self.room - 1024 - parts - scales - own
        return min(MOST_STAGES, room // ((TILE + (not self.own) * self.rows) * DEEP))


@cache
def shape_of(num_lines: int, width: int, num_rows: int) -> Shape | None:
    """Return the division of a weight of `num_lines` rows, or None if it cannot be divided."""
    if num_lines % TILE or width % DEEP or not 0 < num_rows <= FEW_ROWS:
        return None
    tiles, blocks, splits = num_lines // TILE, width // DEEP, 1
    while (
        2 * splits <= MOST_SPLITS
        and blocks % (2 * splits) == 0
        and blocks >= 4 * splits  # two steps or more
        and 2 * splits * tiles <= AT_ONCE * PROCESSORS
    ):
        splits *= 2
    steps, most = blocks // splits, -(-tiles * splits // PROCESSORS)
    if steps > MOST_STEPS:
        return None
    rows = 8 if num_rows <= 8 else 16
    room = ROOM.get(most, LEAST_ROOM)
    if steps >= LONG and most <= AT_ONCE:
        room = LONG_ROOM
    elif steps >= LONG or rows > 8:
        room = max(room, TALL_ROOM)
    shapes = (Shape(rows, splits, room, steps, own) for own in (num_rows <= OWN_ROWS, False))
    return next((shape for shape in shapes if shape.stages >= LEAST_STAGES), None)


class FewFp8:
    """Kernels of layers.products.Skinny for Scaled weights. They quantise the rows."""

    def fits(self, num_rows: int, weight: Scaled, **_: bool) -> bool:
        is_even = weight.dtype == FP8 and weight.block_rows == BLOCK
        return is_even and shape_of(*weight.shape, num_rows) is not None

    def linear(self, x_TD: Tensor, weight: Scaled) -> Tensor:
        return product(x_TD, weight)

    def linear_add(self, x_TD: Tensor, weight: Scaled, residual_TN: Tensor) -> Tensor:
        """Add to the residual stream in place."""
        return product(x_TD, weight, residual_TN=residual_TN)

    def norm_linear(
        self,
        x_TD: Tensor,
        norm_weight_D: Tensor,
        eps: float,
        weight: Scaled,
        *,
        gated: bool = False,
    ) -> Tensor:
        return product(x_TD, weight, norm_weight_D, eps, gated=gated)


FEW_FP8 = FewFp8()


def product(
    x_TD: Tensor,
    weight: Scaled,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Return y_TN in bfloat16. If there is a residual stream, add to it in place and return it."""
    shape = shape_of(*weight.shape, len(x_TD))
    assert shape is not None and x_TD.stride(1) == 1
    kind, y_TN = Kind(norm_weight_D is not None, gated, residual_TN is not None), residual_TN
    if y_TN is None:
        num_features = len(weight.weight_ND) // (1 + gated)
        y_TN = x_TD.new_empty(len(x_TD), num_features, dtype=torch.bfloat16)
    run, x_scale_BT = compile_product(*arguments(shape, kind)), None
    if not shape.own:
        x_TD, x_scale_BT = few_quantise(x_TD, norm_weight_D, eps)
        norm_weight_D = None
    run(x_TD, x_scale_BT, weight.weight_ND, weight.scale, y_TN, residual_TN, norm_weight_D, eps)
    return y_TN


def arguments(shape: Shape, kind: Kind) -> tuple[int, ...]:
    """Return the arguments of `compile_product`. A norm before a separate launch is not in it."""
    return *shape, *kind._replace(normed=kind.normed and shape.own)


@CachedCompile
def compile_product(
    rows: int,
    splits: int,
    room: int,
    steps: int,
    own: bool,
    normed: bool,
    gated: bool,
    added: bool,
) -> Compiled:
    """Compile a product of a Shape and a Kind. Needs no GPU if CUTE_DSL_ARCH is set."""

    def matrix(dtype: Any, divisibility: int) -> Any:  # noqa: ANN401
        columns = cute.sym_int(divisibility=divisibility)
        return like(dtype, cute.sym_int(), columns, divisibility=divisibility)

    return compiled(
        Product(Shape(rows, splits, room, steps, own), Kind(normed, gated, added)),
        matrix(BFloat16, 8) if own else matrix(Float8E4M3FN, 16),
        None if own else matrix(Float32, 1),
        matrix(Float8E4M3FN, 16),
        matrix(Float32, 1),
        matrix(BFloat16, 8),
        matrix(BFloat16, 8) if added else None,
        like(BFloat16, cute.sym_int(divisibility=8), divisibility=8) if normed else None,
        Float32(0),
    )


def compiled_for(
    weight: Scaled, kind: Kind
) -> set[tuple[tuple[int, ...], CachedCompile[*tuple[int, ...]]]]:
    """Return the compile jobs of a weight, for all row counts: (arguments, function)."""
    if weight.block_rows != BLOCK:
        return set()
    shapes = {shape_of(*weight.shape, rows) for rows in range(1, FEW_ROWS + 1)}
    return {(arguments(shape, kind), compile_product) for shape in shapes if shape is not None}


class Shared(NamedTuple):
    """Shared memory of a thread block."""

    x: cute.Tensor  # [row, input, stage], or all steps if the block quantises x
    x_words: cute.Tensor  # the same memory, as words
    x_scale: cute.Tensor  # [row, step]
    weight: cute.Tensor  # [line, input, stage]
    w_scale: cute.Tensor  # [step, half]
    squares: cute.Tensor | None  # [row, part of the threads]: sums of squares
    full: cute.Pointer  # mbarriers: the stage is filled
    empty: cute.Pointer  # mbarriers: all warps have read the stage
    own: cute.Tensor  # [feature of the share, row, target block]: this slice's sums
    parts: cute.Tensor  # [feature of this block's share, row, slice]
    landed: cute.Pointer  # mbarrier: all of `parts` has arrived


class Product:
    def __init__(self, shape: Shape, kind: Kind) -> None:
        assert shape.stages >= LEAST_STAGES and (shape.own or not kind.normed), (shape, kind)
        self.rows, self.splits, self.own, self.steps = (
            shape.rows,
            shape.splits,
            shape.own,
            shape.steps,
        )
        self.kind, self.part, self.stages = kind, shape.part, shape.stages
        self.halves = 1 + kind.gated
        self.box = TILE // self.halves  # adjacent features in W
        self.share = self.box // self.splits  # of these features, those that a block finishes
        self.vector = math.gcd(self.share, 8)  # features that a thread finishes at a time
        self.squares = self.share * self.halves  # column of the sum of squares, after the sums
        self.padded = self.squares + 8
        self.stage_bytes = (TILE + (not self.own) * self.rows) * DEEP
        self.ring_bytes = max(self.stages * TILE * DEEP, 4 * self.splits * self.part)
        self.units = -(-self.steps // PARTS)  # blocks of a row that a thread quantises
        self.early = min(self.steps, self.stages)  # steps that are loaded at once

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        x_scale: cute.Tensor | None,
        weight: cute.Tensor,
        w_scale: cute.Tensor,
        y: cute.Tensor,
        residual: cute.Tensor | None,
        norm_weight: cute.Tensor | None,
        eps: Float32,
        stream: Any,  # noqa: ANN401
    ) -> None:
        line = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        count = self.steps if self.own else self.stages
        x_ring = cute.tile_to_shape(line, (self.rows, DEEP, count), (0, 1, 2))
        weight_ring = cute.tile_to_shape(line, (TILE, DEEP, self.stages), (0, 1, 2))
        weight_box = self.box_of(line, weight, self.box)
        x_box = None if self.own else self.box_of(line, x, self.rows)
        mma = make_trivial_tiled_mma(
            Float8E4M3FN,
            Float8E4M3FN,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            tiler_mn=(TILE, self.rows),
        )
        self.kernel(
            x_box, weight_box, x, x_scale, w_scale, y, residual, norm_weight, eps, x_ring,
            weight_ring, mma, x.shape[0],
        ).launch(
            grid=[self.splits, weight.shape[0] // TILE, 1],
            block=[THREADS + 32, 1, 1],
            cluster=[self.splits, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    def box_of(self, line: cute.ComposedLayout, matrix: cute.Tensor, rows: int) -> tuple:
        """Return the TMA atom and tensor for copies of `rows` rows and DEEP inputs."""
        lines = cute.make_layout((rows, DEEP), stride=(DEEP, 1))
        one = cute.make_composed_layout(line.inner, 0, lines)
        op = cpasync.CopyBulkTensorTileG2SOp()
        info = cpasync.make_tiled_tma_atom(op, matrix, one, (rows, DEEP))
        return info[0], info[1]

    @cute.kernel
    def kernel(
        self,
        x_box: tuple | None,
        weight_box: tuple,
        x: cute.Tensor,
        x_scale: cute.Tensor | None,
        w_scale: cute.Tensor,
        y: cute.Tensor,
        residual: cute.Tensor | None,
        norm_weight: cute.Tensor | None,
        eps: Float32,
        x_ring: cute.ComposedLayout,
        weight_ring: cute.ComposedLayout,
        mma: Any,  # noqa: ANN401
        num_rows: Int32,
    ) -> None:
        shared = self.allocate(x_ring, weight_ring)
        nth_warp = arch.make_warp_uniform(arch.warp_idx())
        is_loader = nth_warp == THREADS // 32
        if is_loader:
            with arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    arch.mbarrier_init(shared.full + stage, 1)
                    arch.mbarrier_init(shared.empty + stage, THREADS // 32)
                arch.mbarrier_init(shared.landed, 1)
            arch.mbarrier_init_fence()
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(shared.landed, 4 * self.part * self.splits)
        if cutlass.const_expr(self.splits > 1):
            arch.cluster_arrive()
        arch.sync_threads()
        arch.griddepcontrol_launch_dependents()
        if is_loader:
            self.load(x_box, weight_box, shared)
            if cutlass.const_expr(self.splits > 1):
                arch.cluster_wait()
                arch.cluster_arrive()
        else:
            self.compute(shared, x, x_scale, w_scale, norm_weight, mma, num_rows)
            self.finish(y, residual, eps, shared, num_rows)
        if cutlass.const_expr(self.splits > 1):
            arch.cluster_wait()  # peers have received all sums, so this block's memory may be freed

    def allocate(self, x_ring: cute.ComposedLayout, weight_ring: cute.ComposedLayout) -> Shared:
        smem = cutlass.utils.SmemAllocator()
        ring = smem.allocate(self.ring_bytes, 1024)
        count = self.steps if self.own else self.stages
        x = smem.allocate(count * self.rows * DEEP, 1024)
        sums = cute.make_layout(
            (self.padded, self.rows, self.splits), stride=(1, self.padded, self.part)
        )
        own = cute.make_tensor(cute.recast_ptr(ring, dtype=Float32), sums)
        squares = None
        if self.own:
            squares = smem.allocate_tensor(Float32, cute.make_layout((self.rows, PARTS)), 128)
        words = cute.make_layout(count * self.rows * DEEP // 4)
        x_scales = cute.make_layout((self.rows, self.steps))
        w_scales = cute.make_layout((self.steps, self.halves))
        return Shared(
            x=cute.make_tensor(cute.recast_ptr(x, x_ring.inner, Float8E4M3FN), x_ring.outer),
            x_words=cute.make_tensor(cute.recast_ptr(x, dtype=Int32), words),
            x_scale=smem.allocate_tensor(Float32, x_scales, 128),
            weight=cute.make_tensor(
                cute.recast_ptr(ring, weight_ring.inner, Float8E4M3FN), weight_ring.outer
            ),
            w_scale=smem.allocate_tensor(Float32, w_scales, 16),
            squares=squares,
            full=smem.allocate_array(Int64, self.stages),
            empty=smem.allocate_array(Int64, self.stages),
            own=own,
            parts=smem.allocate_tensor(Float32, sums, 128) if self.splits > 1 else own,
            landed=smem.allocate_array(Int64, 1),
        )

    @cute.jit
    def load(self, x_box: tuple | None, weight_box: tuple, shared: Shared) -> None:
        """Fill the ring with this block's slice. Weights come first, since x may not be ready."""
        weight_copy = self.copy_of(weight_box, shared.weight, self.box)
        if cutlass.const_expr(not self.own):
            x_copy = self.copy_of(x_box, shared.x, self.rows)
        first = arch.block_idx()[0] * self.steps
        for i in cutlass.range(0, self.early, unroll=1):
            self.load_weight(weight_copy, shared, first + i, i)
        arch.griddepcontrol_wait()
        if cutlass.const_expr(not self.own):
            for i in cutlass.range(0, self.early, unroll=1):
                self.load_x(x_copy, shared, first + i, i)
        stage, phase = Int32(0), Int32(0)
        for i in cutlass.range(self.early, self.steps, unroll=1):
            arch.mbarrier_wait(shared.empty + stage, phase)
            self.load_weight(weight_copy, shared, first + i, stage)
            if cutlass.const_expr(not self.own):
                self.load_x(x_copy, shared, first + i, stage)
            stage, phase = next_stage(stage, phase, self.stages)

    def copy_of(self, box: Any, ring: cute.Tensor, rows: int) -> tuple:  # noqa: ANN401
        """Return a copy's atom, source [nth box, step], and target [nth box, stage]."""
        atom, matrix = box
        cpasync.prefetch_descriptor(atom)
        lines = cute.size(ring, mode=[0])
        places = cute.make_layout(
            ((rows, DEEP), lines // rows, self.stages),
            stride=((DEEP, 1), rows * DEEP, lines * DEEP),
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
    def load_weight(self, copy: tuple, shared: Shared, step: Int32, stage: Int32) -> None:
        atom, source, to = copy
        full = shared.full + stage
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(full, self.stage_bytes)
        for half in cutlass.range_constexpr(self.halves):
            cute.copy(
                atom,
                source[None, arch.block_idx()[1] + half * arch.grid_dim()[1], step],
                to[None, half, stage],
                tma_bar_ptr=full,
                cache_policy=Int64(READ_ONCE),
            )

    @cute.jit
    def load_x(self, copy: tuple, shared: Shared, step: Int32, stage: Int32) -> None:
        atom, source, to = copy
        cute.copy(atom, source[None, 0, step], to[None, 0, stage], tma_bar_ptr=shared.full + stage)

    @cute.jit
    def compute(
        self,
        shared: Shared,
        x_TD: cute.Tensor,
        x_scale: cute.Tensor | None,
        w_scale: cute.Tensor,
        norm_weight: cute.Tensor | None,
        mma: cute.TiledMma,
        num_rows: Int32,
    ) -> None:
        """Compute this slice's sums for all features of the cluster, and sums of x's squares."""
        thread, first = arch.thread_idx()[0], arch.block_idx()[0] * self.steps
        slice_ = mma.get_slice(thread)
        weight = slice_.make_fragment_A(slice_.partition_A(shared.weight))
        x = slice_.make_fragment_B(slice_.partition_B(shared.x))
        products = cute.make_rmem_tensor(slice_.partition_shape_C((TILE, self.rows)), Float32)
        sums = cute.make_rmem_tensor(self.rows // 2, Float32)
        sums.fill(0.0)
        scales = cute.make_rmem_tensor(self.rows // 4, Float32)
        fresh, more = cute.make_mma_atom(mma.op), cute.make_mma_atom(mma.op)
        fresh.set(warpgroup.Field.ACCUMULATE, False)
        more.set(warpgroup.Field.ACCUMULATE, True)
        half = thread // 32 * 16 // self.box
        norm_words = cute.make_rmem_tensor((4, self.units), Int32)
        if cutlass.const_expr(self.kind.normed):
            for u in cutlass.range_constexpr(self.units):
                norm_words[None, u].store(eight_of(norm_weight, self.place(u, first)))
        self.load_w_scales(shared, w_scale, first)
        arch.griddepcontrol_wait()
        if cutlass.const_expr(self.own):
            self.quantise(shared, x_TD, norm_words, first, num_rows)
        else:
            self.load_x_scales(shared, x_scale, first, num_rows)
        stage, phase = Int32(0), Int32(0)
        for i in cutlass.range(0, self.steps, unroll=1):
            of_weight = shared.w_scale[i, half]
            for n in cutlass.range_constexpr(self.rows // 4):
                scales[n] = of_weight * shared.x_scale[row_of(n), i]
            x_stage = stage
            if cutlass.const_expr(self.own):
                x_stage = i
            arch.mbarrier_wait(shared.full + stage, phase)
            warpgroup.fence()
            for k in cutlass.range_constexpr(DEEP // 32):
                atom = more if k > 0 else fresh
                parts = weight[None, None, k, stage], x[None, None, k, x_stage]
                cute.gemm(atom, products, *parts, products)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            arch.sync_warp()
            with arch.elect_one():
                arch.mbarrier_arrive(shared.empty + stage)
            for n in cutlass.range_constexpr(self.rows // 2):
                sums[n] += products[n] * scales[n // 4 * 2 + n % 2]
            stage, phase = next_stage(stage, phase, self.stages)
        arch.barrier(barrier_id=1, number_of_threads=THREADS)  # all warps have read the ring
        self.store_sums(sums, shared)

    @cute.jit
    def load_w_scales(self, shared: Shared, w_scale: cute.Tensor, first: Int32) -> None:
        thread = arch.thread_idx()[0]
        if thread < self.steps:
            for half in cutlass.range_constexpr(self.halves):
                line = (arch.block_idx()[1] + half * arch.grid_dim()[1]) * self.box // BLOCK
                shared.w_scale[thread, half] = w_scale[line, first + thread]

    @cute.jit
    def load_x_scales(
        self, shared: Shared, x_scale: cute.Tensor, first: Int32, num_rows: Int32
    ) -> None:
        count = self.steps * self.rows
        for nth in cutlass.range_constexpr(-(-count // THREADS)):
            at = nth * THREADS + arch.thread_idx()[0]
            if at < count:
                row = cutlass.min(at % self.rows, num_rows - 1)
                shared.x_scale[at % self.rows, at // self.rows] = x_scale[
                    first + at // self.rows, row
                ]
        arch.barrier(barrier_id=1, number_of_threads=THREADS)

    def place(self, u: int, first: Int32) -> Int32:
        """Return the nth eight inputs of this thread, in eights of the row."""
        return (first + self.block(u)) * PART + arch.thread_idx()[0] % PART

    def block(self, u: int) -> Int32:
        """Return the block of the slice that this thread quantises as its `u`th."""
        return cutlass.min(u * PARTS + arch.thread_idx()[0] // PART, self.steps - 1)

    @cute.jit
    def quantise(
        self,
        shared: Shared,
        x_TD: cute.Tensor,
        norm_words: cute.Tensor,
        first: Int32,
        num_rows: Int32,
    ) -> None:
        """Quantise this slice of x, with the norm's weight, and sum its squares."""
        part, inner = arch.thread_idx()[0] // PART, arch.thread_idx()[0] % PART
        words = cute.make_rmem_tensor((4, self.units), Int32)
        ahead = cute.make_rmem_tensor((4, self.units), Int32)
        for u in cutlass.range_constexpr(self.units):
            ahead[None, u].store(eight_of(x_TD[0, None], self.place(u, first)))
        for row in cutlass.range(0, num_rows, unroll=1):
            words.store(ahead.load())
            following = cutlass.min(row + 1, num_rows - 1)
            for u in cutlass.range_constexpr(self.units):
                ahead[None, u].store(eight_of(x_TD[following, None], self.place(u, first)))
            square = Float32(0)
            for u in cutlass.range_constexpr(self.units):
                values = widened(words[None, u])
                if cutlass.const_expr(self.kind.normed):
                    one = Float32(0)
                    for n in cutlass.range_constexpr(8):
                        one += values[n] * values[n]
                    is_first = u * PARTS + part < self.steps  # otherwise the block is repeated
                    square += Float32(cutlass.select_(is_first, one, Float32(0)))
                    values.store(values.load() * widened(norm_words[None, u]).load())
                self.store_eight(shared, values, row, self.block(u), inner)
            if cutlass.const_expr(self.kind.normed):
                square = of_part(square, operator.add)
                if inner == 0:
                    shared.squares[row, part] = square
        arch.fence_view_async_shared()
        arch.barrier(barrier_id=1, number_of_threads=THREADS)

    @cute.jit
    def store_eight(
        self, shared: Shared, values: cute.Tensor, row: Int32, block: Int32, inner: Int32
    ) -> None:
        """Quantise eight values of a block that PART threads share, and store them swizzled."""
        largest = Float32(0)
        for n in cutlass.range_constexpr(8):
            largest = arch.fmax(largest, arch.fmax(values[n], -values[n]))
        largest = of_part(largest, arch.fmax)
        factor = arch.fmin(LARGEST * arch.rcp_approx(largest), HUGE)
        pair = cute.make_rmem_tensor(2, Int32)
        for n in cutlass.range_constexpr(2):
            four = cute.make_rmem_tensor(4, Float32)
            for m in cutlass.range_constexpr(4):
                four[m] = values[4 * n + m] * factor
            fours = cute.make_rmem_tensor(4, Float8E4M3FN)
            fours.store(four.load().to(Float8E4M3FN))
            pair[n] = cute.recast_tensor(fours, Int32)[0]
        at = (block * self.rows + row) * PART + (inner ^ ((row & 7) * 2))
        some_of(shared.x_words, 2, at).store(pair.load())
        if inner == 0:
            scale = cutlass.select_(largest > 0, largest * (1 / LARGEST), Float32(1))
            shared.x_scale[row, block] = Float32(scale)

    @cute.jit
    def store_sums(self, sums: cute.Tensor, shared: Shared) -> None:
        """Store the sums to the memory of the ring, ordered by share, and exchange them."""
        thread, lane = arch.thread_idx()[0], arch.lane_idx()
        for n in cutlass.range_constexpr(self.rows // 2):
            line = thread // 32 * 16 + lane // 4 + n // 2 % 2 * 8
            half, feature = line // self.box, line % self.box
            place = half * self.share + feature % self.share
            row = n // 4 * 8 + 2 * (lane % 4) + n % 2
            shared.own[place, row, feature // self.share] = sums[n]
        if cutlass.const_expr(self.kind.normed):
            self.store_squares(shared)
        if cutlass.const_expr(self.splits == 1):
            arch.barrier(barrier_id=1, number_of_threads=THREADS)
        else:
            arch.fence_view_async_shared()
            arch.barrier(barrier_id=1, number_of_threads=THREADS)
            arch.cluster_wait()  # the peers have initialised their barriers
            if thread < 32:
                with arch.elect_one():
                    for peer in cutlass.range_constexpr(self.splits):
                        self.send(shared, peer)
            arch.mbarrier_wait(shared.landed, 0)
            arch.cluster_arrive()

    @cute.jit
    def store_squares(self, shared: Shared) -> None:
        thread = arch.thread_idx()[0]
        if thread < self.rows * self.splits:
            row, peer = thread % self.rows, thread // self.rows
            square = Float32(0)
            for n in cutlass.range_constexpr(PARTS):
                square += shared.squares[row, n]
            shared.own[self.squares, row, peer] = square

    def send(self, shared: Shared, peer: int) -> None:
        nth = arch.block_idx()[0]
        source = shared.own.iterator + peer * self.part
        to = arch.map_dsmem_ptr(shared.parts.iterator + nth * self.part, peer)
        send_bulk(source, to, arch.map_dsmem_ptr(shared.landed, peer), Int32(4 * self.part))

    @cute.jit
    def finish(
        self,
        y: cute.Tensor,
        residual: cute.Tensor | None,
        eps: Float32,
        shared: Shared,
        num_rows: Int32,
    ) -> None:
        """Sum the slices of this block's share of features, and store y."""
        count, per_row = self.vector, self.share // self.vector
        first = (arch.block_idx()[1] * self.splits + arch.block_idx()[0]) * per_row
        width = Float32(self.steps * self.splits * DEEP)
        for at in cutlass.range(arch.thread_idx()[0], num_rows * per_row, THREADS, unroll=1):
            row, nth_some = at // per_row, at % per_row
            totals = []
            for half in cutlass.range_constexpr(self.halves):
                total = cute.full(count, 0.0, Float32)
                for nth in cutlass.range_constexpr(self.splits):
                    part = shared.parts[None, row, nth]
                    total += some_of(part, count, half * per_row + nth_some).load()
                totals.append(total)
            if cutlass.const_expr(self.kind.normed):
                square = Float32(0)
                for nth in cutlass.range_constexpr(self.splits):
                    square += shared.parts[self.squares, row, nth]
                scale = cute.math.rsqrt(square / width + eps)
                totals = [total * scale for total in totals]
            result = totals[0]
            if cutlass.const_expr(self.kind.gated):
                result = result / (1.0 + cute.math.exp2(result * -LOG2_E)) * totals[1]
            if cutlass.const_expr(self.kind.added):
                added = some_of(residual[row, None], count, first + nth_some).load()
                result += added.to(Float32)
            some_of(y[row, None], count, first + nth_some).store(result.to(BFloat16))


def row_of(n: int) -> Int32:
    """Return the nth row of x of which a thread has sums."""
    return n // 2 * 8 + 2 * (arch.lane_idx() % 4) + n % 2


def of_part(x: Float32, combine: Any) -> Float32:  # noqa: ANN401
    """Combine the values of PART neighbouring threads. All of them get the result."""
    for distance in (1, 2, 4, 8):
        x = combine(x, arch.shuffle_sync_bfly(x, distance))
    return x


def eight_of(line: cute.Tensor, nth: Int32) -> Any:  # noqa: ANN401
    """Return the nth eight bfloat16 numbers of a line, as four words."""
    return cute.recast_tensor(some_of(line, 8, nth), Int32).load()


def widened(words: cute.Tensor) -> cute.Tensor:
    """Return eight bfloat16 numbers in float32."""
    bits = cute.make_rmem_tensor(8, Int32)
    for n in range(4):
        bits[2 * n], bits[2 * n + 1] = words[n] << 16, words[n] & Int32(-65536)
    return cute.recast_tensor(bits, Float32)
