"""Attention in plain torch whose result for a token does not depend on other rows. Also for CPUs.

It takes tiles of TOKENS new tokens of one row, and the context in blocks of BLOCK tokens from
position 0 on. So all products have the same size, and the order of all sums follows from positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = 8  # new tokens of a row that are computed together
BLOCK = 64  # cached tokens of one step of a softmax


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """New tokens of a step in tiles of TOKENS tokens of one row, some of which may be padding."""

    tokens_NX: Tensor  # int64: index in the step; 0 for padding
    lengths_NX: Tensor  # int64: number of context tokens that the token sees; 0 for padding
    pages_NM: Tensor  # int64: page table of the tile's row


def tiles_of(starts_R1: Tensor, lengths_R: Tensor, page_table_RM: Tensor) -> QueryTiles:
    """Return the tiles of rows as they are in attention.base.Batch. Reads values on the host."""
    device, tokens, lengths, owners = lengths_R.device, [], [], []
    starts = starts_R1.tolist()
    for row, length in enumerate(lengths_R.tolist()):
        start, end = starts[row], starts[row + 1]
        for at in range(start, end, TOKENS):
            count = min(TOKENS, end - at)
            seen = length - (end - at) + 1
            padding = [0] * (TOKENS - count)
            tokens.append([*range(at, at + count), *padding])
            lengths.append([*range(seen, seen + count), *padding])
            owners.append(row)
    return QueryTiles(
        torch.tensor(tokens, dtype=torch.int64, device=device).view(-1, TOKENS),
        torch.tensor(lengths, dtype=torch.int64, device=device).view(-1, TOKENS),
        page_table_RM[torch.tensor(owners, dtype=torch.int64, device=device)].long(),
    )


def attention(
    q_THA: Tensor,
    context: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    tiles: QueryTiles,
    *,
    num_kv_heads: int,
    width: int,
    page_tokens: int,
    scale: float,
) -> Tensor:
    """Return o_THV, causal and grouped, in float32 or wider. Tokens of no row are undefined.

    `context` returns the keys k_NBGA and the values v_NBGV, `width` wide, of the cached tokens at
    pages_NB and offsets_NB. Those after the end of a row are ignored, even if they are NaN.
    """
    dtype = torch.promote_types(q_THA.dtype, torch.float32)
    num_heads = q_THA.shape[1]
    # Longest first, so that each block is of the first tiles.
    longest_N, order_N = tiles.lengths_NX.amax(1).sort(descending=True, stable=True)
    tokens_NX, lengths_NX = tiles.tokens_NX[order_N], tiles.lengths_NX[order_N]
    pages_NM, longest = tiles.pages_NM[order_N], longest_N.tolist()
    group = num_heads // num_kv_heads
    # One product for each tile and key head. Its rows are the tile's tokens and the group's heads.
    q_NXGHA = q_THA[tokens_NX].to(dtype).unflatten(2, (num_kv_heads, group)) * scale
    q_NGXA = q_NXGHA.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
    best_NGX1 = q_NGXA.new_full((*q_NGXA.shape[:3], 1), -torch.inf)
    total_NGX1 = torch.zeros_like(best_NGX1)
    sum_NGXV = q_NGXA.new_zeros(*q_NGXA.shape[:3], width)
    for start in range(0, longest[0] if longest else 0, BLOCK):
        num = sum(length > start for length in longest)
        at_B = torch.arange(start, start + BLOCK, device=q_THA.device)
        seen_NXB = at_B < lengths_NX[:num, :, None]
        seen_NGXB = seen_NXB.repeat_interleave(group, 1)[:, None]
        cached_NB = at_B < longest_N[:num, None]
        page_B = (at_B // page_tokens).clamp(max=pages_NM.shape[1] - 1)
        pages_NB = pages_NM[:num, page_B].where(cached_NB, 0)
        k_NGBA, v_NGBV = (
            each.where(cached_NB[:, :, None, None], 0).to(dtype).transpose(1, 2).contiguous()
            for each in context(pages_NB, (at_B % page_tokens).expand_as(pages_NB))
        )
        scores_NGXB = multiplied(q_NGXA[:num], k_NGBA.mT).masked_fill(~seen_NGXB, -torch.inf)
        best = torch.maximum(best_NGX1[:num], scores_NGXB.amax(-1, keepdim=True))
        shift = best.where(best > -torch.inf, 0)  # tokens that pad a tile see nothing
        rescale_NGX1, weights_NGXB = (best_NGX1[:num] - shift).exp(), (scores_NGXB - shift).exp()
        total_NGX1[:num] = total_NGX1[:num] * rescale_NGX1 + weights_NGXB.sum(-1, keepdim=True)
        sum_NGXV[:num] = sum_NGXV[:num] * rescale_NGX1 + multiplied(weights_NGXB, v_NGBV)
        best_NGX1[:num] = best
    o_NXHV = (sum_NGXV / total_NGX1).unflatten(2, (TOKENS, group)).transpose(1, 2).flatten(2, 3)
    o_THV = o_NXHV.new_empty(len(q_THA), num_heads, width)
    is_token_NX = lengths_NX > 0
    o_THV[tokens_NX[is_token_NX]] = o_NXHV[is_token_NX]
    return o_THV


def multiplied(a_NGXX: Tensor, b_NGXX: Tensor) -> Tensor:
    """Return the products of two batches of matrices."""
    product_XXX = torch.bmm(a_NGXX.flatten(0, 1), b_NGXX.flatten(0, 1))
    return product_XXX.unflatten(0, a_NGXX.shape[:2])
