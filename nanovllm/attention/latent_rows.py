"""Latent attention on a GPU: decode rows absorbed by our kernel, chunks absorbed or expanded.

Handles shapes and launches; the arithmetic is in nanovllm_kernels and in batched library products.

Decision: chunks use the form with fewer operations. An operation of the absorbed form counts SLOWER
times, since its kernel reaches that much less of the card's peak than flash-attn-4. The choice
depends on host values only. In the expanded form, one causal call covers the step's own tokens and
up to PIECE of the latest cached tokens of their rows. Older tokens follow in pieces of PIECE
tokens, whose results are merged by their log-sum-exp. Memory is thus bounded for any context
length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from nanovllm_kernels.attention.latent_decode import DECODE as TRITON_DECODE
from nanovllm_kernels.attention.latent_reference import dequantised
from nanovllm_kernels.attention.paged_decode import DecodeKernel
from nanovllm_kernels.case import bits
from torch import Tensor

from nanovllm.attention.base import Attend, Batch
from nanovllm.attention.latent import Latents
from nanovllm.attention.paged import DecodeAndChunks

PIECE = 4096  # cached tokens that are expanded at once: 0.35 GB with 128 heads
GROUP = 16  # tokens of an absorbed chunk that are treated as one decode row
MOST_ABSORBED = 1024  # maximum absorbed chunk tokens of a step: 256 MB with 128 heads
SLOWER = 2  # cost of an absorbed operation relative to an expanded one
PerHead = Callable[..., Tensor]  # (x_THD, weight_HDN, out_THN=None): each head times its own matrix


def by_library(x_THD: Tensor, weight_HDN: Tensor, out_THN: Tensor | None = None) -> Tensor:
    """Multiply each head by a matrix of its own. Return out_THN, if given."""
    if out_THN is None:
        return torch.bmm(x_THD.transpose(0, 1), weight_HDN).transpose(0, 1)
    torch.bmm(x_THD.transpose(0, 1), weight_HDN, out=out_THN.transpose(0, 1))
    return out_THN


def bind_latents(
    batch: Batch,
    page_tokens: int,
    kernel: DecodeKernel,
    *,
    expands: bool,
    portable: DecodeKernel | None = None,
    per_head: PerHead = by_library,
) -> Attend:
    """Bind a step's rows.

    `expands` is True if flash-attn-4 is available. `portable` (None: Triton's) takes absorbed
    chunks. `per_head` multiplies by the heads' matrices in the absorbed form.
    """
    at = batch.num_decode_tokens
    rows = batch.decodes()
    decode = Absorbed(
        kernel=kernel,
        page_table_RM=rows.page_table_RM,
        lengths_R=rows.lengths_R,
        starts_R1=rows.starts_R1 if batch.decode_width > 1 else None,
        width=batch.decode_width,
        per_head=per_head,
    )
    if batch.num_decodes == len(batch.lengths_R):
        return decode
    chunks = Chunks(
        batch.chunks(),
        page_tokens,
        at,
        portable or TRITON_DECODE,
        expands=expands,
        per_head=per_head,
    )
    return DecodeAndChunks(decode, chunks, at) if at else chunks


@dataclass(slots=True)
class Absorbed:
    """Attention in the latent space, for rows of few tokens."""

    kernel: DecodeKernel
    page_table_RM: Tensor
    lengths_R: Tensor
    starts_R1: Tensor | None  # None if every row has one token
    width: int
    per_head: PerHead = by_library
    plan: Any = None  # made in the first layer's call; all layers are alike

    def __call__(self, cache: Latents, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        (num_heads, size, _), pages = cache.key_HAX.shape, cache.pages_PSX
        if self.plan is None:
            self.kernel = self.fitting(cache, q_THA)
            self.plan = self.kernel.plan(self.lengths_R, pages, num_heads, self.width)
        o_THX = self.kernel.attend(
            self.per_head(q_THA[..., :size], cache.key_HAX),
            q_THA[..., size:],
            pages_PSX=pages,
            page_table_RM=self.page_table_RM,
            lengths_R=self.lengths_R,
            plan_N5=self.plan,
            scale=cache.scale,
            starts_R1=self.starts_R1,
            width=self.width,
        )
        if out_THA is None:
            out_THA = q_THA.new_empty(*q_THA.shape[:2], cache.width)
        return self.per_head(o_THX, cache.value_HAX.mT, out_THA)

    def fitting(self, cache: Latents, q_THA: Tensor) -> DecodeKernel:
        """Return the kernel, or the portable one if it does not support these heads or rows."""
        (num_heads, size, rank), pages = cache.key_HAX.shape, cache.pages_PSX
        reason = self.kernel.obstacle(
            num_heads=num_heads,
            rank=rank,
            rotated=q_THA.shape[2] - size,
            page_tokens=pages.shape[1],
            dtype=q_THA.dtype,
            is_fp8=pages.dtype == torch.uint8,
        )
        fits = reason is None and self.width <= self.kernel.max_width
        return self.kernel if fits else TRITON_DECODE


class Chunks:
    """Prompt chunks, whose tokens begin at index `at`. Earlier rows of q_THA are not read."""

    def __init__(
        self,
        batch: Batch,
        page_tokens: int,
        at: int,
        kernel: DecodeKernel,
        *,
        expands: bool,
        per_head: PerHead = by_library,
    ) -> None:
        self.batch, self.page_tokens, self.at, self.expands = batch, page_tokens, at, expands
        self.kernel, self.per_head = kernel, per_head
        self.ways: dict[int, Attend] = {}  # by the size of a query, which adapters of kv_b change

    def __call__(self, cache: Latents, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        if out_THA is None:
            out_THA = q_THA.new_empty(*q_THA.shape[:2], cache.width)
        way = self.ways.get(q_THA.shape[2])
        if way is None:
            if self.expands and expands_cheaper(self.batch, cache, q_THA):
                way = Expanded(self.batch, self.at, self.page_tokens)
            else:
                way = absorbed_chunks(self.batch, self.at, self.kernel, self.per_head)
            self.ways[q_THA.shape[2]] = way
        way(cache, q_THA[self.at :], out_THA[self.at :])
        return out_THA


def can_expand(size: int, value: int, dtype: str) -> bool:
    """Return True if flash-attn-4 supports heads of these sizes."""
    return dtype == "bfloat16" and all(width % 8 == 0 and width <= 256 for width in (size, value))


def expands_cheaper(batch: Batch, cache: Latents, q_THA: Tensor) -> bool:
    """Return True if the step's chunks cost less in the expanded form."""
    size, value, (_, key, rank) = q_THA.shape[2], cache.width, cache.key_HAX.shape
    if not can_expand(size, value, bits(q_THA.dtype)):
        return False
    rows = [(c.start, c.num_tokens) for c in batch.planned]
    rows = rows or [(0, batch.max_new)] * len(batch.lengths_R)
    pairs = sum(new * (start + new) for start, new in rows)
    absorbed = SLOWER * pairs * (2 * rank + size - key)
    expanded = pairs * (size + value) + sum(map(sum, rows)) * rank * (key + value)
    return expanded < absorbed or sum(new for _, new in rows) > MOST_ABSORBED


def absorbed_chunks(
    batch: Batch, at: int, kernel: DecodeKernel, per_head: PerHead = by_library
) -> Absorbed:
    """Return the absorbed form, with each chunk split into rows of up to GROUP tokens."""
    device, num_rows = batch.lengths_R.device, len(batch.lengths_R)
    known = [chunk.num_tokens for chunk in batch.planned] or [batch.max_new] * num_rows
    starts_R1 = batch.starts_R1 - at
    counts_R = starts_R1.diff()
    parts_R = (counts_R + GROUP - 1) // GROUP
    num_parts = sum(-(-count // GROUP) for count in known)
    of_row = torch.arange(num_rows, device=device)
    of_row = of_row.repeat_interleave(parts_R, output_size=num_parts)
    nth = torch.arange(1, num_parts + 1, device=device) - (parts_R.cumsum(0) - parts_R)[of_row]
    ends = torch.minimum(nth.int() * GROUP, counts_R[of_row])
    lengths = (batch.lengths_R - counts_R)[of_row] + ends
    starts = torch.cat([starts_R1[:1], starts_R1[of_row] + ends])
    return Absorbed(
        kernel=kernel,
        page_table_RM=batch.page_table_RM[of_row],
        lengths_R=lengths,
        starts_R1=starts,
        width=GROUP,
        per_head=per_head,
    )


class Expansion(NamedTuple):
    """Cached tokens of consecutive rows that are expanded in one call."""

    slots_X: Tensor  # their places in the cache
    tokens: slice  # the queries of the rows, among the chunks' tokens
    starts_R1: Tensor  # row boundaries among these queries
    k_starts_R1: Tensor


class Expanded:
    """Attention of chunks with expanded keys and values, by flash-attn-4.

    A causal call covers the latest tokens, further calls the older ones; results are merged.
    """

    def __init__(self, batch: Batch, at: int, page_tokens: int) -> None:
        # Imported late, since CuTe DSL takes seconds to import.
        from nanovllm_kernels.attention.flash_prefill import flash_expanded

        self.attend = flash_expanded
        self.newest, *self.older = pieces_of(batch, at, page_tokens)

    def __call__(self, cache: Latents, q_THA: Tensor, out_THA: Tensor) -> Tensor:
        other_THA = torch.empty_like(out_THA)  # also if unused: a padding step must show the memory
        lse_HT = self.of_piece(self.newest, cache, q_THA, out_THA, is_causal=True)
        for piece in self.older:
            q, out, other = (each[piece.tokens] for each in (q_THA, out_THA, other_THA))
            lse = lse_HT[:, piece.tokens]
            other_lse = self.of_piece(piece, cache, q, other, is_causal=False)
            share_HT = torch.sigmoid(other_lse - lse)
            out.lerp_(other, share_HT.T[..., None].to(out.dtype))
            torch.logaddexp(lse, other_lse, out=lse)
        return out_THA

    def of_piece(
        self, piece: Expansion, cache: Latents, q_THA: Tensor, out_THA: Tensor, *, is_causal: bool
    ) -> Tensor:
        """Fill out_THA and return lse_HT."""
        k_TGA, v_TGA = expanded(cache, piece.slots_X, q_THA)
        return self.attend(
            q_THA,
            k_TGA,
            v_TGA,
            starts_R1=piece.starts_R1,
            k_starts_R1=piece.k_starts_R1,
            scale=cache.scale,
            out_THA=out_THA,
            is_causal=is_causal,
        )


def expanded(cache: Latents, slots_X: Tensor, q_THA: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of cached tokens.

    The allocation has the maximum size for a step with these queries, so that a padding step shows
    the memory that real steps need.
    """
    (num_heads, key, rank), size, num_tokens = cache.key_HAX.shape, q_THA.shape[2], len(slots_X)
    rows_TX = cache.pages_PSX.flatten(0, 1)[slots_X]
    rows_TX = dequantised(rows_TX, rank, size - key, q_THA.dtype)
    most_tokens = max(num_tokens, len(q_THA) + PIECE)
    k_TGA = q_THA.new_empty(most_tokens, num_heads, size)[:num_tokens]
    v_TGA = q_THA.new_empty(most_tokens, num_heads, cache.width)[:num_tokens]
    latents_TX = rows_TX[:, :rank]
    # The kernel multiplies the values of other rows by 0, so NaN in values would spread between
    # rows. NaN in keys still reaches the row's own result.
    finite_TX = latents_TX.nan_to_num(0.0, 0.0, 0.0)
    of_heads = (-1, num_heads, -1)
    by_library(latents_TX[:, None].expand(of_heads), cache.key_HAX.mT, k_TGA[..., :key])
    by_library(finite_TX[:, None].expand(of_heads), cache.value_HAX.mT, v_TGA)
    # Copy eight bytes at a time: torch's strided copy costs by elements, 175 us for 67 million.
    words = torch.int64 if (key | size | rank) * k_TGA.itemsize % 8 == 0 else k_TGA.dtype
    each = words.itemsize // k_TGA.itemsize
    k_TGA.view(words)[..., key // each :] = rows_TX.view(words)[:, None, rank // each :]
    return k_TGA, v_TGA


def pieces_of(batch: Batch, at: int, page_tokens: int) -> Iterator[Expansion]:
    """Yield the latest tokens of all rows, then pieces of the older ones."""
    starts_R1, num_tokens = batch.starts_R1 - at, len(batch.slot_mapping_T) - at
    cached = [chunk.start for chunk in batch.planned]
    newest = newest_of(cached)
    older = [count - new for count, new in zip(cached, newest, strict=True)]
    cached_R = batch.lengths_R - starts_R1.diff()
    older_R = (cached_R.cumsum(0) - PIECE).clamp(min=0).minimum(cached_R)
    newest_R1, older_R1 = spans(batch.lengths_R - older_R), spans(older_R)
    whole = 0, num_tokens + sum(newest)
    slots_X = slots_of(batch, page_tokens, newest_R1, first_R=older_R, part=whole)
    yield Expansion(slots_X, slice(0, num_tokens), starts_R1, newest_R1)
    stops = [0, *accumulate(chunk.num_tokens for chunk in batch.planned)]
    for first, last, low, high in spans_of(older):
        first_R = torch.zeros_like(older_R)
        slots_X = slots_of(batch, page_tokens, older_R1, first_R=first_R, part=(low, high))
        starts = starts_R1[first : last + 1] - stops[first]
        k_starts_R1 = older_R1[first : last + 1].clamp(low, high) - low
        yield Expansion(slots_X, slice(stops[first], stops[last]), starts, k_starts_R1)


def newest_of(cached: list[int]) -> list[int]:
    """Return the number of cached tokens of each row that are expanded with its chunk.

    The total is at most PIECE; the first rows have precedence.
    """
    rows = zip(cached, accumulate(cached), strict=True)
    return [min(count, max(0, PIECE - end + count)) for count, end in rows]


def spans(counts_R: Tensor) -> Tensor:
    """Return the row boundaries of rows with these counts."""
    return torch.nn.functional.pad(counts_R.cumsum(0, dtype=torch.int32), (1, 0))


def slots_of(
    batch: Batch, page_tokens: int, line_R1: Tensor, first_R: Tensor, part: tuple[int, int]
) -> Tensor:
    """Return the places in the cache of elements `part` of a concatenation of rows.

    In the concatenation, row r's tokens from first_R[r] on are line_R1[r]:line_R1[r + 1].
    """
    line_X = torch.arange(*part, dtype=torch.int32, device=line_R1.device)
    row_X = torch.searchsorted(line_R1[1:], line_X, right=True)
    token_X = line_X - (line_R1[:-1] - first_R)[row_X]
    pages_X = batch.page_table_RM[row_X, token_X // page_tokens].long()
    return pages_X * page_tokens + token_X % page_tokens


def spans_of(cached: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Split the concatenation of rows' cached tokens into pieces of at most PIECE tokens.

    Yield (first row, end row, start, stop) of each piece. All rows of a piece have tokens in it.
    """
    first = low = stop = 0
    for row, count in enumerate((*cached, 0)):
        if count == 0:
            if stop > low:
                yield first, row, low, stop
            first, low = row + 1, stop
        stop += count
        while stop - low >= PIECE:
            yield first, row + 1, low, low + PIECE
            low += PIECE
            first = row if low < stop else row + 1
