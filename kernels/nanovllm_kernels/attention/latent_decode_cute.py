"""Split-KV flash decoding of latent attention (MLA) over pages of latents, for Hopper, in CuTe DSL.

The cache has one latent of 512 elements and a rotated part of 64 per token, for all heads. Queries
have the same sizes. Scores are dot products of both parts, and the result is the weighted mean of
latents. The cache is bfloat16, in pages of 16, 32 or a multiple of 64 tokens.

Decision: the pairs of new token and head of a row are the rows of a matrix. A thread block has 64
of them, and a multiprocessor to itself. The contexts of all rows are cut into equal shares, one per
lane, like in paged_decode_cute. The blocks of pairs of a row run side by side, since they read the
same latents. If their number is even, two form a cluster, and each loads one half for both by
multicast.

Decision: the accumulator of 64 x 512 float32 numbers takes half of the registers. Therefore eight
warps only accumulate, four warps compute scores and softmax, and one warp loads by TMA. The weights
pass through shared memory, in place of the block's rotated parts. These are no longer needed once
the scores are computed.

Decision: a row that is cut leaves partial results, which a separate kernel merges.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import BFloat16, Float32, Int16, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma
from torch import Tensor

from nanovllm_kernels.attention.latent_decode import merge
from nanovllm_kernels.attention.paged_decode import MAX_WIDTH, DecodeKernel, plan_lanes, results_of
from nanovllm_kernels.compile_cache import CachedCompile, Compiled
from nanovllm_kernels.device import launches_early
from nanovllm_kernels.like import compiled, like
from nanovllm_kernels.ring_cute import (
    READ_ONCE,
    exchange,
    four_words,
    next_stage,
    of_four,
    sync_cluster,
)

RANK = 512  # elements of a latent
ROTATED = 64  # elements of a rotated part: a swizzled line of shared memory
LINES = RANK // ROTATED
WIDTH = RANK + ROTATED
PAIRS = 64  # of new token and head, per thread block
BLOCK = 64  # tokens
STAGES = 2
PARTS = 3  # of a block, each with an mbarrier: scores start with the first
STEPS = WIDTH // 16  # MMA steps of the score product
PIECE = 16  # pairs per warp
LOWEST = -1e30  # less than all scores, and finite, so that differences are not NaN
NEAR = 8  # rise of the maximum score, as a power of 2, that does not rescale the sums
LOG2_E = math.log2(math.e)
COLUMNS = 128  # of a group's product; with 256 the compiler exceeds the registers at launch
SUMMERS, SCORER, LOADER = 2, 2, 3  # warp groups; groups 0 and 1 accumulate
SUMMER_REGISTERS, SCORER_REGISTERS, LOADER_REGISTERS = 176, 120, 40
BEGINS, ENDS, WHOLE, BEGAN = 1, 2, 4, 8  # flags of a note


class Operands(NamedTuple):
    """Operands in global memory besides those that TMA copies.

    `lanes` is that of paged_decode.plan_lanes; partial_o and partial_lse are those of
    paged_decode.results_of.
    """

    table: cute.Tensor
    lengths: cute.Tensor
    starts: cute.Tensor  # unused if rows have one token each
    o: cute.Tensor  # [token and head, RANK]
    lanes: cute.Tensor
    partial_o: cute.Tensor
    partial_lse: cute.Tensor


def obstacle(
    num_heads: int, rank: int, rotated: int, page_tokens: int, dtype: torch.dtype, is_fp8: bool
) -> str | None:
    """Return the reason why heads and a cache are not supported, or None. `dtype`: the model's."""
    if dtype != torch.bfloat16 or is_fp8:
        return "it computes in bfloat16, of a cache of the same"
    if (rank, rotated) != (RANK, ROTATED):
        return f"latents must have {RANK} numbers, and {ROTATED} beside them"
    if page_tokens % BLOCK and page_tokens not in (16, 32):
        return f"pages must have 16, 32 or a multiple of {BLOCK} tokens"
    if num_heads % PIECE or (num_heads % PAIRS and PAIRS % num_heads):
        return f"heads must be 16, 32 or a multiple of {PAIRS}"
    return None


