"""Matrix products of up to 32 rows with weights in block fp8, for Hopper, in CuTe DSL.

As in skinny_linear, whose cut over blocks, norm, gate and residual these are: y = f(x) W^T. What
differs is how a block multiplies. Meaning: the references in dense_fp8_cases.py. x and y are
bfloat16 and x is not quantised.

Decision: e4m3 numbers become bfloat16 in registers, four at a time, and go to the tensor cores from
there, as the rows of a product of 16 lines and 8 rows of x. Each number is turned once, by the one
warp that has it: warps take turns at the steps, and meet at the end only.

Decision: a step is the 128 inputs that share a scale. Their products are summed up apart, and added
to the others times the scale, in float32.

Decision: products do not care about the order of their inputs. So a thread reads 16 neighbouring
numbers of a line of W at once, and the same ones of x, in an order of chunks by which no two
threads meet in a bank: lane c of four has inputs 32 c to 32 c + 31, the upper two lanes the second
half of theirs first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warpgroup
from torch import Tensor

from nanovllm_kernels import skinny_linear
from nanovllm_kernels.block_fp8_cute import block_fp8_linear, compile_tile, obstacle, tile_of
from nanovllm_kernels.compile_cache import CachedCompile, Compiled
from nanovllm_kernels.fp8_reference import BLOCK, FEW_ROWS, FP8, Fp8Linear, Scaled
from nanovllm_kernels.like import like
from nanovllm_kernels.quantise import norm_quantise, quantise, silu_mul_quantise
from nanovllm_kernels.skinny_linear import LINE_BYTES, PROCESSORS, Kind, Shape, Shared, Size

TILE_LINES, TILE_ROWS = 16, 8  # of a tensor core's product
LEAST_BLOCK_ROWS = 8
BOX_INPUTS = 64  # of x in a swizzled line
FEW_WARPS, MANY_WARPS = 4, 8  # that compute, of two blocks or of one block on a multiprocessor
TILED = range(6, 14)  # logarithms of the numbers of rows whose tiles are compiled early
MOST_LINES = {1: 128, 2: 128, 4: 64}  # by tiles of rows: as many sums as registers hold

# Four e4m3 numbers to two pairs of bfloat16, exactly.
TO_PAIRS = """{
.reg .b16 l, h, a, b, c, d; .reg .b32 p, q; .reg .f32 s, t, u, v;
mov.b32 {l, h}, {$r0};
cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;
mov.b32 {a, b}, p; mov.b32 {c, d}, q;
cvt.f32.f16 s, a; cvt.f32.f16 t, b; cvt.f32.f16 u, c; cvt.f32.f16 v, d;
cvt.rn.bf16x2.f32 {$w0}, t, s; cvt.rn.bf16x2.f32 {$w1}, v, u;
}"""
MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
    "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
)


@cache
def shape_of(num_lines: int, width: int, kind: Kind, num_rows: int) -> Shape | None:
    """None: the weights cannot be cut evenly. `groups` of a shape: tiles of 8 rows."""
    if num_rows > FEW_ROWS or width % BLOCK:
        return None
    tiles = 1 if num_rows <= 8 else 2 if num_rows <= 16 else 4
    shape = skinny_linear.shape_of(num_lines, width, kind, 1, TILE_LINES, MOST_LINES[tiles])
    if shape is None or width % (BLOCK * shape.splits):
        return None
    return shape._replace(groups=tiles)


class SkinnyFp8(skinny_linear.SkinnyLinear):
    """One of layers.ops.SkinnyLinear, for Scaled weights."""

    def fits(
        self,
        num_rows: int,
        weight_ND: Scaled,
        *,
        normed: bool = False,
        gated: bool = False,
        added: bool = False,
    ) -> bool:
        if num_rows > FEW_ROWS or weight_ND.dtype != FP8:
            return False
        shape = shape_of(*weight_ND.shape, Kind(normed, gated, added), num_rows)
        return shape is not None and weight_ND.block_rows >= LEAST_BLOCK_ROWS

    def _launch(
        self,
        kind: Kind,
        x_TD: Tensor,
        weight: Scaled,
        norm_weight_D: Tensor | None = None,
        eps: float = 0.0,
        residual_TN: Tensor | None = None,
    ) -> Tensor:
        (num_rows, width), num_lines = x_TD.shape, len(weight.weight_ND)
        shape = shape_of(num_lines, width, kind, num_rows)
        assert shape is not None and x_TD.stride(1) == 1
        y_TN = residual_TN
        if y_TN is None:
            y_TN = x_TD.new_empty(num_rows, num_lines // (1 + kind.gated))
        run = compile_product(*shape, *kind, *cut_of(weight, shape))
        run(x_TD, weight.weight_ND, weight.scale, y_TN, norm_weight_D, residual_TN, eps)
        return y_TN


SKINNY_FP8 = SkinnyFp8()
FP8_LINEAR = Fp8Linear(
    block_fp8_linear, obstacle, SKINNY_FP8, quantise, norm_quantise, silu_mul_quantise
)
TILED_FP8 = FP8_LINEAR._replace(skinny=None)  # of few rows, too


def cut_of(weight: Scaled, shape: Shape) -> tuple[int, int]:
    """The other arguments of compile_product: warps, and block_rows."""
    is_one_wave = len(weight.weight_ND) // shape.lines * shape.splits <= PROCESSORS
    return MANY_WARPS if is_one_wave else FEW_WARPS, weight.block_rows


@CachedCompile
def compile_product(
    lines: int,
    splits: int,
    is_large: bool,
    tiles: int,
    normed: bool,
    gated: bool,
    added: bool,
    most_warps: int,
    block_rows: int,
) -> Compiled:
    """Compiles a product of a Shape and a Kind. Needs no GPU, only to know of one."""

    def of_rank(rank: int, dtype: Any = BFloat16, divisibility: int = 8) -> Any:  # noqa: ANN401
        return like(dtype, *(cute.sym_int() for _ in range(rank)), divisibility=divisibility)

    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    shape = Shape(lines, splits, is_large, tiles)
    compiled: Compiled = cute.compile(
        Product(shape, Kind(normed, gated, added), most_warps, block_rows),
        of_rank(2),
        of_rank(2, Float8E4M3FN, 16),
        of_rank(2, Float32, 1),
        of_rank(2),
        of_rank(1) if normed else None,
        of_rank(2) if added else None,
        Float32(0),
        stream,
        options="--enable-tvm-ffi",
    )
    return compiled


def compiled_for(
    weight: Scaled, kind: Kind
) -> set[tuple[tuple[int, ...], CachedCompile[*tuple[int, ...]]]]:
    """What multiplies a weight: of few rows, and the tiles for some numbers of more."""
    shapes = {shape_of(*weight.shape, kind, n) for n in range(1, FEW_ROWS + 1)}
    skinny = {(*shape, *kind, *cut_of(weight, shape)) for shape in shapes if shape is not None}
    found = {(arguments, compile_product) for arguments in skinny}
    if obstacle(*weight.shape, weight.block_rows) is None:
        of = weight.block_rows, kind.added, False
        tiles = {tile_of(2**n, len(weight.weight_ND), PROCESSORS) for n in TILED}
        found |= {((*tile, *of), compile_tile) for tile in tiles}
    return found


class Product(skinny_linear.Product):
    deep, weight_type = BLOCK, Float8E4M3FN

    def __init__(self, shape: Shape, kind: Kind, most_warps: int, block_rows: int) -> None:
        self.kind, self.lines, self.splits = kind, shape.lines, shape.splits
        self.tiles, self.block_rows, self.readers = shape.groups, block_rows, 1
        self.rows = TILE_ROWS * self.tiles
        self.box_rows = min(self.rows, skinny_linear.BOX_ROWS)
        self.cut(shape)
        self.warps = min(most_warps, self.stages)  # `compute` relies on it
        self.threads = 32 * self.warps
        self.ring_bytes = max(self.ring_bytes, 4 * self.warps * self.splits * self.part)
        self.region = self.splits * self.part  # sums of a warp
        self.eights = [self.place_of(line) for line in range(0, self.lines, 8)]

    def place_of(self, line: int) -> tuple[int, int, int]:
        """Finds a line's half, whose share it is in, and its place in a row of sums."""
        half, within = line // self.box, line % self.box
        return half, within // self.share, half * self.share + within % self.share

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        scale: cute.Tensor,
        y: cute.Tensor,
        norm_weight: cute.Tensor | None,
        residual: cute.Tensor | None,
        eps: Float32,
        stream: Any,  # noqa: ANN401
    ) -> None:
        rings, boxes = [], []
        x_sizes = x, self.rows, self.box_rows, BOX_INPUTS, 2 * self.stages
        weight_sizes = weight, self.lines, self.box, BLOCK, self.stages
        for matrix, size, box, deep, stages in (x_sizes, weight_sizes):
            swizzled = warpgroup.SmemLayoutAtomKind.K_SW128
            line = warpgroup.make_smem_layout_atom(swizzled, matrix.element_type)
            rings.append(cute.tile_to_shape(line, (size, deep, stages), (0, 1, 2)))
            one = cute.tile_to_shape(line, (box, deep), (0, 1))
            op = cpasync.CopyBulkTensorTileG2SOp()
            info = cpasync.make_tiled_tma_atom(op, matrix, one, (box, deep))
            boxes.append((info[0], info[1]))
        size = Size(x.shape[0], Int32(self.rows), x.shape[1] // (BLOCK * self.splits))
        self.kernel(*boxes, y, norm_weight, residual, eps, *rings, scale, size).launch(
            grid=[self.splits, weight.shape[0] // self.lines, 1],
            block=[self.threads + 32, 1, 1],
            cluster=[self.splits, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.jit
    def load_x(self, copy: tuple, shared: Shared, size: Size, step: Int32, stage: Int32) -> None:
        atom, source, to = copy
        for half in cutlass.range_constexpr(BLOCK // BOX_INPUTS):
            for nth in cutlass.range_constexpr(self.rows // self.box_rows):
                cute.copy(
                    atom,
                    source[None, nth, 2 * step + half],
                    to[None, nth, 0, 2 * stage + half],
                    tma_bar_ptr=shared.full + stage,
                )

    @cute.jit
    def compute(self, shared: Shared, scale: cute.Tensor, size: Size) -> None:
        """This slice's sums, and those of x's squares, of all lines of the cluster."""
        nth_warp, lane = arch.make_warp_uniform(arch.thread_idx()[0] // 32), arch.lane_idx()
        sums = cute.make_rmem_tensor((4, self.tiles, self.lines // TILE_LINES), Float32)
        sums.fill(0.0)
        squares = cute.make_rmem_tensor(self.tiles, Float32)
        squares.fill(0.0)
        x = cute.make_rmem_tensor((8, self.tiles), Int32)
        scales = cute.make_rmem_tensor(self.lines // 8, Float32)
        for i in cutlass.range(nth_warp, size.steps, self.warps, unroll=1):
            stage = i % self.stages
            self.fetch(scale, arch.block_idx()[0] * size.steps + i, scales)
            empty, full = phases(i // self.stages)
            arch.mbarrier_wait(shared.empty + stage, empty)
            arch.mbarrier_wait(shared.full + stage, full)
            for half in cutlass.range(2, unroll=1):
                self.read_x(shared, stage, half, x, squares)
                at = self.line_at(shared.weight, stage * self.lines + lane // 4)
                at += (2 * (lane % 4) + (half ^ (lane % 4 // 2)) ^ (lane // 4)) * 16
                for tile in cutlass.range_constexpr(self.lines // TILE_LINES):
                    self.multiply(at + tile * TILE_LINES * LINE_BYTES, x, scales, sums, tile)
            arch.sync_warp()
            with arch.elect_one():
                arch.mbarrier_arrive(shared.empty + stage)
        arch.barrier(barrier_id=1, number_of_threads=self.threads)  # all have read the ring
        self.leave(sums, squares, shared, size)

    def line_at(self, ring: cute.Tensor, line: Int32) -> Int32:
        """The address of a line of a ring, before it is swizzled."""
        return Int32(ring.iterator.toint()) + line * LINE_BYTES

    @cute.jit
    def fetch(self, scale: cute.Tensor, block: Int32, scales: cute.Tensor) -> None:
        """The scales of every eight lines, for a block of inputs."""
        for nth in cutlass.range_constexpr(self.lines // 8):
            half, within = 8 * nth // self.box, 8 * nth % self.box
            first = (arch.block_idx()[1] + half * arch.grid_dim()[1]) * self.box + within
            scales[nth] = scale[first // self.block_rows, block]

    @cute.jit
    def read_x(
        self, shared: Shared, stage: Int32, half: Int32, x: cute.Tensor, squares: cute.Tensor
    ) -> None:
        """Sixteen inputs of each of a thread's rows, times the weight of the norm."""
        row, lane = arch.lane_idx() // 4, arch.lane_idx() % 4
        upper = lane // 2
        ring = self.line_at(shared.x, (2 * stage + upper) * self.rows + row)
        for nth in cutlass.range_constexpr(2):
            eight = 4 * (lane % 2) + ((2 * half + nth) ^ (2 * upper))
            for tile in cutlass.range_constexpr(self.tiles):
                at = ring + tile * TILE_ROWS * LINE_BYTES + (eight ^ row) * 16
                pairs = four_at(at)
                for n in cutlass.range_constexpr(4):
                    x[4 * nth + n, tile] = pairs[n]
            if cutlass.const_expr(self.kind.normed):
                at = Int32(shared.norm_weight.iterator.toint())
                at += stage * (2 * BLOCK) + upper * LINE_BYTES + eight * 16
                factors = four_at(at)
                for tile in cutlass.range_constexpr(self.tiles):
                    for n in cutlass.range_constexpr(4):
                        pair = x[4 * nth + n, tile]
                        for value in halves_of(pair):
                            squares[tile] += value * value
                        x[4 * nth + n, tile] = times(pair, factors[n])

    @cute.jit
    def multiply(
        self, at: Int32, x: cute.Tensor, scales: cute.Tensor, sums: cute.Tensor, tile: int
    ) -> None:
        """Adds the products of a tile of lines, of a half step, to the sums."""
        fours = four_at(at), four_at(at + 8 * LINE_BYTES)
        parts = cute.make_rmem_tensor((4, self.tiles), Float32)
        parts.fill(0.0)
        for k in cutlass.range_constexpr(4):
            upper, lower = pairs_of(fours[0][k]), pairs_of(fours[1][k])
            weights = upper[0], lower[0], upper[1], lower[1]
            for n in cutlass.range_constexpr(self.tiles):
                part = [parts[m, n] for m in range(4)]
                part = multiplied(part, weights, (x[2 * k, n], x[2 * k + 1, n]))
                for m in cutlass.range_constexpr(4):
                    parts[m, n] = part[m]
        for n in cutlass.range_constexpr(self.tiles):
            for m in cutlass.range_constexpr(4):
                sums[m, n, tile] += parts[m, n] * scales[2 * tile + m // 2]

    @cute.jit
    def leave(self, sums: cute.Tensor, squares: cute.Tensor, shared: Shared, size: Size) -> None:
        """Puts every warp's sums where x was, share by share, and adds them up."""
        thread, lane = arch.thread_idx()[0], arch.lane_idx()
        first = shared.own.iterator + thread // 32 * self.region
        own = cute.make_tensor(first, shared.own.layout)
        for n in cutlass.range_constexpr(self.tiles):
            for eight in cutlass.range_constexpr(self.lines // 8):
                _, peer, place = self.eights[eight]
                for m in cutlass.range_constexpr(2):
                    row = n * TILE_ROWS + 2 * (lane % 4) + m
                    own[place + lane // 4, row, peer] = sums[eight % 2 * 2 + m, n, eight // 2]
            if cutlass.const_expr(self.kind.normed):
                square = squares[n]
                for distance in (1, 2):
                    square += arch.shuffle_sync_bfly(square, distance)
                if lane % 4 == 0:
                    for peer in cutlass.range_constexpr(self.splits):
                        own[self.squares, n * TILE_ROWS + lane // 4, peer] = square
        arch.barrier(barrier_id=1, number_of_threads=self.threads)
        for at in cutlass.range(thread, self.region // 4, self.threads, unroll=1):
            total = cute.full(4, 0.0, Float32)
            for nth in cutlass.range_constexpr(self.warps):
                total += four_of(shared.own, nth * (self.region // 4) + at).load()
            four_of(shared.own, at).store(total)
        self.exchange(shared, size)


def phases(nth_round: Any) -> tuple[Any, Any]:  # noqa: ANN401, a number here and on the GPU
    """Says which of a stage's barriers a warp awaits, one after the other, in a round of the ring.

    The stage may have been another warp's before: once that one is done with it, what is awaited
    has come or is next. Of two phases alike a wait can't tell which has come.
    """
    return (nth_round + 1) % 2, nth_round % 2


def four_of(sums: cute.Tensor, nth: Int32) -> cute.Tensor:
    return cute.make_tensor(sums.iterator + 4 * nth, 4)


def four_at(address: Int32) -> cute.TensorSSA:
    """Sixteen bytes of shared memory."""
    space = cute.AddressSpace.smem
    return cute.make_tensor(cute.make_ptr(Int32, address, space, assumed_align=16), 4).load()


def pairs_of(four: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 numbers as two pairs of bfloat16."""
    found: tuple[Int32, Int32] = arch.inline_ptx(
        TO_PAIRS, write_only_types=[Int32, Int32], read_only_args=[four]
    )
    return found


def halves_of(pair: Int32) -> tuple[Float32, Float32]:
    """A pair of bfloat16 in float32."""
    found: tuple[Float32, Float32] = arch.inline_ptx(
        "{ shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )
    return found


def times(pair: Int32, factors: Int32) -> Int32:
    """Two products of bfloat16."""
    found: Int32 = arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[pair, factors],
    )
    return found


def multiplied(
    sums: list[Float32], lines: tuple[Int32, ...], rows: tuple[Int32, Int32]
) -> tuple[Float32, ...]:
    """The sums and the product of a tile of lines and a tile of rows, of 16 inputs."""
    found: tuple[Float32, ...] = arch.inline_ptx(
        MULTIPLY, write_only_types=[Float32] * 4, read_only_args=[*lines, *rows, *sums]
    )
    return found
