"""Block-scaled fp8 GEMM of many rows, dense and grouped by expert, for Hopper, in CuTe DSL.

Computes y = x W^T with e4m3 operands and float32 scales. Scales of x are per row and 128 inputs,
those of W per `block_rows` rows and 128 inputs. The result is bfloat16 and may be added to a
residual stream in place. The gated form instead returns silu(gate) * up of the two halves of W,
quantised like x. The references are in block_fp8_cases.py.

The kernel is persistent and warp-specialised. One producer warp fills a ring of swizzled stages by
TMA, with multicast in clusters. One or two consumer groups of four warps multiply with wgmma.

Decision: a Hopper tensor core accumulates fp8 products with about 14 bits. Therefore each sum over
128 inputs, which share their scales, is moved out and accumulated in float32 registers. A thread
block has two consumer groups with 64 or 128 rows each, except for tiles of 64 rows. While one group
accumulates, products of the other keep the tensor core busy. The groups are not ordered: if both
are ready at once, the first to finish goes ahead.

Decision: in a tile of 256 rows a group multiplies 64 rows twice, one wave after the other. Its
registers then hold 128 x 128 sums and the products of half of them. Two thread blocks form a
cluster; they have the same rows and share their reads of x.

Decision: in the gated form a group multiplies its 64 rows with 128 rows of the gate, then of up for
the same features. The registers that a taller tile uses for a second 64 rows hold up instead. A
thread has both factors of each feature, and four threads have all features of a row that share a
scale. Both thread blocks of a cluster then have different rows and share their reads of W. No
thread needs sums of another block. If an expert's last tile has at most 128 rows, the two blocks
take half of them each.

Decision: products of more than a few rows always gate and quantise in the epilogue. A separate
kernel writes and reads everything once more. Times on an H200 in us, fused and separate, are as
follows. W of 36,864 x 7,168: 119 and 118 with 128 rows, 158 and 184 with 256, 4,395 and 4,517 with
8,192. W of 24,576 x 4,096: 35 and 50, 60 and 69, 1,583 and 1,733. Experts: 154 and 200 for 128 with
128 rows each, 2,903 and 3,314 for 256 with 512 each.

Decision: scales are loaded into registers one step ahead. Shared memory is left to the ring.

Decision: results are stored from registers, too. Four threads hold two columns each of the same
eight. They exchange them by shuffles, so that each thread stores 16 bytes. Without a TMA store a
tile may begin and end at any row, which the rows of an expert require.

Decision: tiles of experts are found on the device, from the arrays of experts/rows.py. The host
only bounds their number.
"""

from __future__ import annotations

from functools import cache, partial
from math import gcd
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma
from torch import Tensor

from nanovllm_kernels.compile_cache import CachedCompile, Compiled
from nanovllm_kernels.device import processors
from nanovllm_kernels.fp8_reference import (
    LARGEST,
    ROWS_UNIT,
    WIDTH_UNIT,
    Quantised,
    Scaled,
    empty,
)
from nanovllm_kernels.like import compiled, like
from nanovllm_kernels.ring_cute import (
    box_of,
    copy,
    exchange,
    four_words,
    in_order,
    next_stage,
    of_four,
    partition,
    sync_cluster,
)

DEEP = 128  # inputs per scale; one 128-byte swizzled line of shared memory
GROUP_ROWS = 64  # rows of x per wgmma of four warps
LINE = 64  # elements of y in a cache line
RING_BYTES = 224 * 1024
MOST_STAGES = 8
TOGETHER = 8  # tiles of rows in a group that reads the same part of W from the L2 cache
LOADER_REGISTERS, REGISTERS = 24, 240
LOG2_E = 1.4426950408889634
HUGE = 2.0**127  # largest factor, in place of infinity


class Tile(NamedTuple):
    """Tile of a thread block, and the number of blocks in a cluster.

    Blocks of a cluster share rows, or columns in the gated form. The first half of gated columns is
    the gate.
    """

    rows: int
    columns: int
    cluster: int = 1


