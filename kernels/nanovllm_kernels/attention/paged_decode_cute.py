"""Split-KV flash decoding over pages, for Hopper, in CuTe DSL: a few new tokens per row.

The reference is nanovllm_kernels.attention.reference. Heads have width 64 or 128. Queries are
bfloat16, and caches are bfloat16 or float8_e4m3fn (eight_bits_cute.py). Pages have 16, 32 or a
multiple of 64 tokens. Up to 16 pairs of new token and query head share a key/value head.
paged_decode handles all other cases.

Decision: as in paged_decode, the contexts of all rows form one sequence that is cut into equal
shares, one per lane. One thread block handles a key/value head of a lane and has a multiprocessor
to itself. The heads of a lane run side by side, since they read neighbouring memory. A producer
warp keeps loads to all of shared memory in flight by TMA. It runs ahead of the consumers, across
the ends of rows, and writes a note about the contents of each block.

Decision: four consumer warps split a block by tokens, each with its own online softmax. They
synchronise at a row's end only. The pairs of a key/value head, one new token after the other, are
padded to the 16 rows of a tensor core.

Decision: one launch. The last lane to finish a row that was cut merges its parts. The plan and the
first row's old tokens are loaded without waiting for the preceding kernel (programmatic dependent
launch). Therefore that kernel must not write the plan, starts, lengths or page table. Nor may it
let this kernel start before the kernels that it depends on are complete.

Decision: rows of one token each use a kernel without `starts_R1`. With it, a warp or a lane may
have no token of a row that a query sees. Its sum of weights is then 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from torch import Tensor

from nanovllm_kernels.attention import eight_bits_cute as eight_bits, paged_decode as triton_decode
from nanovllm_kernels.attention.paged_decode import MAX_WIDTH, DecodeKernel, plan_lanes, results_of
from nanovllm_kernels.compile_cache import CachedCompile, Compiled
from nanovllm_kernels.like import compiled, like
from nanovllm_kernels.ring_cute import READ_ONCE, next_stage, of_four

BLOCK = 64  # tokens
WARPS = 4  # consumer warps
PIECE = BLOCK // WARPS  # tokens of a block per warp; equals the MMA depth
THREADS = 32 * WARPS
HALF = 64  # elements of a token in a swizzled line of shared memory
WIDTHS = (HALF, 2 * HALF)
SHARED_BYTES = 225 * 1024
LOWEST = -1e30  # less than all scores, and finite, so that differences are not NaN
MERGED = 8  # partial results loaded at once
QUAD = 4  # elements of a result that a thread handles together
LOG2_E = math.log2(math.e)
MAX_PAIRS = 16  # pairs of new token and query head per key/value head: the rows of a tensor core


class Plan(NamedTuple):
    lanes_N5: Tensor  # of plan_lanes, in units of PIECE tokens
    arrived_NG: Tensor  # per begun row, lanes that are done; 0 before and after


class Operands(NamedTuple):
    """Operands in global memory besides the caches; from `lanes` on, see plan_lanes and Plan."""

    q: cute.Tensor
    table: cute.Tensor
    lengths: cute.Tensor
    starts: cute.Tensor  # unused if rows have one token each
    o: cute.Tensor
    lanes: cute.Tensor
    arrived: cute.Tensor
    partial_o: cute.Tensor
    partial_lse: cute.Tensor
    scales: cute.Tensor  # of keys' and of values' heads; unused for bfloat16 caches


def obstacle(page_tokens: int, width: int, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel does not support a cache, or None."""
    if dtype != torch.bfloat16 or width not in WIDTHS:
        return f"it computes in bfloat16, with heads of width {WIDTHS[0]} or {WIDTHS[1]}"
    if page_tokens % BLOCK and page_tokens not in (PIECE, 2 * PIECE):
        return f"pages must have {PIECE}, {2 * PIECE} or a multiple of {BLOCK} tokens"
    return None


def plan_decode(lengths_R: Tensor, k_PSGA: Tensor) -> Plan:
    """Return a Plan. It is valid for all layers of the step."""
    num_kv_heads = k_PSGA.shape[2]
    lanes_N5 = plan_lanes(lengths_R, num_kv_heads, PIECE, per_processor=1)
    return Plan(lanes_N5, lanes_N5.new_zeros(len(lanes_N5), num_kv_heads))


