"""Deltas of LoRA adapters in two launches: h = x A^T, then y += h B.

The reference is add_deltas of reference.py. A table groups the tokens of each adapter into tiles,
and lists the pages of its ranks. The first call of a step computes it, and the step's other calls
share it. All sizes and counts are on the device, so CUDA graphs can contain all launches.

Decision: a tile has tokens of one adapter. With tiles of adjacent tokens, each tile of 64 tokens
with 8 adapters had the pages of all eight, one after the other: the products of a layer of Qwen3-8B
took 200 us on an H200, and 40 us with one adapter.

Decision: the inputs of a sum are cut into chunks, whose number depends on the product alone. With
few tokens each chunk is a program's, which writes a partial sum. The second launch adds these in
ascending order. With many tokens a program adds all chunks itself, in the same order. Pages are
added in ascending order, too. So a row has the same bits with any other rows. A chunk has 1,024
inputs of 16 bits. With 256, the second launch reads 16 sums of gate and 16 of up: 64 requests of 8
adapters then have 0.84 of the base's rate, instead of 0.86.

Decision: the product that the deltas belong to is launched between the two. It prefetches its
weights while h is computed, and the second launch prefetches B while the product runs. With one
token h took 2 us of its own after each product. The second launch still ends 4 to 8 us after it.

Decision: the second launch can apply the gate. So the sums of gate and up are not written. This
saves 0.8 GB of traffic for 8,192 tokens of a layer of Qwen3-8B, and one launch.

Decision: tiles have 16 or 32 tokens, so that both multiply by mma.sync. Its sums differ from those
of wgmma, which Triton chooses from 64 rows on.

Decision: with few tokens both kernels are launched before their predecessors end. They read the
table and their first matrix before they wait. A table of the same call is read after the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.adapters import reference
from nanovllm_kernels.adapters.reference import NO_ADAPTER, NO_OWNER, RANK_PAGE
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.device import launches_early
from nanovllm_kernels.triton_parts import dot, launch_dependents, wait

FEW_TOKENS = 128  # up to here chunks of inputs are computed by programs of their own
FEW_TILE, MANY_TILE = 16, 32  # tokens of a program
COLUMNS, MANY_COLUMNS = 128, 256  # of a program with few tiles, with many
MANY_TILES = 16
MANY_BLOCKS = 4  # blocks of columns of a program with many tokens
MOST_PARTS = 4  # those of Qwen3.5's recurrent layers: qkv, z, b and a
MOST_PAGES = 4  # programs for the pages of a tile, if there are few tiles of few tokens
CHUNK_BYTES, LOAD_BYTES = 2048, 1024  # of a token's inputs: of one sum, and of one load
LISTED = tl.constexpr(256)  # pages whose owners are compared at once
COMPARED = 8192  # pairs of a token and a group that are compared at once


class Tiles(NamedTuple):
    """Tokens of one adapter per tile, and the pages of its ranks, both in ascending order."""

    tokens_X: Tensor  # their number, 0 if the tile is unused
    token_XT: Tensor
    pages_X: Tensor  # their number, 0 for tokens without an adapter
    page_XP: Tensor


def add_deltas(
    x_TD: Tensor,
    product: Callable[[], Tensor],
    a_RID: Tensor,
    b_RN: Tensor,
    widths: tuple[int, ...],
    adapter_T: Tensor,
    owner_P: Tensor,
    tables: dict[str, Tiles] | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Add the deltas to y = product(), in place, or return the gated sum.

    See reference.add_deltas. `tables` has the tables of these tokens. It is empty in the first call
    of a step.
    """
    num_tokens, num_pages = len(x_TD), len(owner_P)
    num_ranks, num_parts, num_inputs = a_RID.shape
    assert num_parts <= MOST_PARTS and x_TD.stride(1) == 1 and len(adapter_T) == num_tokens
    assert a_RID.stride(2) == b_RN.stride(1) == 1
    is_few = num_tokens <= FEW_TOKENS
    waits = is_few and launches_early(num_tokens, x_TD.device)
    tile = FEW_TILE if is_few else MANY_TILE
    tables = {} if tables is None else tables
    if is_first := not tables:
        tables["tiles"] = tiles_of(adapter_T, owner_P, tile)
    tiles, num_tiles = tables["tiles"], most_tiles(num_tokens, num_pages, tile)
    num_chunks, loads, depth = chunks_of(num_inputs, x_TD.dtype)
    num_sums = num_chunks if is_few else 1
    h_CITR = x_TD.new_empty(
        (num_sums, num_parts, num_tokens, num_ranks), dtype=torch.float32 if is_few else x_TD.dtype
    )
    has_many = num_tiles > MANY_TILES
    page_programs = 1 if has_many else min(num_pages, MOST_PAGES)
    shrink_kernel[(num_parts * num_sums, num_tiles, page_programs)](
        x_TD, a_RID, h_CITR, *tiles, num_tokens, num_inputs, num_ranks, num_pages,
        x_TD.stride(0), a_RID.stride(0), a_RID.stride(1), PAGE=RANK_PAGE, TOKENS=tile,
        INPUTS=depth, LOADS=loads, CHUNKS=num_chunks // num_sums, SUMS=num_sums,
        IS_FIRST=is_first, WAITS=waits, launch_pdl=waits,
    )  # fmt: skip
    y_TN = product()
    assert y_TN.stride(1) == 1
    at_once, blocks = MANY_COLUMNS if is_few and has_many else COLUMNS, 1 if is_few else MANY_BLOCKS
    own = dict(PAGE=RANK_PAGE, TOKENS=tile, COLUMNS=at_once, BLOCKS=blocks, SUMS=num_sums)
    if gated:
        assert num_parts == 2 and widths[0] == widths[1]
        out_TF = y_TN.new_empty(num_tokens, widths[0])
        expand_gated_kernel[(triton.cdiv(widths[0], blocks * at_once), num_tiles)](
            h_CITR, b_RN, y_TN, out_TF, *tiles, widths[0], num_tokens, num_ranks, num_pages,
            h_CITR.stride(0), y_TN.stride(0), b_RN.stride(0), **own, WAITS=waits, launch_pdl=waits,
        )  # fmt: skip
        return out_TF
    padded = (*widths, 0, 0, 0)[:MOST_PARTS]
    columns = sum(triton.cdiv(width, at_once) for width in widths)
    expand_kernel[(triton.cdiv(columns, blocks), num_tiles)](
        h_CITR, b_RN, y_TN, *tiles, *padded, num_tokens, num_ranks, num_pages,
        h_CITR.stride(0), y_TN.stride(0), b_RN.stride(0), **own, WAITS=waits, launch_pdl=waits,
    )  # fmt: skip
    return y_TN


