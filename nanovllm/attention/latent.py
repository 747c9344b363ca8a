"""Latent attention (MLA): of each token one vector is cached, for all heads.

It is a latent, of which each head makes its key and its value by matrices of its own, and the part
of the key that is rotated, which all heads share. Either the cached latents are expanded to keys
and values, or the head's matrices are absorbed: the query goes into the space of latents, and what
is summed up of latents comes out of it. Both are the same sums in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import ForwardContext

# Tokens that a row feeds, up to which matrices are absorbed. By R1's sizes a query costs 2 * (576 +
# 512) operations for each token and head then, of expanded ones 2 * (192 + 128), and to expand one
# costs 2 * 512 * 256: as much as what 171 queries save. Decode rows have fewer queries by far.
FEW = 128
PIECE = 1024  # tokens whose keys and values there are at once


class Latents(NamedTuple):
    """One layer's cache, and what its heads make of it. A token's numbers in the cache are its
    normalised latent, then the rotated part of its key; in 8 bits its row is bytes, as
    nanovllm_kernels.latent_reference says. Page 0 is never given to a request.
    """

    pages_PSX: Tensor
    key_HAX: Tensor  # of A elements of a key, from a latent of X
    value_HAX: Tensor
    scale: float  # of scores

    @property
    def width(self) -> int:
        """The elements of a head's result."""
        return self.value_HAX.shape[1]


class LatentHeads:
    """A layer's attention: causal, over each row's context in its own cache."""

    cache: Latents  # from LatentAttention.bind on

    def __call__(self, ctx: ForwardContext, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        """o_THA, as wide as values; it is out_THA if given. This step's latents are stored; of a
        query the last elements are the rotated ones.
        """
        return ctx.attend(self.cache, q_THA, out_THA)

    def empty(self, q_THA: Tensor) -> Tensor:
        """What o_THA will look like."""
        return q_THA.new_empty(*q_THA.shape[:2], self.cache.width)


def attend_latents(
    q_RNHA: Tensor, latents_RCX: Tensor, seen_R1NC: Tensor, cache: Latents
) -> Tensor:
    """o_RNHA of rows that feed equally many tokens; each query sees the first token at least."""
    way = absorbed if q_RNHA.shape[1] <= FEW else expanded
    return way(q_RNHA, latents_RCX, seen_R1NC, cache)


def absorbed(q_RNHA: Tensor, latents_RCX: Tensor, seen_R1NC: Tensor, cache: Latents) -> Tensor:
    """One head of keys and values, which are latents, for all heads of queries."""
    _, size, width = cache.key_HAX.shape
    q_RNHX = torch.einsum("rnha,hax->rnhx", q_RNHA[..., :size], cache.key_HAX)
    latents_R1CX = latents_RCX[:, None]
    o_RHNX = F.scaled_dot_product_attention(
        torch.cat([q_RNHX, q_RNHA[..., size:]], -1).transpose(1, 2),
        latents_R1CX,
        latents_R1CX[..., :width],
        attn_mask=seen_R1NC,
        scale=cache.scale,
        enable_gqa=True,
    )
    return torch.einsum("rhnx,hax->rnha", o_RHNX, cache.value_HAX)


def expanded(q_RNHA: Tensor, latents_RCX: Tensor, seen_R1NC: Tensor, cache: Latents) -> Tensor:
    """Piece by piece of the context, so that its length does not bound what fits in memory."""
    _, size, width = cache.key_HAX.shape
    q_RHNA = cache.scale * q_RNHA.transpose(1, 2)
    rows_RHN = *q_RHNA.shape[:3], 1
    at_least = torch.promote_types(q_RNHA.dtype, torch.float32)
    best = q_RHNA.new_full(rows_RHN, -torch.inf, dtype=at_least)
    total = q_RHNA.new_zeros(rows_RHN, dtype=at_least)
    sum_RHNA = q_RHNA.new_zeros(*rows_RHN[:3], cache.value_HAX.shape[1], dtype=at_least)
    for start in range(0, latents_RCX.shape[1], PIECE):
        latents_RXC = latents_RCX[:, start : start + PIECE].transpose(1, 2)
        keys_RHAC = torch.einsum("rxc,hax->rhac", latents_RXC[:, :width], cache.key_HAX)
        values_RHCA = torch.einsum("rxc,hax->rhca", latents_RXC[:, :width], cache.value_HAX)
        scores_RHNC = (
            q_RHNA[..., :size] @ keys_RHAC + q_RHNA[..., size:] @ latents_RXC[:, None, width:]
        )
        seen = seen_R1NC[..., start : start + PIECE]
        scores_RHNC = scores_RHNC.to(at_least).masked_fill(~seen, -torch.inf)
        newest = torch.maximum(best, scores_RHNC.amax(-1, keepdim=True))
        kept, weights_RHNC = (best - newest).exp(), (scores_RHNC - newest).exp()
        total = total * kept + weights_RHNC.sum(-1, keepdim=True)
        sum_RHNA = sum_RHNA * kept + weights_RHNC.to(values_RHCA.dtype) @ values_RHCA
        best = newest
    return (sum_RHNA / total).transpose(1, 2).to(q_RNHA.dtype)