def paged_decode(
    q_THA: Tensor, k_PSGA: Tensor, v_PSGA: Tensor, page_table_RM: Tensor, lengths_R: Tensor,
    plan: Plan, out_THA: Tensor | None = None, *, starts_R1: Tensor | None = None, width: int = 1,
    scales_2G: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute paged_decode, with the same arguments except for the plan.

    More than MAX_PAIRS pairs go to the Triton kernel, with a new plan in every layer.
    """
    (_, num_heads, head_size), (page_tokens, num_kv_heads) = q_THA.shape, k_PSGA.shape[1:3]
    assert q_THA.stride(1) == head_size
    assert 1 <= width <= (MAX_WIDTH if starts_R1 is not None else 1), width
    group, rows = num_heads // num_kv_heads, (page_table_RM, lengths_R)
    if group * width > MAX_PAIRS:
        anew = triton_decode.plan_decode(lengths_R, k_PSGA)
        args = q_THA, k_PSGA, v_PSGA, *rows, anew, out_THA
        more = {"starts_R1": starts_R1, "width": width, "scales_2G": scales_2G}
        return triton_decode.paged_decode(*args, **more)
    o_THA, partial_o, partial_lse = results_of(q_THA, len(plan.lanes_N5), out_THA, width)
    starts = lengths_R if starts_R1 is None else starts_R1
    scales = partial_lse if scales_2G is None else scales_2G
    operands = Operands(q_THA, *rows, starts, o_THA, *plan, partial_o, partial_lse, scales)
    kind = group, head_size, page_tokens, 0 if starts_R1 is None else width, scales_2G is not None
    caches = (k_PSGA, v_PSGA)
    if scales_2G is not None:  # in units of 16 bits
        caches = k_PSGA.view(torch.float16), v_PSGA.view(torch.float16)
    compile_decode(*kind)(*caches, operands)
    return o_THA


DECODE = DecodeKernel(plan_decode, paged_decode, MAX_WIDTH, obstacle)


@CachedCompile
def compile_decode(
    group: int, width: int, page_tokens: int, most_new: int, is_fp8: bool = False
) -> Compiled:
    """Compile the kernel for `group` query heads per key/value head.

    `most_new` is the maximum of new tokens per row, or 0 if each has one and there is no starts_R1.
    `is_fp8` is for fp8 keys and values. Needs no GPU if CUTE_DSL_ARCH is set.
    """
    any_ = cute.sym_int

    decode = PagedDecode(group, width, page_tokens, most_new, is_fp8=is_fp8)
    q, o = (like(BFloat16, any_(), any_(), width, divisibility=8) for _ in range(2))
    cache = like(decode.kind, any_(), page_tokens, any_(), decode.stored, divisibility=8)
    partial_lse = like(Float32, any_(), 2, any_())
    operands = Operands(
        q=q,
        table=like(Int32, any_(), any_()),
        lengths=like(Int32, any_()),
        starts=like(Int32, any_()),
        o=o,
        lanes=like(Int32, any_(), 5),
        arrived=like(Int32, any_(), any_()),
        partial_o=like(Float32, any_(), 2, any_(), width, divisibility=4),
        partial_lse=partial_lse,
        scales=like(Float32, 2, any_()) if is_fp8 else like(Float32, any_(), 2, any_()),
    )
    return compiled(decode, cache, cache, operands)


class Shared(NamedTuple):
    """Shared memory of a thread block."""

    k: cute.Tensor  # [token, element, stage]
    v: cute.Tensor
    q: cute.Tensor  # [pair, element, stage], filled if the stage begins a row
    notes: cute.Tensor  # [4 or 6, stage]: see PagedDecode.load
    full: cute.Pointer  # mbarriers: the stage is filled
    empty: cute.Pointer  # mbarriers: all warps have read the stage
    first_q: cute.Pointer  # mbarrier: the first row's queries are loaded
    results: cute.Tensor  # [element, pair, warp, parity]: each warp's result of a row
    sums: cute.Tensor  # [2, pair, warp, parity]: its maximum score, and its sum of weights
    is_last: cute.Pointer


class Running(NamedTuple):
    """A thread's registers of its warp's online softmax."""

    o: cute.Tensor  # sum of weighted values
    highest: cute.Tensor  # maximum score
    total: cute.Tensor  # sum of weights


class PagedDecode:
    def __init__(
        self, group: int, width: int, page_tokens: int, most_new: int = 0, *, is_fp8: bool = False
    ) -> None:
        self.group, self.width, self.page_tokens = group, width, page_tokens
        self.is_fp8, self.lift = is_fp8, eight_bits.LIFT if is_fp8 else 0.0
        self.kind = Float16 if is_fp8 else BFloat16  # type of the MMA operands
        self.stored = width // 2 if is_fp8 else width  # 16-bit units of a token's key or value
        self.line = min(HALF, self.stored)  # of these units, those of one TMA copy
        self.ragged, self.most_new = most_new > 0, max(1, most_new)
        self.pairs = group * self.most_new
        assert 1 <= self.pairs <= MAX_PAIRS, f"{self.pairs} queries share a key/value head"
        self.scale = LOG2_E / math.sqrt(width)
        self.unit = min(BLOCK, page_tokens)  # tokens of a block that share a page
        self.pages_per_block = BLOCK // self.unit
        self.window = 32 // self.pages_per_block  # blocks whose pages a warp's threads hold
        self.q_bytes = 2 * group * width  # per token
        self.padded = width + 8  # elements between the pairs of a warp's result
        fixed = 8 * WARPS * self.pairs * (self.padded + 2) + 2 * (16 - self.pairs) * width + 2048
        stage = 4 * BLOCK * self.stored + self.most_new * self.q_bytes + 32
        self.stages = min(16, (SHARED_BYTES - fixed) // stage)

    @cute.jit
    def __call__(self, k: cute.Tensor, v: cute.Tensor, operands: Operands, stream: Any) -> None:  # noqa: ANN401
        kinds = warpgroup.SmemLayoutAtomKind
        swizzle = kinds.K_SW128 if self.line == HALF else kinds.K_SW64
        line = warpgroup.make_smem_layout_atom(swizzle, self.kind)
        ring = cute.tile_to_shape(line, (BLOCK, self.stored, self.stages), (0, 1, 2))
        boxes = []
        for tokens in (self.unit, PIECE):
            box = cute.tile_to_shape(line, (tokens, self.line), (0, 1))
            for pages in (k, v):
                flat = cute.make_tensor(pages.iterator, cute.select(pages.layout, [1, 3, 2, 0]))
                op = cpasync.CopyBulkTensorTileG2SOp()
                info = cpasync.make_tiled_tma_atom(op, flat, box, (tokens, self.line))
                boxes.append((info[0], info[1]))
        self.kernel(*boxes, operands, ring).launch(
            grid=[cute.size(operands.arrived, mode=[1]), cute.size(operands.arrived, mode=[0]), 1],
            block=[THREADS + 32, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        k_whole: tuple,
        v_whole: tuple,
        k_piece: tuple,
        v_piece: tuple,
        operands: Operands,
        ring: cute.ComposedLayout,
    ) -> None:
        shared = self.allocate(ring)
        nth_warp = arch.make_warp_uniform(arch.warp_idx())
        if nth_warp == WARPS:
            with arch.elect_one():
                arch.mbarrier_init(shared.first_q, 1)
                for stage in cutlass.range_constexpr(self.stages):
                    arch.mbarrier_init(shared.full + stage, 1)
                    arch.mbarrier_init(shared.empty + stage, WARPS)
            arch.mbarrier_init_fence()
        arch.sync_threads()
        if nth_warp == WARPS:
            whole = self.copies(self.unit, (k_whole, v_whole), shared)
            self.load(whole, self.copies(PIECE, (k_piece, v_piece), shared), operands, shared)
        else:
            self.compute(operands, shared)

    def allocate(self, ring: cute.ComposedLayout) -> Shared:
        smem = cutlass.utils.SmemAllocator()
        k, v = (smem.allocate_tensor(self.kind, ring.outer, 1024, ring.inner) for _ in range(2))
        # MMA rows after the pairs overlap the next slot. Their results are not read.
        slot = self.pairs * self.width
        slots = cute.make_layout((16, self.width, self.stages), stride=(self.width, 1, slot))
        q = smem.allocate_array(BFloat16, cute.cosize(slots), byte_alignment=128)
        pairs = (self.pairs, WARPS, 2)
        strides = [self.padded * n for n in (1, self.pairs, self.pairs * WARPS)]
        outcome = cute.make_layout((self.width, *pairs), stride=(1, *strides))
        num_notes = 6 if self.ragged else 4
        return Shared(
            k=k,
            v=v,
            q=cute.make_tensor(q, slots),
            notes=smem.allocate_tensor(Int32, cute.make_layout((num_notes, self.stages)), 16),
            full=smem.allocate_array(Int64, self.stages),
            empty=smem.allocate_array(Int64, self.stages),
            first_q=smem.allocate_array(Int64, 1),
            results=smem.allocate_tensor(Float32, outcome, 16),
            sums=smem.allocate_tensor(Float32, cute.make_layout((2, *pairs)), 16),
            is_last=smem.allocate_array(Int32, 1),
        )

    def copies(self, box: int, boxes: tuple, shared: Shared) -> list:
        """Return the copies of keys and of values: (box tokens, atom, source, target).

        Source: [box of the page, half, head, page]; target: [box of the block, half, stage].
        """
        copies = []
        for (atom, pages), ring in zip(boxes, (shared.k, shared.v), strict=True):
            cpasync.prefetch_descriptor(atom)
            tiles = [
                cute.group_modes(cute.flat_divide(x, (box, self.line)), 0, 2) for x in (ring, pages)
            ]
            to, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), *tiles)
            copies.append((box, atom, source, to))
        return copies

    @cute.jit
    def load(self, whole: list, pieces: list, operands: Operands, shared: Shared) -> None:
        """Fill the ring with this lane's blocks and a note for each.

        Fields: 0 first query of the row, or -1 after the last block; 1 end of the lane's tokens in
        the block; 2 bit 0: the lane's first block of the row, bit 1: its last, from bit 2: first
        piece; 3 first lane of the row, plus 2**16 times its last lane. If ragged, 4 number of the
        row's queries; 5 first token of the block that is one of the row's new tokens.
        """
        lane, last_row = arch.block_idx()[1], cute.size(operands.lengths) - 1
        share = operands.lanes[0, 2]  # length of a lane's share, in pieces
        start, piece, left = lane * share, operands.lanes[lane, 1], operands.lanes[lane, 2]
        row = min(operands.lanes[lane, 0], last_row)
        length, base = operands.lengths[row], piece // WARPS
        first_queries = self.queries_of(operands, row)
        window = self.pages_of(operands.table, row, base)
        ahead = min(row + 1, last_row)
        ahead_length = operands.lengths[ahead]
        ahead_window = self.pages_of(operands.table, ahead, Int32(0))
        # The first row's old tokens may be loaded while the preceding kernel still runs.
        early = min((length - first_queries[1]) // BLOCK, (piece + left + WARPS - 1) // WARPS)
        early = min(early - base, self.stages)
        if cutlass.const_expr(self.ragged):  # a lane may begin among the new tokens
            early = max(early, 0)
        i, stage, phase = Int32(0), Int32(0), Int32(1)
        while left >= 0:
            full = shared.full + stage
            if i == early:
                arch.griddepcontrol_wait()
                self.copy_first_q(operands.q, shared, *first_queries)
            if i >= self.stages:
                arch.mbarrier_wait(shared.empty + stage, phase)
            if left == 0:
                left = Int32(-1)
                with arch.elect_one():
                    shared.notes[0, stage] = Int32(-1)
                    arch.mbarrier_arrive(full)
            else:
                row_start, row_pieces = start - piece, pieces_of(length)
                query, count = self.queries_of(operands, row)
                block, skipped = piece // WARPS, piece % WARPS
                stop = min(WARPS, row_pieces - block * WARPS, skipped + left)
                taken = stop - skipped
                begins = Int32((i == 0) | (piece == 0))
                ends = Int32((left == taken) | (piece + taken == row_pieces))
                brings_q = Int32((piece == 0) & (i > 0))
                with arch.elect_one():
                    first, last = row_start // share, (row_start + row_pieces - 1) // share
                    shared.notes[0, stage] = query
                    shared.notes[1, stage] = min(stop * PIECE, length - block * BLOCK)
                    shared.notes[2, stage] = begins + 2 * ends + 4 * skipped
                    shared.notes[3, stage] = first + (last << 16)
                    if cutlass.const_expr(self.ragged):
                        shared.notes[4, stage] = count
                        shared.notes[5, stage] = length - count - block * BLOCK
                    num_bytes = taken * (4 * PIECE * self.stored) + brings_q * count * self.q_bytes
                    arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
                if brings_q != 0:
                    self.copy_q(operands.q, shared, stage, query, count)
                span = (block, skipped * PIECE, stop * PIECE)
                pages = (window, (block - base) * self.pages_per_block)
                if taken == WARPS:
                    self.copy_tokens(whole, (full, stage), span, pages)
                else:
                    self.copy_tokens(pieces, (full, stage), span, pages)
                left -= taken
                start += taken
                piece += taken
                if piece == row_pieces:
                    row, piece, base = ahead, Int32(0), Int32(0)
                    length, window = ahead_length, ahead_window
                    ahead = min(row + 1, last_row)
                    ahead_length = operands.lengths[ahead]
                    ahead_window = self.pages_of(operands.table, ahead, Int32(0))
                elif piece // WARPS == base + self.window:
                    base = piece // WARPS
                    window = self.pages_of(operands.table, row, base)
            i += 1
            stage, phase = next_stage(stage, phase, self.stages)
        arch.griddepcontrol_launch_dependents()

    def queries_of(self, operands: Operands, row: Int32) -> tuple:
        """Return the first query of a row, and the number of its queries."""
        if not self.ragged:
            return row, 1
        return operands.starts[row], operands.starts[row + 1] - operands.starts[row]

    def query_count(self, shared: Shared, stage: Int32) -> Any:  # noqa: ANN401
        return shared.notes[4, stage] if self.ragged else 1

    def pages_of(self, table: cute.Tensor, row: Int32, block: Int32) -> Int32:
        """Return in thread n the page of the n-th unit from a block on; any after the row's end."""
        unit = block * self.pages_per_block + arch.lane_idx()
        page = unit * self.unit // self.page_tokens
        return table[row, cutlass.min(page, table.shape[1] - 1)]

    @cute.jit
    def copy_tokens(self, copies: list, slot: tuple, span: tuple, pages: tuple) -> None:
        """Start the copies of a span of tokens to a slot.

        A slot is (barrier, stage), a span (block, its first token, end). `pages` is (page held by
        each thread, thread of the first unit).
        """
        (full, stage), (block, begin, end), (window, first_unit) = slot, span, pages
        for box, atom, source, to in copies:
            for nth in cutlass.range_constexpr(BLOCK // box):
                page = arch.shuffle_sync(window, first_unit + nth * box // self.unit)
                place = (block * BLOCK + nth * box) % self.page_tokens // box
                if (begin <= nth * box) & (nth * box < end):
                    for half in cutlass.range_constexpr(self.stored // self.line):
                        cute.copy(
                            atom,
                            source[None, place, half, arch.block_idx()[0], page],
                            to[None, nth, half, stage],
                            tma_bar_ptr=full,
                            cache_policy=Int64(READ_ONCE),
                        )

    @cute.jit
    def copy_first_q(self, q: cute.Tensor, shared: Shared, query: Int32, count: Any) -> None:  # noqa: ANN401
        """Copy with the warp's own threads, as a bulk copy would queue after all early blocks."""
        eights = self.width // 8
        for begin in cutlass.range_constexpr(0, self.pairs * eights, 32):
            pair, eight = (begin + arch.lane_idx()) // eights, (begin + arch.lane_idx()) % eights
            if pair < count * self.group:
                nth, head = self.query_of(pair)
                values = cute.local_tile(q[query + nth, head, None], (8,), (eight,)).load()
                cute.local_tile(shared.q[pair, None, 0], (8,), (eight,)).store(values)
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(shared.first_q)

    def query_of(self, pair: Int32) -> tuple:
        """Return the index of a pair's query in its row, and its head."""
        first = arch.block_idx()[0] * self.group
        if self.most_new == 1:
            return 0, first + pair
        return pair // self.group, first + pair % self.group

    @cute.jit
    def copy_q(
        self,
        q: cute.Tensor,
        shared: Shared,
        stage: Int32,
        query: Int32,
        count: Any,  # noqa: ANN401
    ) -> None:
        size = cute.make_layout(self.group * self.width)
        head = arch.block_idx()[0] * self.group
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16)
        for nth in cutlass.range_constexpr(self.most_new):
            if nth < count:
                first = cute.domain_offset((query + nth, head, 0), q)
                slot = cute.domain_offset((nth * self.group, 0), shared.q[None, None, stage])
                source, to = (cute.make_tensor(x.iterator, size) for x in (first, slot))
                with arch.elect_one():
                    cute.copy(atom, source, to, mbar_ptr=shared.full + stage)

    @cute.jit
    def compute(self, operands: Operands, shared: Shared) -> None:
        thread = arch.lane_idx()
        nth_warp = arch.make_warp_uniform(arch.warp_idx())
        op = warp.MmaF16BF16Op(self.kind, Float32, (16, 8, 16))
        mma = cute.make_tiled_mma(op, (1, 1, 1), permutation_mnk=(16, 16, 16))
        part = mma.get_slice(thread)
        plain = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.kind)
        transpose_atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.kind)
        q_copy = cute.make_tiled_copy_A(plain, mma).get_slice(thread)
        k_copy = cute.make_tiled_copy_B(plain, mma).get_slice(thread)
        v_copy = cute.make_tiled_copy_B(transpose_atom, mma).get_slice(thread)
        # This warp's tokens: keys [token, element, stage], values [element, token, stage].
        k = cute.flat_divide(shared.k, (PIECE, self.stored))[None, None, nth_warp, 0, None]
        v = cute.make_tensor(shared.v.iterator, cute.select(shared.v.layout, [1, 0, 2]))
        v = cute.flat_divide(v, (self.stored, PIECE))[None, None, 0, nth_warp, None]
        q_from, k_from = q_copy.partition_S(shared.q), k_copy.partition_S(k)
        v_from = v_copy.partition_S(v)
        q_in = part.make_fragment_A(part.partition_A(shared.q[None, None, 0]))
        k_raw, v_raw = (part.make_fragment_B(part.partition_B(x[None, None, 0])) for x in (k, v))
        k_in = self.widened_registers(part, k_raw, (PIECE, self.width))
        v_in = self.widened_registers(part, v_raw, (self.width, PIECE))
        k_scale = self.scale_of(operands, 0)
        v_at = part.partition_B(cute.make_identity_tensor((self.stored, PIECE)))
        scores = part.partition_shape_C((16, PIECE))
        s, t = cute.make_rmem_tensor(scores, Float32), cute.make_rmem_tensor(scores, Float32)
        p = cute.make_rmem_tensor(part.partition_shape_A((16, PIECE)), self.kind)
        o = cute.make_rmem_tensor(part.partition_shape_C((16, self.width)), Float32)
        rows = 1 if self.pairs <= 8 else 2  # rows of this thread, of 16: thread // 4, and + 8
        run = Running(o, *(cute.make_rmem_tensor(rows, Float32) for _ in range(2)))
        p.fill(0.0)

        stage, phase, parity = Int32(0), Int32(0), Int32(0)
        arch.mbarrier_wait(shared.full + stage, phase)
        query = shared.notes[0, stage]
        while query >= 0:
            tokens = shared.notes[1, stage] - nth_warp * PIECE
            flags, lanes = shared.notes[2, stage], shared.notes[3, stage]
            count = self.query_count(shared, stage)
            if flags & 1 != 0:
                arch.mbarrier_wait(shared.first_q, 0)
                copied = q_copy, q_from[None, None, None, stage]
                self.load_q(copied, shared.q[None, None, stage], q_in, k_scale)
                run.highest.fill(LOWEST)
                run.total.fill(0.0)
                run.o.fill(0.0)
            if (tokens > 0) & (nth_warp >= flags // 4):
                cute.copy(k_copy, k_from[None, None, None, stage], k_copy.retile(k_raw))
                self.widen(eight_bits.widen_keys, k_raw, k_in)
                s.fill(0.0)
                t.fill(0.0)
                for step in cutlass.range_constexpr(self.width // 16):
                    sum_ = (s, t)[step % 2]  # two independent chains hide the latency
                    cute.gemm(mma, sum_, q_in[None, None, step], k_in[None, None, step], sum_)
                s.store(s.load() + t.load())
                cute.copy(v_copy, v_from[None, None, None, stage], v_copy.retile(v_raw))
                if tokens < PIECE:  # cells after the row's end are undefined
                    for n in cutlass.range_constexpr(cute.size(v_raw)):
                        v_raw[n] = cutlass.select_(v_at[n][1] < tokens, v_raw[n], self.kind(0))
                    for n in cutlass.range_constexpr(8):
                        token = n // 4 * 8 + thread % 4 * 2 + n % 2
                        s[n] = cutlass.select_(token < tokens, s[n], Float32(-math.inf))
                if cutlass.const_expr(self.ragged):
                    self.mask_new_tokens(s, shared.notes[5, stage] - nth_warp * PIECE)
                for r in cutlass.range_constexpr(rows):
                    self.softmax_step(s, p, run, r)
                self.widen(eight_bits.widen_values, v_raw, v_in)
                cute.gemm(mma, o, p[None, None, 0], v_in[None, None, 0], o)
            arch.sync_warp()
            with arch.elect_one():
                arch.mbarrier_arrive(shared.empty + stage)
            if flags & 2 != 0:
                self.store_partial(run, shared, parity)
                arch.barrier(barrier_id=1, number_of_threads=THREADS)
                row = query, count, lanes & 0xFFFF, lanes >> 16
                self.combine_warps(operands, shared, parity, row)
                parity ^= 1  # with two buffers, one barrier per row is enough
            stage, phase = next_stage(stage, phase, self.stages)
            arch.mbarrier_wait(shared.full + stage, phase)
            query = shared.notes[0, stage]

    def widened_registers(self, part: cute.ThrMma, raw: cute.Tensor, shape: tuple) -> cute.Tensor:
        """Return registers for widened keys or values, or `raw` if nothing is widened."""
        return cute.make_rmem_tensor(part.partition_shape_B(shape), Float16) if self.is_fp8 else raw

    def widen(self, convert: Callable[..., None], raw: cute.Tensor, wide: cute.Tensor) -> None:
        if self.is_fp8:
            convert(raw, wide)

    def load_q(self, copied: tuple, q: cute.Tensor, q_in: cute.Tensor, scale: Float32) -> None:
        if self.is_fp8:
            eight_bits.load_q(q, q_in, 1 if self.pairs <= 8 else 2, scale)
        else:
            cute.copy(copied[0], copied[1], copied[0].retile(q_in))

    def scale_of(self, operands: Operands, nth: int) -> Float32:
        """Return the scale of this head's keys (`nth` 0) or values (1)."""
        return operands.scales[nth, arch.block_idx()[0]] if self.is_fp8 else Float32(1)

    @cute.jit
    def mask_new_tokens(self, s: cute.Tensor, own: Int32) -> None:
        """Mask the scores of this warp's tokens that come after a query.

        Tokens from `own` on are new: each query sees one of them more than its predecessor.
        """
        if own < PIECE - 1:
            thread = arch.lane_idx()
            for n in cutlass.range_constexpr(8):
                token, pair = n // 4 * 8 + thread % 4 * 2 + n % 2, thread // 4 + n // 2 % 2 * 8
                is_seen = token <= own + pair // self.group
                s[n] = cutlass.select_(is_seen, s[n], Float32(-math.inf))

    def softmax_step(self, s: cute.Tensor, p: cute.Tensor, run: Running, r: int) -> None:
        """Turn one row's scores into weights (online softmax), and rescale the earlier sums."""
        o, highest, total = run
        places = [n for n in range(8) if n // 2 % 2 == r]
        best = highest[r]
        for n in places:
            best = arch.fmax(best, s[n])
        best = of_four(arch.fmax, best)
        rescale = arch.exp2((highest[r] - best) * self.scale)
        base = best * self.scale - self.lift if self.is_fp8 else best * self.scale
        weights = [arch.exp2(s[n] * self.scale - base) for n in places]
        for n, weight in zip(places, weights, strict=True):
            p[n] = weight.to(self.kind)
        highest[r] = best
        total[r] = total[r] * rescale + ((weights[0] + weights[1]) + (weights[2] + weights[3]))
        for n in range(cute.size(o)):
            if n // 2 % 2 == r:
                o[n] = o[n] * rescale

    @cute.jit
    def store_partial(self, run: Running, shared: Shared, parity: Int32) -> None:
        """Store this warp's part of a row's result to shared memory."""
        thread = arch.lane_idx()
        nth_warp = arch.make_warp_uniform(arch.warp_idx())
        for r in cutlass.range_constexpr(cute.size(run.total)):
            weight = run.total[r]
            weight = of_four(operator.add, weight)
            pair = thread // 4 + 8 * r
            if pair < self.pairs:
                for n in cutlass.range_constexpr(self.width // 4):
                    tile, column = n // 2, thread % 4 * 2 + n % 2
                    a = eight_bits.element_of(tile, column) if self.is_fp8 else tile * 8 + column
                    shared.results[a, pair, nth_warp, parity] = run.o[n // 2 * 4 + r * 2 + n % 2]
                if thread % 4 == 0:
                    shared.sums[0, pair, nth_warp, parity] = run.highest[r]
                    shared.sums[1, pair, nth_warp, parity] = weight

    @cute.jit
    def combine_warps(self, operands: Operands, shared: Shared, parity: Int32, row: tuple) -> None:
        """Combine the warps' parts of a row. Store its result, or if it was cut, this lane's part.

        `row` is (first query, number of queries, first lane, last lane).
        """
        query, count, first, last = row
        thread = arch.thread_idx()[0]
        kv_head, lane = arch.block_idx()[0], arch.block_idx()[1]
        quads = self.width // QUAD
        v_scale = self.scale_of(operands, 1)
        for begin in cutlass.range_constexpr(0, self.pairs * quads, THREADS):
            pair, quad = (begin + thread) // quads, (begin + thread) % quads
            if pair < count * self.group:
                sums = [[shared.sums[n, pair, w, parity] for w in range(WARPS)] for n in range(2)]
                best = sums[0][0]
                for w in cutlass.range_constexpr(1, WARPS):
                    best = arch.fmax(best, sums[0][w])
                fades = [arch.exp2((highest - best) * self.scale) for highest in sums[0]]
                total = Float32(0)
                for w in cutlass.range_constexpr(WARPS):
                    total += sums[1][w] * fades[w]
                total = self.divisor(total)
                mean = cute.full(QUAD, 0.0, Float32)
                for w in cutlass.range_constexpr(WARPS):
                    part = quad_of(shared.results[None, pair, w, parity], quad)
                    mean += part.load() * (fades[w] * v_scale / total)
                if first == last:
                    nth, head = self.query_of(pair)
                    quad_of(operands.o[query + nth, head, None], quad).store(mean.to(BFloat16))
                else:
                    began, at = Int32(lane == first), kv_head * self.pairs + pair
                    quad_of(operands.partial_o[lane, began, at, None], quad).store(mean)
                    if quad == 0:
                        lse = best * self.scale + cute.math.log2(total)
                        operands.partial_lse[lane, began, at] = lse
        if first != last:
            arch.barrier(barrier_id=1, number_of_threads=THREADS)
            if thread == 0:
                arrived = cute.domain_offset((first, kv_head), operands.arrived).iterator
                before = arch.atomic_add(arrived, Int32(1), sem="acq_rel", scope="gpu")
                if before == last - first:
                    operands.arrived[first, kv_head] = Int32(0)
                shared.is_last[0] = Int32(before == last - first)
            arch.barrier(barrier_id=1, number_of_threads=THREADS)
            if shared.is_last[0] != 0:
                self.merge(operands, row)

    def divisor(self, total: Float32) -> Float32:
        """Return the sum of weights, or 1 if it is 0, so that the mean of no tokens is 0."""
        return cutlass.select_(total > 0, total, Float32(1)) if self.ragged else total

    @cute.jit
    def merge(self, operands: Operands, row: tuple) -> None:
        """Merge the parts of a row and store its result.

        `row` is (first query, number of queries, first lane, last lane).
        """
        query, count, first, last = row
        quads = self.width // QUAD
        for begin in cutlass.range(0, count * self.group * quads, THREADS, unroll=1):
            pair = (begin + arch.thread_idx()[0]) // quads
            quad = (begin + arch.thread_idx()[0]) % quads
            if pair < count * self.group:
                at = arch.block_idx()[0] * self.pairs + pair
                best, total = Float32(LOWEST), Float32(0)
                mean = cute.make_rmem_tensor(QUAD, Float32)
                mean.fill(0.0)
                for lane in cutlass.range(first, last + 1, MERGED, unroll=1):
                    each = [cutlass.min(lane + n, last) for n in range(MERGED)]
                    parts = [(x, Int32(x == first), at) for x in each]
                    lse = [operands.partial_lse[part] for part in parts]
                    some = [
                        quad_of(operands.partial_o[(*part, None)], quad).load() for part in parts
                    ]
                    highest = best
                    for n in cutlass.range_constexpr(MERGED):
                        best = arch.fmax(best, lse[n])
                    rescale = arch.exp2(highest - best)
                    total = total * rescale
                    mean.store(mean.load() * rescale)
                    for n in cutlass.range_constexpr(MERGED):
                        weight = arch.exp2(lse[n] - best)
                        weight = cutlass.select_(lane + n <= last, weight, Float32(0))
                        total += weight
                        mean.store(mean.load() + some[n] * weight)
                result = mean.load() * (1.0 / total)
                nth, head = self.query_of(pair)
                quad_of(operands.o[query + nth, head, None], quad).store(result.to(BFloat16))


def pieces_of(length: Int32) -> Int32:
    return (length + PIECE - 1) // PIECE


def quad_of(line: cute.Tensor, nth: Int32) -> cute.Tensor:
    return cute.local_tile(line, (QUAD,), (nth,))