def chunks_of(num_inputs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the number of chunks, the loads of each, and the inputs of a load.

    They depend on the product alone, as the order of sums does.
    """
    depth = min(LOAD_BYTES // dtype.itemsize, triton.next_power_of_2(num_inputs))
    loads = CHUNK_BYTES // LOAD_BYTES if num_inputs > depth else 1
    return triton.cdiv(num_inputs, loads * depth), loads, depth


def most_tiles(num_tokens: int, num_pages: int, tile: int) -> int:
    """Return the largest number of tiles, however the tokens are divided among adapters.

    Each adapter has a page or more. Tokens without an adapter are one more group.
    """
    groups = min(num_tokens, num_pages + 1)
    return (num_tokens + groups * (tile - 1)) // tile


def tiles_of(adapter_T: Tensor, owner_P: Tensor, tile: int) -> Tiles:
    """Return tiles of up to `tile` tokens of one adapter, ordered by adapter."""
    num_tokens, num_pages = len(adapter_T), len(owner_P)
    num_tiles = most_tiles(num_tokens, num_pages, tile)
    sizes = (num_tiles,), (num_tiles, tile), (num_tiles,), (num_tiles, num_pages)
    tiles = Tiles(*(adapter_T.new_empty(size) for size in sizes))
    groups = triton.next_power_of_2(num_pages + 2)
    tiles_kernel[(num_tiles,)](
        adapter_T, owner_P, *tiles, num_tokens, num_pages, TOKENS=tile, GROUPS=groups,
        COMPARED=min(max(COMPARED // groups, 16), 128),
    )  # fmt: skip
    return tiles


@triton.jit(do_not_specialize=["num_tokens"])
def tiles_kernel(
    adapter_T, owner_P, tokens_X, token_XT, pages_X, page_XP, num_tokens, num_pages,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Write one tile. Group 0 has the tokens without an adapter, group n those of adapter n - 1."""
    tile = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    count = tl.zeros([GROUPS], tl.int32)
    for first in range(0, num_tokens, COMPARED):
        t = first + tl.arange(0, COMPARED)
        token_group = tl.load(adapter_T + t, t < num_tokens, -2) + 1
        count += tl.sum((token_group[:, None] == group[None, :]).to(tl.int32), 0)
    needed = tl.cdiv(count, TOKENS)
    own_group = tl.sum((tl.cumsum(needed, 0) <= tile).to(tl.int32), 0)  # GROUPS: unused
    skipped = (tile - tl.sum(tl.where(group < own_group, needed, 0), 0)) * TOKENS
    own_count = tl.sum(tl.where(group == own_group, count, 0), 0)
    tl.store(tokens_X + tile, tl.maximum(tl.minimum(own_count - skipped, TOKENS), 0))
    place = 0 - skipped
    for first in range(0, num_tokens, COMPARED):
        t = first + tl.arange(0, COMPARED)
        is_own = (tl.load(adapter_T + t, t < num_tokens, -2) + 1 == own_group).to(tl.int32)
        at = place + tl.cumsum(is_own, 0) - is_own
        tl.store(token_XT + tile * TOKENS + at, t, (is_own > 0) & (at >= 0) & (at < TOKENS))
        place += tl.sum(is_own, 0)
    num_own = 0
    for first in range(0, num_pages, LISTED):
        page = first + tl.arange(0, LISTED)
        is_own = (tl.load(owner_P + page, page < num_pages, -2) + 1 == own_group).to(tl.int32)
        at = tile * num_pages + num_own + tl.cumsum(is_own, 0) - is_own
        tl.store(page_XP + at, page, is_own > 0)
        num_own += tl.sum(is_own, 0)
    tl.store(pages_X + tile, num_own)


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x_TD, a_RID, h_CITR, tokens_X, token_XT, pages_X, page_XP, num_tokens, num_inputs, num_ranks,
    num_pages, x_stride, a_stride, part_stride, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    INPUTS: tl.constexpr, LOADS: tl.constexpr, CHUNKS: tl.constexpr, SUMS: tl.constexpr,
    IS_FIRST: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Compute one of SUMS sums of each token, over CHUNKS chunks of LOADS times INPUTS inputs."""
    wait(WAITS and IS_FIRST)
    launch_dependents(WAITS)
    part, nth_sum, tile = tl.program_id(0) // SUMS, tl.program_id(0) % SUMS, tl.program_id(1)
    count = tl.load(pages_X + tile)
    t, is_token = tokens_of(tokens_X, token_XT, tile, TOKENS)
    # The compiler would make h + (0 + x a) one chain of products, which rounds otherwise. It does
    # not know this zero.
    zeros = tl.zeros([TOKENS, PAGE], tl.float32) + (num_tokens < 0).to(tl.float32)
    for nth in tl.range(tl.program_id(2), count, tl.num_programs(2), num_stages=1):
        page = tl.load(page_XP + tile * num_pages + nth)
        r = page * PAGE + tl.arange(0, PAGE)
        x_at = x_TD + t.to(tl.int64)[:, None] * x_stride
        a_at = a_RID + r.to(tl.int64)[None, :] * a_stride + part * part_stride
        d = nth_sum * CHUNKS * LOADS * INPUTS + tl.arange(0, INPUTS)
        a = tl.load(a_at + d[:, None], (d < num_inputs)[:, None], 0.0)
        wait(WAITS)
        x = tl.load(x_at + d[None, :], is_token[:, None] & (d < num_inputs)[None, :], 0.0)
        h, chunk = zeros, dot(x, a, zeros)
        for load in tl.range(1, CHUNKS * LOADS, num_stages=3):
            d += INPUTS
            x = tl.load(x_at + d[None, :], is_token[:, None] & (d < num_inputs)[None, :], 0.0)
            a = tl.load(a_at + d[:, None], (d < num_inputs)[:, None], 0.0)
            is_next = load % LOADS == 0
            h += tl.where(is_next, chunk, 0.0)
            chunk = dot(x, a, tl.where(is_next, zeros, chunk))
        h += chunk
        row = (nth_sum * (tl.num_programs(0) // SUMS) + part) * num_tokens + t
        h_at = h_CITR + row.to(tl.int64)[:, None] * num_ranks + r[None, :]
        tl.store(h_at, h.to(h_CITR.dtype.element_ty), is_token[:, None])
    wait(WAITS)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    h_CITR, b_RN, y_TN, tokens_X, token_XT, pages_X, page_XP, width_0, width_1, width_2, width_3,
    num_tokens, num_ranks, num_pages, h_stride, y_stride, b_stride, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, SUMS: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Add the products of the sums h with B to some columns of y."""
    launch_dependents(WAITS)
    tile = tl.program_id(1)
    count = tl.load(pages_X + tile)
    if count > 0:
        t, is_token = tokens_of(tokens_X, token_XT, tile, TOKENS)
        page_P = page_XP + tile * num_pages
        first_page = tl.load(page_P)
        end_0 = tl.cdiv(width_0, COLUMNS)
        end_1 = end_0 + tl.cdiv(width_1, COLUMNS)
        end_2 = end_1 + tl.cdiv(width_2, COLUMNS)
        for nth_block in tl.range(BLOCKS, num_stages=1):
            block, part, start, width = tl.program_id(0) * BLOCKS + nth_block, 0, 0, width_0
            if block >= end_2:
                block, part, start, width = block - end_2, 3, width_0 + width_1 + width_2, width_3
            elif block >= end_1:
                block, part, start, width = block - end_1, 2, width_0 + width_1, width_2
            elif block >= end_0:
                block, part, start, width = block - end_0, 1, width_0, width_1
            n = block * COLUMNS + tl.arange(0, COLUMNS)
            is_column = n < width
            is_own = is_token & (tl.zeros([TOKENS], tl.int32) + block * COLUMNS < width)
            n += start
            b = columns_of(b_RN + n, first_page, is_column, b_stride, PAGE)
            wait(WAITS)
            y_at = y_TN + t.to(tl.int64)[:, None] * y_stride + n[None, :]
            is_written = is_token[:, None] & is_column[None, :]
            y = tl.load(y_at, is_written, 0.0).to(tl.float32)
            h_at = h_CITR + (part * num_tokens + t).to(tl.int64)[:, None] * num_ranks
            h = sum_of(h_at, first_page, is_own, h_stride, PAGE, SUMS).to(b.dtype)
            more = dot(h, b, tl.zeros([TOKENS, COLUMNS], tl.float32))
            for nth in tl.range(1, count, num_stages=1):
                page = tl.load(page_P + nth)
                b = columns_of(b_RN + n, page, is_column, b_stride, PAGE)
                h = sum_of(h_at, page, is_own, h_stride, PAGE, SUMS).to(b.dtype)
                more = dot(h, b, more)
            tl.store(y_at, (y + more).to(y_TN.dtype.element_ty), is_written)
    wait(WAITS)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_gated_kernel(
    h_CITR, b_RN, y_TN, out_TF, tokens_X, token_XT, pages_X, page_XP, width, num_tokens, num_ranks,
    num_pages, h_stride, y_stride, b_stride, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, SUMS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Add the deltas to some columns of gate and up, and write silu(gate) * up.

    The sums and the activated gate are rounded, as in launches of their own.
    """
    launch_dependents(WAITS)
    tile = tl.program_id(1)
    count = tl.load(pages_X + tile)
    t, is_token = tokens_of(tokens_X, token_XT, tile, TOKENS)
    page_P = page_XP + tile * num_pages
    first_page = tl.load(page_P, count > 0, 0)
    h_at = h_CITR + t.to(tl.int64)[:, None] * num_ranks
    up_h_at = h_CITR + (num_tokens + t).to(tl.int64)[:, None] * num_ranks
    dtype: tl.constexpr = y_TN.dtype.element_ty
    for nth_block in tl.range(BLOCKS, num_stages=1):
        n = (tl.program_id(0) * BLOCKS + nth_block) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = n < width
        gate_at, up_at = b_RN + n, b_RN + width + n
        page = first_page
        gate_b = columns_of(gate_at, page, is_column, b_stride, PAGE)
        up_b = columns_of(up_at, page, is_column, b_stride, PAGE)
        wait(WAITS)
        y_at = y_TN + t.to(tl.int64)[:, None] * y_stride + n[None, :]
        is_written = is_token[:, None] & is_column[None, :]
        y_gate = tl.load(y_at, is_written, 0.0).to(tl.float32)
        y_up = tl.load(y_at + width, is_written, 0.0).to(tl.float32)
        gate = tl.zeros([TOKENS, COLUMNS], tl.float32)
        up = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for nth in tl.range(0, count, num_stages=1):
            if nth > 0:
                page = tl.load(page_P + nth)
                gate_b = columns_of(gate_at, page, is_column, b_stride, PAGE)
                up_b = columns_of(up_at, page, is_column, b_stride, PAGE)
            gate_h = sum_of(h_at, page, is_token, h_stride, PAGE, SUMS).to(gate_b.dtype)
            up_h = sum_of(up_h_at, page, is_token, h_stride, PAGE, SUMS).to(up_b.dtype)
            gate = dot(gate_h, gate_b, gate)
            up = dot(up_h, up_b, up)
        gate = (y_gate + gate).to(dtype).to(tl.float32)
        activated = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out = activated * (y_up + up).to(dtype).to(tl.float32)
        out_at = out_TF + t.to(tl.int64)[:, None] * width + n[None, :]
        tl.store(out_at, out.to(dtype), is_written)


@triton.jit
def tokens_of(tokens_X, token_XT, tile, TOKENS: tl.constexpr):
    """Return a tile's tokens, and whether they exist."""
    nth = tl.arange(0, TOKENS)
    is_token = nth < tl.load(tokens_X + tile)
    return tl.load(token_XT + tile * TOKENS + nth, is_token, 0), is_token


@triton.jit
def columns_of(b_at, page, is_column, b_stride, PAGE: tl.constexpr):
    """Return some columns of a page of B."""
    rows = (page * PAGE + tl.arange(0, PAGE)).to(tl.int64)[:, None]
    return tl.load(b_at[None, :] + rows * b_stride, is_column[None, :], 0.0)


@triton.jit
def sum_of(h_at, page, is_token, h_stride, PAGE: tl.constexpr, SUMS: tl.constexpr):
    """Return h of a page: the sums over chunks of the inputs, added in ascending order."""
    own_at = h_at + (page * PAGE + tl.arange(0, PAGE))[None, :]
    h = tl.load(own_at, is_token[:, None], 0.0).to(tl.float32)
    for nth_sum in tl.static_range(1, SUMS):
        h += tl.load(own_at + nth_sum * h_stride, is_token[:, None], 0.0)
    return h


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of a case. `ranks` are those of the adapters on the device."""

    tokens: int
    inputs: int
    widths: tuple[int, ...]
    ranks: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        widths, ranks = ("+".join(map(str, sizes)) for sizes in (self.widths, self.ranks))
        return f"T={self.tokens} D={self.inputs} N={widths} ranks={ranks} {bits(self.dtype)}"


def inputs(shape: DeltaShape, device: torch.device) -> Args:
    """Return arguments of add_deltas. One page has no owner, and every third token no adapter."""
    pages = [-(-rank // RANK_PAGE) for rank in shape.ranks]
    owners = [nth for nth, count in enumerate(pages) for _ in range(count)]
    owners = [NO_OWNER, *owners[::2], *owners[1::2]]  # pages of an adapter need not be adjacent
    num_ranks, parts, width = RANK_PAGE * len(owners), len(shape.widths), sum(shape.widths)
    row = parts * shape.inputs + width
    ranks_RX = normal(device, num_ranks, row + 24, dtype=shape.dtype)  # rows of other products
    a_RX, b_RN = ranks_RX[:, 8 : 8 + parts * shape.inputs], ranks_RX[:, 8 : 8 + row][:, -width:]
    x_TD = normal(device, shape.tokens, shape.inputs, dtype=shape.dtype, seed=1)
    y_TN = normal(device, shape.tokens, width, dtype=shape.dtype, seed=2)
    adapters = [NO_ADAPTER if t % 3 == 2 else t % len(pages) for t in range(shape.tokens)]
    adapter_T, owner_P = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (adapters, owners)
    )
    a_RID = a_RX.unflatten(1, (parts, shape.inputs))
    return x_TD / shape.inputs**0.5, y_TN, a_RID, b_RN, shape.widths, adapter_T, owner_P


def written(_: object, args: Args) -> Tensors:
    return (args[1],)


def with_product(run: Callable[..., Tensor], *, gated: bool = False) -> Callable[..., Tensor]:
    """Return a function of x, y and the rest, where y is the product."""

    def added(x_TD: Tensor, y_TN: Tensor, *rest: Any) -> Tensor:  # noqa: ANN401
        return run(x_TD, lambda: y_TN, *rest, gated=gated)

    return added


def gated_sizes(expected: Tensors, args: Args) -> Tensors:
    """Return the sizes of products of a rounded sum and a rounded gate.

    The slope of silu is at most 1.1, and the gate is at most its argument.
    """
    gate_TF, up_TF = sizes(expected, args)[0].chunk(2, 1)
    return (1.1 * gate_TF * up_TF,)


def sizes(_: Tensors, args: Args) -> Tensors:
    """Return the sum of the absolute terms of each element."""
    x, y, a, b, *rest = args
    y = y.abs().double()
    matrices = a.abs().double(), b.abs().double()
    reference.add_deltas(x.abs().double(), lambda: y, *matrices, *rest)
    return (y,)


def timed(tokens: int, num_adapters: int, shape: tuple[int, tuple[int, ...]]) -> Case:
    """Return a timed case of rank 16 with its tables. All adapters are read once.

    All tokens have an adapter: the next one in each row, or the same in 1,024 rows.
    """
    num_inputs, widths = shape
    delta_shape = DeltaShape(tokens, num_inputs, widths, (16,) * num_adapters)
    num_bytes = 2 * 16 * num_adapters * (num_inputs * len(widths) + sum(widths))
    num_bytes += 2 * tokens * (num_inputs + 2 * sum(widths))

    def make(device: torch.device) -> Args:
        x, y, a, b, widths, adapter_T, owner_P = inputs(delta_shape, device)
        t = torch.arange(tokens, dtype=torch.int32, device=device)
        adapter_T = (t if tokens < 1024 else t // 1024) % num_adapters
        tables: dict[str, Tiles] = {}
        if device.type == "cuda":
            add_deltas(x, lambda: y, a, b, widths, adapter_T, owner_P, tables)
        return x, y, a, b, widths, adapter_T, owner_P, tables

    return Case(f"timed {delta_shape.name}", make, num_bytes=num_bytes)


SHAPES = (
    DeltaShape(1, 64, (48,), (1,)),
    DeltaShape(7, 2100, (200, 16, 16), (16, 33, 4)),
    DeltaShape(37, 128, (130, 130), (40, 20, 16)),
    DeltaShape(140, 1300, (700, 40), (20, 16)),
    DeltaShape(33, 160, (64, 40), (8, 16), torch.float32),
    DeltaShape(20, 64, (80, 70, 4, 4), (16, 20), torch.float32),
)
GATED_SHAPES = (
    DeltaShape(1, 64, (48, 48), (1,)),
    DeltaShape(37, 300, (130, 130), (40, 20, 16)),
    DeltaShape(140, 300, (600, 600), (20, 16)),
    DeltaShape(20, 64, (80, 80), (16, 20), torch.float32),
)
SIZES_8B = (4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (12288, 12288)), (12288, (4096,))
LOADS = (1, 1), (64, 1), (64, 8), (64, 64), (8192, 8)  # tokens and adapters
ADD_DELTAS = Kernel(
    "add_deltas",
    with_product(add_deltas),
    with_product(reference.add_deltas),
    (
        *(Case(shape.name, partial(inputs, shape), small=True) for shape in SHAPES),
        *(timed(tokens, adapters, size) for tokens, adapters in LOADS for size in SIZES_8B),
    ),
    ulps_16=3,
    ulps_32=16,
    scale=sizes,
    outputs=written,
)
GATED_DELTAS = Kernel(
    "gated_deltas",
    with_product(add_deltas, gated=True),
    with_product(reference.add_deltas, gated=True),
    (
        *(Case(shape.name, partial(inputs, shape), small=True) for shape in GATED_SHAPES),
        *(timed(tokens, adapters, SIZES_8B[2]) for tokens, adapters in LOADS),
    ),
    ulps_16=6,
    ulps_32=64,
    scale=gated_sizes,
)