def plan_decode(lengths_R: Tensor, pages_PSX: Tensor, num_heads: int, width: int = 1) -> Tensor:
    """Return plan_N5 of plan_lanes. It is valid for all layers of the step."""
    return plan_lanes(lengths_R, num_tiles(num_heads, width), BLOCK, per_processor=1, whole=True)


def num_tiles(num_heads: int, width: int) -> int:
    """Return the number of thread blocks that share a row's latents."""
    return -(-num_heads * width // PAIRS)


def latent_decode(
    q_THX: Tensor,
    rotated_THA: Tensor,
    pages_PSX: Tensor,
    page_table_RM: Tensor,
    lengths_R: Tensor,
    plan_N5: Tensor,
    scale: float,
    out_THX: Tensor | None = None,
    *,
    starts_R1: Tensor | None = None,
    width: int = 1,
) -> Tensor:
    """Return o_THX, the weighted means of latents; it is `out_THX` if given. `scale`: of scores."""
    assert 1 <= width <= (MAX_WIDTH if starts_R1 is not None else 1), width
    num_tokens, num_heads, _ = q_THX.shape
    o_THX, partial_o, partial_lse = results_of(q_THX, len(plan_N5), out_THX, width)
    starts, o = lengths_R if starts_R1 is None else starts_R1, o_THX.flatten(0, 1)
    operands = Operands(page_table_RM, lengths_R, starts, o, plan_N5, partial_o, partial_lse)
    run = compile_decode(num_heads, pages_PSX.shape[1], 0 if starts_R1 is None else width)
    run(q_THX, rotated_THA, pages_PSX, operands, scale * LOG2_E)
    waits = launches_early(num_tokens, q_THX.device)
    more = {"RAGGED": starts_R1 is not None, "WAITS": waits, "launch_pdl": waits}
    merge(o_THX, partial_o, partial_lse, starts_R1, plan_N5, W=width, **more)
    return o_THX


DECODE = DecodeKernel(plan_decode, latent_decode, MAX_WIDTH, obstacle)


@CachedCompile
def compile_decode(num_heads: int, page_tokens: int, most_new: int) -> Compiled:
    """Compile the kernel for at most `most_new` new tokens per row.

    `most_new` is 0 if each row has one and there is no starts_R1. Needs no GPU if CUTE_DSL_ARCH is
    set.
    """
    any_ = cute.sym_int
    operands = Operands(
        table=like(Int32, any_(), any_()),
        lengths=like(Int32, any_()),
        starts=like(Int32, any_()),
        o=like(BFloat16, any_(), RANK, divisibility=8),
        lanes=like(Int32, any_(), 5),
        partial_o=like(Float32, any_(), 2, any_(), RANK, divisibility=4),
        partial_lse=like(Float32, any_(), 2, any_()),
    )
    return compiled(
        LatentDecode(num_heads, page_tokens, most_new),
        like(BFloat16, any_(), num_heads, RANK, divisibility=8),
        like(BFloat16, any_(), num_heads, ROTATED, divisibility=8),
        like(BFloat16, any_(), page_tokens, WIDTH, divisibility=8),
        operands,
        Float32(1),
    )


class Shared(NamedTuple):
    """Shared memory of a thread block."""

    q: cute.Tensor  # [pair, element]
    q_rotated: cute.Tensor
    latents: cute.Tensor  # [token, element, stage]
    rotated: cute.Tensor  # later overwritten by the weights: [pair, token, stage]
    notes: cute.Tensor  # [5, stage]: see LatentDecode.note
    sums: cute.Tensor  # [3, pair, stage]: factor of earlier sums; maximum score, sum of weights
    full: cute.Pointer  # mbarriers: a part of the stage is filled
    weighed: cute.Pointer  # mbarriers: the stage's weights are stored
    empty: cute.Pointer  # mbarriers: the stage is accumulated
    q_full: cute.Pointer  # mbarrier: the row's queries are loaded
    q_empty: cute.Pointer  # mbarrier: the row's queries are no longer needed


class Note(NamedTuple):
    """Description of a block.

    `query` is the first query of its row, or -1 after the last block, and `count` the number of
    queries. `seen` is the number of the block's tokens that the first query sees, `tokens` their
    total.
    """

    query: Int32
    count: Int32
    seen: Int32
    tokens: Int32
    flags: Int32


class LatentDecode:
    def __init__(self, num_heads: int, page_tokens: int, most_new: int) -> None:
        self.num_heads, self.page_tokens = num_heads, page_tokens
        self.ragged, self.most_new = most_new > 0, max(1, most_new)
        self.tiles = num_tiles(num_heads, self.most_new)
        self.cluster = 1 + (self.tiles % 2 == 0)
        self.box_heads = min(num_heads, PAIRS)
        self.boxes = min(PAIRS // self.box_heads, self.most_new)  # boxes of queries in a tile
        self.unit = min(BLOCK, page_tokens)  # tokens of a block that share a page
        # Rows of a box and cluster size for copies of queries, of their rotated parts, and of
        # pages.
        self.ways = (self.box_heads, 1), (self.box_heads, 1), (self.unit, self.cluster)
        self.units = BLOCK // self.unit
        self.window = 32 // self.units  # blocks whose pages a warp's threads hold

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        rotated: cute.Tensor,
        pages: cute.Tensor,
        operands: Operands,
        scale: Float32,
        stream: Any,  # noqa: ANN401
    ) -> None:
        line = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        rings = []
        for rows, stages in ((PAIRS, ()), (BLOCK, (STAGES,))):
            order = (0, 1, 2)[: 2 + len(stages)]
            rings += [cute.tile_to_shape(line, (rows, n, *stages), order) for n in (RANK, ROTATED)]
        boxes = []
        for source, (rows, cluster) in zip((q, rotated, pages), self.ways, strict=True):
            box = cute.tile_to_shape(line, (rows, ROTATED), (0, 1))
            flat = cute.make_tensor(source.iterator, cute.select(source.layout, [1, 2, 0]))
            op = cpasync.CopyBulkTensorTileG2SOp()
            if cutlass.const_expr(cluster > 1):
                op = cpasync.CopyBulkTensorTileG2SMulticastOp()
            info = cpasync.make_tiled_tma_atom(op, flat, box, (rows, ROTATED), cluster)
            boxes.append((info[0], info[1]))
        kinds = (OperandMajorMode.K, 1, BLOCK), (OperandMajorMode.MN, SUMMERS, COLUMNS)
        products = []
        for major, groups, columns in kinds:
            kind = BFloat16, BFloat16, OperandMajorMode.K, major, Float32, (1, groups, 1)
            products.append(make_trivial_tiled_mma(*kind, tiler_mn=(PAIRS, columns)))
        self.kernel(tuple(boxes), operands, scale, tuple(rings), tuple(products)).launch(
            grid=[self.tiles, cute.size(operands.lanes, mode=[0]), 1],
            block=[128 * (LOADER + 1), 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, boxes: tuple, operands: Operands, scale: Float32, rings: tuple, products: tuple
    ) -> None:
        shared = self.allocate(rings)
        nth_warp = arch.make_warp_uniform(arch.warp_idx())
        if nth_warp == 0:
            with arch.elect_one():
                arch.mbarrier_init(shared.q_full, 1)
                arch.mbarrier_init(shared.q_empty, 4)
                for stage in cutlass.range_constexpr(STAGES):
                    for part in cutlass.range_constexpr(PARTS):
                        arch.mbarrier_init(shared.full + stage * PARTS + part, 1)
                    arch.mbarrier_init(shared.weighed + stage, 4)
                    arch.mbarrier_init(shared.empty + stage, 4 * SUMMERS * self.cluster)
            arch.mbarrier_init_fence()
        sync_cluster(self.cluster)
        if nth_warp >= 4 * LOADER:
            arch.setmaxregister_decrease(LOADER_REGISTERS)
            if nth_warp == 4 * LOADER:
                self.load(boxes, operands, shared)
        elif nth_warp >= 4 * SCORER:
            arch.setmaxregister_decrease(SCORER_REGISTERS)
            self.score(shared, products[0], scale)
        else:
            arch.setmaxregister_increase(SUMMER_REGISTERS)
            self.accumulate(operands, shared, products[1], scale)
        if cutlass.const_expr(self.cluster > 1):
            sync_cluster(self.cluster)  # the other block may still access this one's barriers

    def allocate(self, rings: tuple) -> Shared:
        smem = cutlass.utils.SmemAllocator()
        tensors = [smem.allocate_tensor(BFloat16, x.outer, 1024, x.inner) for x in rings]
        notes = smem.allocate_tensor(Int32, cute.make_layout((len(Note._fields), STAGES)), 16)
        sums = smem.allocate_tensor(Float32, cute.make_layout((3, PAIRS, STAGES)), 16)
        barriers = [smem.allocate_array(Int64, STAGES * n) for n in (PARTS, 1, 1)]
        barriers += [smem.allocate_array(Int64, 1) for _ in range(2)]
        return Shared(*tensors, notes, sums, *barriers)

    def partition(self, box: tuple, way: tuple, rings: tuple) -> tuple:
        """Return the atom of a box, and its copies (source, target), one per ring.

        The source is [box of the rows, line, ...], the target [box of the rows, line, stage]. Each
        thread block of a cluster copies its part of a box to all of them.
        """
        (atom, matrix), (rows, cluster) = box, way
        cpasync.prefetch_descriptor(atom)
        whole = cute.group_modes(cute.flat_divide(matrix, (rows, ROTATED)), 0, 2)
        copies = []
        for ring in rings:
            parts = cute.group_modes(cute.flat_divide(ring, (rows, ROTATED)), 0, 2)
            rank, ranks = arch.block_idx()[0] % cluster, cute.make_layout(cluster)
            to, source = cpasync.tma_partition(atom, rank, ranks, parts, whole)
            copies.append((source, to))
        return atom, copies

    @cute.jit
    def load(self, boxes: tuple, operands: Operands, shared: Shared) -> None:
        """Fill the ring with this lane's blocks, and write a note for each."""
        targets = (shared.q,), (shared.q_rotated,), (shared.latents, shared.rotated)
        *queries, latents = (
            self.partition(*x) for x in zip(boxes, self.ways, targets, strict=True)
        )
        lane, last_row = arch.block_idx()[1], cute.size(operands.lengths) - 1
        row = cutlass.min(operands.lanes[lane, 0], last_row)
        block, left = operands.lanes[lane, 1], operands.lanes[lane, 2]
        length, base, began = operands.lengths[row], block, block
        query, count = self.queries_of(operands, row)
        first_query, first_count, total = query, count, left
        window = self.pages_of(operands.table, row, base)
        # The first row's old tokens may be loaded while the preceding kernel still runs.
        early = cutlass.min((length - count) // BLOCK - block, cutlass.min(left, STAGES))
        early = cutlass.max(early, 0)
        i, stage, phase, q_phase = Int32(0), Int32(0), Int32(1), Int32(1)
        while left >= 0:
            full = shared.full + stage * PARTS
            if i == early:
                arch.griddepcontrol_wait()
                if total > 0:
                    self.copy_q(queries, shared, first_query, first_count)
            arch.mbarrier_wait(shared.empty + stage, phase)
            if left == 0:
                left = Int32(-1)
                with arch.elect_one():
                    shared.notes[0, stage] = Int32(-1)
                    arch.mbarrier_arrive(full)
            else:
                tokens = length - block * BLOCK
                begins = Int32((i == 0) | (block == 0))
                closes = Int32(tokens <= BLOCK)
                ends = Int32((left == 1) | (tokens <= BLOCK))
                flags = BEGINS * begins + ENDS * ends + BEGAN * Int32(began == 0)
                flags += WHOLE * closes * Int32(began == 0)
                with arch.elect_one():
                    note = Note(query, count, tokens - count + 1, tokens, flags)
                    for n in cutlass.range_constexpr(len(note)):
                        shared.notes[n, stage] = note[n]
                    units = cutlass.min((tokens + self.unit - 1) // self.unit, self.units)
                    num_bytes = units * (2 * self.unit * WIDTH // PARTS)
                    for part in cutlass.range_constexpr(PARTS):
                        arch.mbarrier_arrive_and_expect_tx(full + part, num_bytes)
                pages = (window, (block - base) * self.units)
                self.copy_block(latents, (full, stage), (block, tokens), pages)
                if (i > 0) & (block == 0):
                    arch.mbarrier_wait(shared.q_empty, q_phase ^ 1)
                    q_phase ^= 1
                    self.copy_q(queries, shared, query, count)
                left -= 1
                block += 1
                if tokens <= BLOCK:
                    row = cutlass.min(row + 1, last_row)
                    block, base, began = Int32(0), Int32(0), Int32(0)
                    length, window = operands.lengths[row], self.pages_of(operands.table, row, base)
                    query, count = self.queries_of(operands, row)
                elif block == base + self.window:
                    base = block
                    window = self.pages_of(operands.table, row, base)
            i += 1
            stage, phase = next_stage(stage, phase, STAGES)
        arch.griddepcontrol_launch_dependents()

    def queries_of(self, operands: Operands, row: Int32) -> tuple:
        """Return the first query of a row, and the number of its queries."""
        if not self.ragged:
            return row, Int32(1)
        return operands.starts[row], operands.starts[row + 1] - operands.starts[row]

    def pages_of(self, table: cute.Tensor, row: Int32, block: Int32) -> Int32:
        """Return, in thread n of the warp, the page of the n-th unit from a block on.

        After the row's end it is any page.
        """
        unit = block * self.units + arch.lane_idx()
        page = unit * self.unit // self.page_tokens
        return table[row, cutlass.min(page, table.shape[1] - 1)]

    @cute.jit
    def copy_q(self, queries: tuple, shared: Shared, query: Int32, count: Int32) -> None:
        """Start the copies of the tile's pairs of a row. A box has the heads of one new token."""
        first = arch.block_idx()[0] * PAIRS
        box_bytes, num_boxes = 2 * self.box_heads * WIDTH, Int32(0)
        for n in cutlass.range_constexpr(self.boxes):
            nth = (first + n * self.box_heads) // self.num_heads
            num_boxes += Int32(nth < count)
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(shared.q_full, num_boxes * box_bytes)
        for n in cutlass.range_constexpr(self.boxes):
            pair = first + n * self.box_heads
            nth, heads = pair // self.num_heads, pair % self.num_heads // self.box_heads
            if nth < count:
                for atom, ((source, to),) in queries:
                    for part in cutlass.range_constexpr(cute.size(to, mode=[2])):
                        cute.copy(
                            atom,
                            source[None, heads, part, query + nth],
                            to[None, n, part],
                            tma_bar_ptr=shared.q_full,
                        )

    @cute.jit
    def copy_block(self, latents: tuple, slot: tuple, span: tuple, pages: tuple) -> None:
        """Start the copies of a block to a slot.

        A slot is (barrier, stage), a span (block, number of its tokens). `pages` is (page held by
        each thread, thread of the first unit).
        """
        (full, stage), (block, tokens), (window, first_unit) = slot, span, pages
        atom, ((source, to), (_, to_rotated)) = latents
        more = {"cache_policy": Int64(READ_ONCE)} if self.tiles == 1 else {}
        if cutlass.const_expr(self.cluster > 1):
            more = {"mcast_mask": Int16((1 << self.cluster) - 1)}
        for nth in cutlass.range_constexpr(self.units):
            page = arch.shuffle_sync(window, first_unit + nth)
            place = (block * BLOCK + nth * self.unit) % self.page_tokens // self.unit
            if nth * self.unit < tokens:
                for line in cutlass.range_constexpr(LINES + 1):
                    target = to[None, nth, line, stage]
                    if cutlass.const_expr(line == LINES):
                        target = to_rotated[None, nth, 0, stage]
                    barrier = full + line * PARTS // (LINES + 1)
                    cute.copy(
                        atom, source[None, place, line, page], target, tma_bar_ptr=barrier, **more
                    )

    def note(self, shared: Shared, stage: Int32) -> Note:
        return Note(*(shared.notes[n, stage] for n in range(len(Note._fields))))

    def new_token_of_warp(self) -> Int32:
        """Return the index of the new token of this warp's pairs. They all belong to one token."""
        warps = arch.make_warp_uniform(arch.warp_idx()) % 4
        return (arch.block_idx()[0] * PAIRS + warps * PIECE) // self.num_heads

    @cute.jit
    def score(self, shared: Shared, mma: cute.TiledMma, scale: Float32) -> None:
        thread = arch.thread_idx()[0] % 128
        nth = self.new_token_of_warp()
        slice_ = mma.get_slice(0)
        q, q_rotated = (
            slice_.make_fragment_A(slice_.partition_A(x)) for x in (shared.q, shared.q_rotated)
        )
        k, k_rotated = (
            slice_.make_fragment_B(slice_.partition_B(x)) for x in (shared.latents, shared.rotated)
        )
        s = cute.make_rmem_tensor(slice_.partition_shape_C((PAIRS, BLOCK)), Float32)
        p = cute.make_rmem_tensor(s.shape, BFloat16)
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
        copy = cute.make_tiled_copy_C(store, mma).get_slice(thread)
        p_from, p_to = copy.retile(p), copy.partition_D(shared.rotated)
        fresh, more = cute.make_mma_atom(mma.op), cute.make_mma_atom(mma.op)
        fresh.set(warpgroup.Field.ACCUMULATE, False)
        more.set(warpgroup.Field.ACCUMULATE, True)
        highest, total = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        rescales = cute.make_rmem_tensor(2, Float32)
        stage, phase, q_phase = Int32(0), Int32(0), Int32(0)
        arch.mbarrier_wait(shared.full + stage * PARTS, phase)
        query, count, seen, tokens, flags = self.note(shared, stage)
        while query >= 0:
            if flags & BEGINS != 0:
                arch.mbarrier_wait(shared.q_full, q_phase)
                q_phase ^= 1
                highest.fill(LOWEST)
                total.fill(0.0)
            warpgroup.fence()
            for n in cutlass.range_constexpr(STEPS):
                if cutlass.const_expr(n > 0 and n % (STEPS // PARTS) == 0):
                    part = stage * PARTS + n // (STEPS // PARTS)
                    arch.mbarrier_wait(shared.full + part, phase)
                atom, step = more if n > 0 else fresh, (None, None, n % (RANK // 16))
                a, b = (q, k) if n < RANK // 16 else (q_rotated, k_rotated)
                cute.gemm(atom, s, a[step], b[(*step, stage)], s)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if flags & ENDS != 0:
                self.arrive(shared.q_empty)
            # Other warps may still read the rotated parts that this warp overwrites next.
            arch.barrier(barrier_id=1, number_of_threads=128)
            if nth < count:
                limit = cutlass.min(seen + nth, tokens)
                if limit < BLOCK:
                    for n in cutlass.range_constexpr(cute.size(s)):
                        token = n // 4 * 8 + thread % 4 * 2 + n % 2
                        s[n] = cutlass.select_(token < limit, s[n], Float32(-math.inf))
                for r in cutlass.range_constexpr(2):
                    self.softmax_step(s, p, (highest, total, rescales), r, scale)
                cute.copy(copy, p_from, p_to[None, None, None, stage])
                self.store_sums(shared, stage, (rescales, highest, total), flags)
            if tokens < BLOCK:
                self.clear(shared, stage, tokens)
            arch.fence_view_async_shared()
            self.arrive(shared.weighed + stage)
            stage, phase = next_stage(stage, phase, STAGES)
            arch.mbarrier_wait(shared.full + stage * PARTS, phase)
            query, count, seen, tokens, flags = self.note(shared, stage)

    @cute.jit
    def arrive(self, barrier: cute.Pointer) -> None:
        """Arrive once per warp, after all of its threads."""
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(barrier)

    @cute.jit
    def release(self, barrier: cute.Pointer) -> None:
        """Arrive at the barrier of each block in the cluster, since each writes this ring."""
        if cutlass.const_expr(self.cluster > 1):
            arch.sync_warp()
            lane = arch.lane_idx()
            if lane < self.cluster:
                arch.mbarrier_arrive(barrier, lane)
        else:
            self.arrive(barrier)

    def softmax_step(
        self, s: cute.Tensor, p: cute.Tensor, run: tuple, r: int, scale: Float32
    ) -> None:
        """Turn one pair's scores into weights (online softmax)."""
        highest, total, rescales = run
        places = [n for n in range(cute.size(s)) if n // 2 % 2 == r]
        best = highest[r]
        for n in places:
            best = arch.fmax(best, s[n])
        best = of_four(arch.fmax, best)
        is_near = (best - highest[r]) * scale <= NEAR
        best = cutlass.select_(is_near, highest[r], best)
        rescales[r] = arch.exp2((highest[r] - best) * scale)
        base = best * scale
        weights = [arch.exp2(s[n] * scale - base) for n in places]
        for n, weight in zip(places, weights, strict=True):
            p[n] = weight.to(BFloat16)
        highest[r] = best
        while len(weights) > 1:
            weights = [a + b for a, b in zip(weights[::2], weights[1::2], strict=True)]
        total[r] = total[r] * rescales[r] + weights[0]

    @cute.jit
    def store_sums(self, shared: Shared, stage: Int32, run: tuple, flags: Int32) -> None:
        """Store the factor of earlier sums; at a row's end, also the maximum score and divisor."""
        rescales, highest, total = run
        for r in cutlass.range_constexpr(2):
            pair, sum_ = self.pair_of(r), total[r]
            sum_ = of_four(operator.add, sum_)
            if arch.lane_idx() % 4 == 0:
                shared.sums[0, pair, stage] = rescales[r]
                if flags & ENDS != 0:
                    shared.sums[1, pair, stage] = highest[r]
                    shared.sums[2, pair, stage] = sum_

    def pair_of(self, r: int) -> Int32:
        """Return one of this thread's two pairs of the tile."""
        return arch.warp_idx() % 4 * PIECE + arch.lane_idx() // 4 + 8 * r

    @cute.jit
    def clear(self, shared: Shared, stage: Int32, tokens: Int32) -> None:
        """Zero the latents after the row's end, which may be NaN: their weights are 0."""
        eights = RANK // 8
        zeros = cute.full(8, 0.0, BFloat16)
        thread = arch.thread_idx()[0] % 128
        for n in cutlass.range(tokens * eights + thread, BLOCK * eights, 128, unroll=1):
            line = shared.latents[n // eights, None, stage]
            cute.local_tile(line, (8,), (n % eights,)).store(zeros)

    @cute.jit
    def accumulate(
        self, operands: Operands, shared: Shared, mma: cute.TiledMma, scale: Float32
    ) -> None:
        nth = self.new_token_of_warp()
        slice_ = mma.get_slice(128 * (arch.make_warp_uniform(arch.warp_idx()) // 4))
        layout = cute.select(shared.latents.layout, [1, 0, 2])
        values = cute.make_tensor(shared.latents.iterator, layout)
        p = slice_.make_fragment_A(slice_.partition_A(shared.rotated))
        v = slice_.make_fragment_B(slice_.partition_B(values))
        o = cute.make_rmem_tensor(slice_.partition_shape_C((PAIRS, RANK)), Float32)
        first, more = cute.make_mma_atom(mma.op), cute.make_mma_atom(mma.op)
        more.set(warpgroup.Field.ACCUMULATE, True)
        sums = cute.make_rmem_tensor((2, 2), Float32)
        stage, phase = Int32(0), Int32(0)
        arch.mbarrier_wait(shared.full + stage * PARTS, phase)
        query, count, _, _, flags = self.note(shared, stage)
        while query >= 0:
            arch.mbarrier_wait(shared.weighed + stage, phase)
            for part in cutlass.range_constexpr(1, PARTS):
                arch.mbarrier_wait(shared.full + stage * PARTS + part, phase)
            rescales = [shared.sums[0, self.pair_of(r), stage] for r in range(2)]
            if arch.vote_any_sync((rescales[0] != 1) | (rescales[1] != 1)):
                for n in cutlass.range_constexpr(cute.size(o)):
                    o[n] = o[n] * rescales[n // 2 % 2]
            warpgroup.fence()
            first.set(warpgroup.Field.ACCUMULATE, flags & BEGINS == 0)
            for step in cutlass.range_constexpr(BLOCK // 16):
                atom = more if step > 0 else first
                cute.gemm(atom, o, p[None, None, step, stage], v[None, None, step, stage], o)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            is_left = (flags & ENDS != 0) & (nth < count)
            if is_left:
                for r in cutlass.range_constexpr(2):
                    for n in cutlass.range_constexpr(2):
                        sums[n, r] = shared.sums[1 + n, self.pair_of(r), stage]
            self.release(shared.empty + stage)
            if is_left:
                for r in cutlass.range_constexpr(2):
                    self.store_pair(o, sums[None, r], r, (query, flags, scale), operands)
            stage, phase = next_stage(stage, phase, STAGES)
            arch.mbarrier_wait(shared.full + stage * PARTS, phase)
            query, count, _, _, flags = self.note(shared, stage)

    @cute.jit
    def store_pair(
        self, o: cute.Tensor, sums: cute.Tensor, r: int, row: tuple, operands: Operands
    ) -> None:
        """Store one of this thread's two pairs: a row's result, or this lane's part of it."""
        query, flags, scale = row
        highest, total = sums[0], sums[1]
        total = cutlass.select_(total > 0, total, Float32(1))  # the mean of no tokens is 0
        inverse = 1.0 / total
        lane, group = arch.lane_idx(), arch.warp_idx() // 4
        pair = arch.block_idx()[0] * PAIRS + self.pair_of(r)
        if flags & WHOLE != 0:
            at = query * self.num_heads + pair
            for part in cutlass.range_constexpr(RANK // SUMMERS // 32):
                eight = cute.make_rmem_tensor(8, BFloat16)
                for n in cutlass.range_constexpr(8):
                    value = o[16 * part + 4 * (n // 2) + 2 * r + n % 2] * inverse
                    eight[n] = value.to(BFloat16)
                four = cute.recast_tensor(eight, Int32)
                exchange(four)
                four_words(operands.o, at, column_of(group, part) + lane % 4 * 8).store(four.load())
        else:
            began = (flags & BEGAN) // BEGAN
            line = operands.partial_o[arch.block_idx()[1], began, pair, None]
            for n in cutlass.range_constexpr(RANK // SUMMERS // 8):
                two = cute.make_rmem_tensor(2, Float32)
                for m in cutlass.range_constexpr(2):
                    two[m] = o[4 * n + 2 * r + m] * inverse
                first = column_of(group, n // 4) // 2 + n % 4 * 4 + lane % 4
                cute.local_tile(line, (2,), (first,)).store(two.load())
            if (group == 0) & (lane % 4 == 0):
                lse = highest * scale + cute.math.log2(total)
                operands.partial_lse[arch.block_idx()[1], began, pair] = lse


def column_of(group: Int32, part: int) -> Int32:
    """Return the first of the 32 columns of a part. A group has every second COLUMNS columns."""
    return (part // (COLUMNS // 32) * SUMMERS + group) * COLUMNS + part * 32 % COLUMNS