TILES = {  # and the relative utilisation of a multiprocessor with each
    Tile(256, 128, 2): 1.0,
    Tile(128, 128, 2): 0.9,
    Tile(128, 128): 0.85,
    Tile(128, 64): 0.6,
    Tile(64, 128): 0.6,
    Tile(64, 64): 0.45,
    Tile(64, 32): 0.3,
}
# Tiles that gate and quantise.
GATED_TILES = {Tile(128, 256, 2): 1.0, Tile(128, 256): 0.9, Tile(64, 256): 0.6}
EXPERT_TILES = {tile.rows: tile for tile in (Tile(64, 128), Tile(128, 128), Tile(256, 128, 2))}
GATED_EXPERT_TILES = {tile.rows * tile.cluster: tile for tile in GATED_TILES}
LEAST_ROWS = {64: 0, 128: 32, 256: 256}  # minimum rows per expert at which a tile is faster


class Kind(NamedTuple):
    added: bool = False  # to the contents of y
    grouped: bool = False  # tiles belong to experts
    gated: bool = False  # gated and quantised


class Operands(NamedTuple):
    """Operands in global memory besides x and W."""

    x_scale: cute.Tensor  # [block of inputs, row]
    w_scale: cute.Tensor  # [block of rows, block of inputs], per expert if grouped
    y: cute.Tensor
    starts: cute.Tensor | None = None  # first row of each expert, and the end of the last
    tile_expert: cute.Tensor | None = None
    tile_start: cute.Tensor | None = None  # first row of each tile
    num_tiles: cute.Tensor | None = None
    y_scale: cute.Tensor | None = None  # [block of columns, row], if y is quantised


@cache
def tile_of(num_rows: int, num_lines: int, num_processors: int, *, gated: bool = False) -> Tile:
    """Return the tile with the least estimated time."""
    of = num_rows, num_lines, num_processors
    return min(GATED_TILES if gated else TILES, key=partial(cost, *of))


def cost(num_rows: int, num_lines: int, num_processors: int, tile: Tile) -> float:
    """Return the multiply-adds per input of one multiprocessor, weighted by utilisation."""
    high, wide = tile.rows, tile.columns * tile.cluster
    if tile in GATED_TILES:
        high, wide = tile.rows * tile.cluster, tile.columns
    clusters = -(-num_rows // high) * -(-num_lines // wide)
    waves = -(-clusters // (num_processors // tile.cluster))
    return waves * tile.rows * tile.columns / {**TILES, **GATED_TILES}[tile]


def obstacle(num_lines: int, width: int, block_rows: int = DEEP) -> str | None:
    """Return the reason why the kernels do not support a weight, or None."""
    if width % WIDTH_UNIT or num_lines % ROWS_UNIT:
        return f"inputs must be a multiple of {WIDTH_UNIT}, and outputs of {ROWS_UNIT}"
    if block_rows % 32:
        return "a multiple of 32 rows must share a scale"
    return None


def block_fp8_linear(
    x8_TD: Tensor,
    x_scale_BT: Tensor,
    w8_ND: Tensor,
    w_scale: Tensor,
    residual_TN: Tensor | None = None,
    block_rows: int = DEEP,
    tile: Tile | None = None,
) -> Tensor:
    """Return y_TN in bfloat16. If there is a residual stream, add to it in place and return it.

    `x_scale_BT` is [D / 128 rounded up, T or more]; `w_scale` is [N / block_rows rounded up, D /
    128 rounded up].
    """
    num_rows, num_lines = len(x8_TD), len(w8_ND)
    y_TN = residual_TN
    if y_TN is None:
        y_TN = x8_TD.new_empty(num_rows, num_lines, dtype=torch.bfloat16)
    tile = tile or tile_of(num_rows, num_lines, processors(x8_TD.device))
    kind = tile, block_rows, Kind(residual_TN is not None)
    multiply(x8_TD, w8_ND, Operands(x_scale_BT, w_scale, y_TN), kind)
    return y_TN


def block_fp8_gated(x8: Quantised, weight: Scaled, tile: Tile | None = None) -> Quantised:
    """Return the gated y_TF, silu(gate) * up. The gate, half of W's rows, must end with a block."""
    (x8_TD, x_scale_BT), (w8_ND, w_scale, block_rows, _) = x8, weight
    num_rows, num_lines, device = len(x8_TD), len(w8_ND), x8_TD.device
    tile = tile or tile_of(num_rows, num_lines, processors(device), gated=True)
    y8_TF, y_scale_BT = y = empty(num_rows, num_lines // 2, device)
    operands = Operands(x_scale_BT, w_scale, y8_TF, y_scale=y_scale_BT)
    multiply(x8_TD, w8_ND, operands, (tile, block_rows, Kind(gated=True)))
    return y


def multiply(
    x8: Tensor, weight: Tensor, operands: Operands, kind: tuple, most: int = 1 << 30
) -> None:
    """Launch the kernel of `kind`: (Tile, block_rows, Kind). At most `most` clusters have work."""
    tile, block_rows, more = kind
    if len(x8):
        num_clusters = min(most, processors(x8.device) // tile.cluster)
        compile_tile(*tile, block_rows, *more)(x8, weight, operands, num_clusters)


def experts_tile_rows(num_rows: int, num_experts: int) -> int:
    """Return the tile size, in rows, by which rows must be sorted."""
    tile_sizes = [rows for rows, least in LEAST_ROWS.items() if num_rows >= least * num_experts]
    return max(tile_sizes, default=min(EXPERT_TILES))


def block_fp8_experts(
    x8_XD: Tensor,
    x_scale_BX: Tensor,
    w8_END: Tensor,
    w_scale: Tensor,
    rows: Any,  # noqa: ANN401
    y_XN: Tensor | None = None,
    block_rows: int = DEEP,
) -> Tensor:
    """Return y_XN of rows sorted by expert, as described at route_reference.ExpertRows.

    Rows after those of the last expert are not written. `w_scale` is [E, N / block_rows rounded up,
    D / 128 rounded up]. Therefore all parts of a fused weight except the last must have whole
    blocks.
    """
    if y_XN is None:
        y_XN = x8_XD.new_empty(len(x8_XD), w8_END.shape[1], dtype=torch.bfloat16)
    kind = EXPERT_TILES[rows.tile], block_rows, Kind(grouped=True)
    operands = Operands(x_scale_BX, w_scale, y_XN, *maps_of(rows))
    multiply(x8_XD, w8_END, operands, kind, most_clusters(x8_XD, w8_END, rows.tile))
    return y_XN


def block_fp8_gated_experts(x8: Quantised, weight: Scaled, rows: Any) -> Quantised:  # noqa: ANN401
    """Return the gated y_XF of rows sorted as for block_fp8_experts. F is a multiple of 128."""
    (x8_XD, x_scale_BX), (w8_END, w_scale, block_rows, _) = x8, weight
    kind = GATED_EXPERT_TILES[rows.tile], block_rows, Kind(grouped=True, gated=True)
    y8_XF, y_scale_BX = y = empty(len(x8_XD), w8_END.shape[1] // 2, x8_XD.device)
    operands = Operands(x_scale_BX, w_scale, y8_XF, *maps_of(rows), y_scale_BX)
    multiply(x8_XD, w8_END, operands, kind, most_clusters(x8_XD, w8_END, rows.tile))
    return y


def maps_of(rows: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    return rows.starts_E1, rows.tile_expert_X, rows.tile_start_X, rows.num_tiles_1


def most_clusters(x8_XD: Tensor, w8_END: Tensor, tile_rows: int) -> int:
    num_rows, (num_experts, num_lines, _) = len(x8_XD), w8_END.shape
    return min(num_rows, num_rows // tile_rows + num_experts) * -(-num_lines // DEEP)


@CachedCompile
def compile_tile(*of: int) -> Compiled:
    """Compile the product of a Tile, block_rows and a Kind for any sizes.

    Needs no GPU if CUTE_DSL_ARCH is set.
    """
    kind, any_, width = Kind(*map(bool, of[4:])), cute.sym_int, cute.sym_int()
    experts = (any_(),) if kind.grouped else ()

    def numbers() -> Any:  # noqa: ANN401
        return like(Int32, any_()) if kind.grouped else None

    dtype, count = (Float8E4M3FN, 16) if kind.gated else (BFloat16, 8)  # elements in 16 bytes
    operands = Operands(
        x_scale=like(Float32, any_(), any_()),
        w_scale=like(Float32, *experts, any_(), any_()),
        y=like(dtype, any_(), any_(divisibility=count), divisibility=count),
        starts=numbers(),
        tile_expert=numbers(),
        tile_start=numbers(),
        num_tiles=numbers(),
        y_scale=like(Float32, any_(), any_()) if kind.gated else None,
    )
    return compiled(
        Product(Tile(*of[:3]), of[3], kind),
        like(Float8E4M3FN, any_(), width, divisibility=16),
        like(Float8E4M3FN, *experts, any_(), width, divisibility=16),
        operands,
        Int32(1),
    )


class Shared(NamedTuple):
    """Shared memory of a thread block."""

    x: cute.Tensor  # [row, input, stage]
    weight: cute.Tensor  # [row of W, input, stage]; gated, stages of gate and up alternate
    full: cute.Pointer  # mbarriers: the stage is filled
    empty: cute.Pointer  # mbarriers: all warps of the cluster have read the stage


class Size(NamedTuple):
    blocks: Int32  # blocks of DEEP inputs
    tall: Int32  # number of tiles along rows
    wide: Int32  # number of clusters along columns
    rows: Int32


class Spot(NamedTuple):
    """A tile: its first row and column, the end of its rows, and its expert."""

    row: Int32
    column: Int32
    end: Int32
    expert: Int32


class Product:
    def __init__(self, tile: Tile, block_rows: int, kind: Kind) -> None:
        self.tile, self.kind, self.block_rows = tile, kind, block_rows
        self.groups = min(2, tile.rows // GROUP_ROWS)
        self.parts = 2 if kind.gated else 1  # parts of W: gate and up, or one
        self.columns = tile.columns // self.parts
        self.high = tile.rows // (GROUP_ROWS * self.groups)
        self.waves = self.high * self.parts  # consecutive products of a group per stage
        self.threads = 128 * self.groups  # consumer threads
        self.sums = self.columns // 2  # accumulators of a thread per wave
        self.unit = gcd(self.columns, block_rows)  # columns that are certain to share a scale
        self.units = self.columns // self.unit
        assert self.columns % 32 == 0, tile
        assert self.unit % 8 == 0, block_rows
        assert self.sums * (self.waves + 1) <= 192, tile  # float32 registers
        assert not kind.gated or (self.high, self.columns) == (1, DEEP), tile
        self.num_scales = 2 * self.high + self.parts * self.units  # scales that a thread holds
        # Numbers of thread blocks that share their reads of x and of W.
        shared = tile.cluster, 1
        self.x_shared, self.weight_shared = reversed(shared) if kind.gated else shared
        self.step_bytes = DEEP * (tile.rows + tile.columns)
        self.stages = min(MOST_STAGES, RING_BYTES // self.step_bytes)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        operands: Operands,
        num_clusters: Int32,
        stream: Any,  # noqa: ANN401
    ) -> None:
        tile, kind = self.tile, self.kind
        if cutlass.const_expr(kind.grouped):
            weight = cute.make_tensor(weight.iterator, cute.select(weight.layout, [1, 2, 0]))
        line = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        x_ring = cute.tile_to_shape(line, (tile.rows, DEEP, self.stages), (0, 1, 2))
        lines = self.columns, DEEP, self.parts * self.stages
        weight_ring = cute.tile_to_shape(line, lines, (0, 1, 2))
        x_box = box_of(x, x_ring, self.x_shared)
        weight_box = box_of(weight, weight_ring, self.weight_shared)
        mma = make_trivial_tiled_mma(
            Float8E4M3FN,
            Float8E4M3FN,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (self.groups, 1, 1),
            tiler_mn=(GROUP_ROWS, self.columns),
        )
        rows, inputs = x.shape
        high, columns = tile.rows * self.weight_shared, tile.columns * self.x_shared
        size = Size(
            blocks=(inputs + DEEP - 1) // DEEP,
            tall=(rows + high - 1) // high,
            wide=(weight.shape[0] + columns - 1) // columns,
            rows=rows,
        )
        if cutlass.const_expr(not kind.grouped):
            num_clusters = cutlass.min(num_clusters, size.tall * size.wide)
        boxes = (x_box[0], x_box[1]), (weight_box[0], weight_box[1])
        self.kernel(*boxes, operands, x_ring, weight_ring, mma, size).launch(
            grid=[tile.cluster, num_clusters, 1],
            block=[self.threads + 128, 1, 1],
            cluster=[tile.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x_box: tuple,
        weight_box: tuple,
        operands: Operands,
        x_ring: cute.ComposedLayout,
        weight_ring: cute.ComposedLayout,
        mma: cute.TiledMma,
        size: Size,
    ) -> None:
        smem = cutlass.utils.SmemAllocator()
        shared = Shared(
            x=smem.allocate_tensor(Float8E4M3FN, x_ring.outer, 1024, x_ring.inner),
            weight=smem.allocate_tensor(Float8E4M3FN, weight_ring.outer, 1024, weight_ring.inner),
            full=smem.allocate_array(Int64, self.stages),
            empty=smem.allocate_array(Int64, self.stages),
        )
        nth_warp = arch.make_warp_uniform(arch.warp_idx())
        if nth_warp == 0:
            with arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    arch.mbarrier_init(shared.full + stage, 1)
                    arch.mbarrier_init(shared.empty + stage, self.threads // 32 * self.tile.cluster)
            arch.mbarrier_init_fence()
        sync_cluster(self.tile.cluster)
        arch.griddepcontrol_wait()
        if nth_warp >= self.threads // 32:
            if cutlass.const_expr(self.groups == 2):
                arch.setmaxregister_decrease(LOADER_REGISTERS)
            if nth_warp == self.threads // 32:
                self.load(x_box, weight_box, operands, shared, size)
                arch.griddepcontrol_launch_dependents()
        else:
            if cutlass.const_expr(self.groups == 2):
                arch.setmaxregister_increase(REGISTERS)
            self.compute(operands, shared, mma, size)
        if cutlass.const_expr(self.tile.cluster > 1):
            arch.cluster_arrive()
            arch.cluster_wait()  # the other block may still arrive at barriers of this one

    @cute.jit
    def num_units(self, operands: Operands, size: Size) -> Int32:
        tall = size.tall
        if cutlass.const_expr(self.kind.grouped):
            tall = operands.num_tiles[0]
        return tall * size.wide

    @cute.jit
    def spot_of(self, unit: Int32, operands: Operands, size: Size) -> Spot:
        """Return this block's tile of the cluster's `unit`."""
        tile_rows = self.tile.rows * self.weight_shared  # rows of the cluster's tile
        if cutlass.const_expr(self.kind.grouped):
            tile, nth = unit // size.wide, unit % size.wide
            expert = operands.tile_expert[tile]
            row, end = operands.tile_start[tile], operands.starts[expert + 1]
        else:
            some = TOGETHER * size.wide
            first, within = unit // some * TOGETHER, unit % some
            high = cutlass.min(size.tall - first, TOGETHER)
            row, nth = (first + within % high) * tile_rows, within // high
            expert, end = Int32(0), size.rows
        column = nth * self.columns
        if cutlass.const_expr(not self.kind.gated):
            column = (nth * self.tile.cluster + arch.block_idx()[0]) * self.columns
        elif cutlass.const_expr(self.tile.cluster > 1):
            few = end - row <= self.tile.rows
            share = Int32(cutlass.select_(few, self.tile.rows // 2, self.tile.rows))
            row += arch.block_idx()[0] * share
            end = cutlass.min(end, row + share)
        return Spot(row, column, end, expert)

    @cute.jit
    def load(
        self, x_box: tuple, weight_box: tuple, operands: Operands, shared: Shared, size: Size
    ) -> None:
        """Fill the ring with the blocks of all tiles in turn."""
        (x_atom, _), (weight_atom, weight) = x_box, weight_box
        cpasync.prefetch_descriptor(x_atom)
        cpasync.prefetch_descriptor(weight_atom)
        rank = arch.block_idx()[0]
        stage, phase = Int32(0), Int32(1)
        units = self.num_units(operands, size)
        for unit in cutlass.range(arch.block_idx()[1], units, arch.grid_dim()[1], unroll=1):
            spot = self.spot_of(unit, operands, size)
            lines = weight
            if cutlass.const_expr(self.kind.grouped):
                lines = weight[None, None, spot.expert]
            x_to, x_from = partition(x_box, shared.x, spot.row, rank, self.x_shared)
            weights = [
                partition((weight_atom, lines), shared.weight, line, rank, self.weight_shared)
                for line in self.first_lines(spot, operands)
            ]
            if cutlass.const_expr(self.kind.added):
                self.prefetch(operands.y, spot)
            for block in cutlass.range(0, size.blocks, unroll=1):
                full = shared.full + stage
                arch.mbarrier_wait(shared.empty + stage, phase)
                with arch.elect_one():
                    arch.mbarrier_arrive_and_expect_tx(full, self.step_bytes)
                for part in cutlass.range_constexpr(self.parts):
                    to, from_ = weights[part]
                    at = self.parts * stage + part
                    copy(weight_atom, from_[None, block], to[None, at], full, self.weight_shared)
                copy(x_atom, x_from[None, block], x_to[None, stage], full, self.x_shared)
                stage, phase = next_stage(stage, phase, self.stages)

    @cute.jit
    def prefetch(self, y: cute.Tensor, spot: Spot) -> None:
        """Prefetch the tile's part of the residual stream into the L2 cache."""
        for first in cutlass.range_constexpr(0, self.tile.rows, 32):
            row = spot.row + first + arch.lane_idx()
            for part in cutlass.range_constexpr(0, self.tile.columns, LINE):
                if row < spot.end and spot.column + part < y.shape[1]:
                    address = y[row, None].iterator + spot.column + part
                    arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address.toint()])

    def first_lines(self, spot: Spot, operands: Operands) -> list[Int32]:
        """Return the tile's first row of W, or the first rows of its gate and up."""
        return [spot.column, spot.column + operands.y.shape[1]][: self.parts]

    @cute.jit
    def compute(self, operands: Operands, shared: Shared, mma: cute.TiledMma, size: Size) -> None:
        group = arch.make_warp_uniform(arch.thread_idx()[0] // 128)
        slice_ = mma.get_slice(128 * group)
        wave_rows = self.groups * GROUP_ROWS
        xs = []
        for nth in cutlass.range_constexpr(self.high):
            rows = cute.local_tile(shared.x, (wave_rows, DEEP, self.stages), (nth, 0, 0))
            xs.append(slice_.make_fragment_A(slice_.partition_A(rows)))
        weight = slice_.make_fragment_B(slice_.partition_B(shared.weight))
        shape = slice_.partition_shape_C((wave_rows, self.columns))
        products = cute.make_rmem_tensor(shape, Float32)
        sums = cute.make_rmem_tensor((self.sums, self.waves), Float32)
        scales = cute.make_rmem_tensor(self.num_scales, Float32)
        next_scales = cute.make_rmem_tensor(self.num_scales, Float32)
        fresh, more = cute.make_mma_atom(mma.op), cute.make_mma_atom(mma.op)
        fresh.set(warpgroup.Field.ACCUMULATE, False)
        more.set(warpgroup.Field.ACCUMULATE, True)
        stage, phase = Int32(0), Int32(0)
        units = self.num_units(operands, size)
        for unit in cutlass.range(arch.block_idx()[1], units, arch.grid_dim()[1], unroll=1):
            spot = self.spot_of(unit, operands, size)
            lines = self.scale_lines(spot, operands, size)
            self.fetch(lines, next_scales, Int32(0))
            sums.fill(0.0)
            for block in cutlass.range(0, size.blocks, unroll=1):
                scales.store(next_scales.load())
                # The load precedes the wait, as the compiler would otherwise move it after the
                # wait.
                self.fetch(lines, next_scales, cutlass.min(block + 1, size.blocks - 1))
                arch.mbarrier_wait(shared.full + stage, phase)
                for wave in cutlass.range_constexpr(self.waves):
                    if self.has_rows(spot, wave, group):
                        warpgroup.fence()
                        x, part = xs[wave // self.parts], self.parts * stage + wave % self.parts
                        for k in cutlass.range_constexpr(DEEP // 32):
                            atom = more if k > 0 else fresh
                            at, line_at = (None, None, k, stage), (None, None, k, part)
                            cute.gemm(atom, products, x[at], weight[line_at], products)
                        warpgroup.commit_group()
                        warpgroup.wait_group(0)
                    if cutlass.const_expr(wave == self.waves - 1):
                        self.release(shared, stage)
                    if self.has_rows(spot, wave, group):
                        self.add(products, sums, scales, wave)
                stage, phase = next_stage(stage, phase, self.stages)
            if cutlass.const_expr(not self.kind.gated):
                for wave in cutlass.range_constexpr(self.waves):
                    self.store_sums(sums, wave, spot, operands)
            elif self.has_rows(spot, 0, group):
                self.store_gated(sums, spot, operands)

    def has_rows(self, spot: Spot, wave: int, group: Int32) -> Boolean:
        """Return True if a group has rows. Most of an expert's last tile may be empty."""
        if not self.kind.grouped:
            return Boolean(True)
        return spot.row + GROUP_ROWS * (self.groups * (wave // self.parts) + group) < spot.end

    @cute.jit
    def release(self, shared: Shared, stage: Int32) -> None:
        """Arrive at the empty barrier of each block in the cluster, since each writes this ring."""
        lane = arch.lane_idx()
        if lane < self.tile.cluster:
            if cutlass.const_expr(self.tile.cluster > 1):
                arch.mbarrier_arrive(shared.empty + stage, lane)
            else:
                arch.mbarrier_arrive(shared.empty + stage)

    def row_of(self, spot: Spot, nth: int) -> Int32:
        """Return a thread's nth row. A thread has two of each 64 rows of its group."""
        thread = arch.thread_idx()[0]
        first = spot.row + thread // 32 * 16 + thread % 32 // 4
        return first + (nth // 2 * self.groups * GROUP_ROWS + nth % 2 * 8)

    def scale_lines(self, spot: Spot, operands: Operands, size: Size) -> list[cute.Tensor]:
        """Return the scales along the inputs: of the thread's rows of x, then of the tile's W."""
        w_scale = operands.w_scale
        if self.kind.grouped:
            w_scale = w_scale[spot.expert, None, None]
        lines = []
        for nth in range(2 * self.high):
            row = cutlass.min(self.row_of(spot, nth), size.rows - 1)
            lines.append(operands.x_scale[None, row])
        for first in self.first_lines(spot, operands):
            for unit in range(self.units):
                line = (first + unit * self.unit) // self.block_rows
                lines.append(w_scale[cutlass.min(line, w_scale.shape[0] - 1), None])
        return lines

    def fetch(self, lines: list[cute.Tensor], scales: cute.Tensor, block: Int32) -> None:
        for nth, line in enumerate(lines):
            scales[nth] = line[block]

    def add(self, products: cute.Tensor, sums: cute.Tensor, scales: cute.Tensor, wave: int) -> None:
        """Scale the products and add them to the sums.

        A thread has two of every eight columns, of one row and of the row eight below.
        """
        row, first = wave // self.parts, 2 * self.high + wave % self.parts * self.units
        for unit in range(self.units):
            of_weight = scales[first + unit]
            factors = [scales[2 * row + half] * of_weight for half in range(2)]
            for n in range(unit * self.unit // 2, (unit + 1) * self.unit // 2):
                sums[n, wave] += products[n] * factors[n // 2 % 2]

    @cute.jit
    def store_sums(self, sums: cute.Tensor, wave: int, spot: Spot, operands: Operands) -> None:
        """Store a wave's sums. Four threads have 32 columns of a row; each stores eight."""
        num_lines, first = operands.y.shape[1], spot.column + arch.lane_idx() % 4 * 8
        parts = self.tile.columns // 32  # of each of two rows
        held = cute.make_rmem_tensor((4, 2 * parts), Int32)
        if cutlass.const_expr(self.kind.added):
            held.fill(0)
            for nth in cutlass.range_constexpr(2 * parts):
                half, part = nth // parts, nth % parts
                row, column = self.row_of(spot, 2 * wave + half), first + 32 * part
                if row < spot.end and column < num_lines:
                    held[None, nth].store(four_words(operands.y, row, column).load())
        results = cute.make_rmem_tensor(8, Float32)
        for nth in cutlass.range_constexpr(2 * parts):
            half, part = nth // parts, nth % parts
            row, column = self.row_of(spot, 2 * wave + half), first + 32 * part
            for n in cutlass.range_constexpr(8):
                results[n] = sums[16 * part + 4 * (n // 2) + 2 * half + n % 2, wave]
            if cutlass.const_expr(self.kind.added):
                exchange(held[None, nth])
                results.store(results.load() + widened(held[None, nth]))
            eight = cute.make_rmem_tensor(8, BFloat16)
            eight.store(results.load().to(BFloat16))
            four = cute.recast_tensor(eight, Int32)
            exchange(four)
            if row < spot.end and column < num_lines:
                four_words(operands.y, row, column).store(four.load())

    @cute.jit
    def store_gated(self, sums: cute.Tensor, spot: Spot, operands: Operands) -> None:
        """Store silu(gate) * up, quantised.

        Half of the sums are the gate's; the others are up's, in the same order. Four threads have
        128 features of a row. After the exchange each stores 16 of every 64.
        """
        num_features, lane = operands.y.shape[1], arch.lane_idx() % 4
        y = cute.make_rmem_tensor((4, 8), Float32)
        for half in cutlass.range_constexpr(2):
            row, largest = self.row_of(spot, half), Float32(0)
            for n in cutlass.range_constexpr(32):
                at = 4 * (n // 2) + 2 * half + n % 2
                gate, up = sums[at, 0], sums[at, 1]
                activation = gate * arch.rcp_approx(1.0 + arch.exp2(gate * -LOG2_E)) * up
                is_there = spot.column + n // 8 * 32 < num_features
                activation = Float32(cutlass.select_(is_there, activation, Float32(0)))
                y[n] = activation
                largest = arch.fmax(largest, arch.fmax(activation, -activation))
            largest = of_four(arch.fmax, largest)
            if lane == 0 and row < spot.end:
                scale = cutlass.select_(largest > 0, largest * (1 / LARGEST), Float32(1))
                operands.y_scale[spot.column // DEEP, row] = Float32(scale)
            factor = arch.fmin(LARGEST * arch.rcp_approx(largest), HUGE)
            for part in cutlass.range_constexpr(2):
                words = cute.make_rmem_tensor(4, Int32)
                for n in cutlass.range_constexpr(4):
                    four = cute.make_rmem_tensor(4, Float8E4M3FN)
                    four.store((y[None, 4 * part + n].load() * factor).to(Float8E4M3FN))
                    words[n] = cute.recast_tensor(four, Int32)[0]
                exchange(words)
                in_order(words)
                column = spot.column + 64 * part + 16 * lane
                if row < spot.end and column < num_features:
                    four_words(operands.y, row, column).store(words.load())


def widened(words: cute.Tensor) -> cute.TensorSSA:
    """Return the eight bfloat16 numbers of four words in float32.

    Converts by bit operations. A bfloat16 tensor would be unpacked by the compiler as soon as it is
    loaded, which waits for each load.
    """
    bits = cute.make_rmem_tensor(8, Int32)
    for n in range(4):
        bits[2 * n], bits[2 * n + 1] = words[n] << 16, words[n] & Int32(-65536)
    return cute.recast_tensor(bits, Float32).load()
