"""Latent attention (MLA): of each token one vector is cached, for all heads.

It is a latent, of which each head makes its key and its value by matrices of its own, and the part
of the key that is rotated, which all heads share. Either the cached latents are expanded to keys
and values, or the head's matrices are absorbed: the query goes into the space of latents, and what
is summed up of latents comes out of it. Both are the same sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
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
    """Latents are the keys and values of all heads, which read them together."""
    _, size, width = cache.key_HAX.shape
    q_RHNX = torch.einsum("rnha,hax->rhnx", q_RNHA[..., :size], cache.key_HAX)
    q_RHNX = widened(torch.cat([q_RHNX, q_RNHA[..., size:].transpose(1, 2)], -1)) * cache.scale

    def scores(piece_RCX: Tensor) -> Tensor:
        return torch.einsum("rhnx,rcx->rhnc", q_RHNX, widened(piece_RCX))

    def sums(weights_RHNC: Tensor, piece_RCX: Tensor) -> Tensor:
        return torch.einsum("rhnc,rcx->rhnx", weights_RHNC, widened(piece_RCX[..., :width]))

    o_RHNX = averaged(latents_RCX, seen_R1NC, scores, sums).to(q_RNHA.dtype)
    return torch.einsum("rhnx,hax->rnha", o_RHNX, cache.value_HAX)


def expanded(q_RNHA: Tensor, latents_RCX: Tensor, seen_R1NC: Tensor, cache: Latents) -> Tensor:
    """Each head has keys and values of its own."""
    _, size, width = cache.key_HAX.shape
    q_RHNA = widened(q_RNHA.transpose(1, 2)) * cache.scale

    def scores(piece_RCX: Tensor) -> Tensor:
        keys_RHCA = torch.einsum("rcx,hax->rhca", piece_RCX[..., :width], cache.key_HAX)
        made_RHNC = q_RHNA[..., :size] @ widened(keys_RHCA).mT
        return made_RHNC.add_(q_RHNA[..., size:] @ widened(piece_RCX[:, None, :, width:]).mT)

    def sums(weights_RHNC: Tensor, piece_RCX: Tensor) -> Tensor:
        values_RHCA = torch.einsum("rcx,hax->rhca", piece_RCX[..., :width], cache.value_HAX)
        return weights_RHNC @ widened(values_RHCA)

    return averaged(latents_RCX, seen_R1NC, scores, sums).transpose(1, 2).to(q_RNHA.dtype)


def averaged(
    latents_RCX: Tensor,
    seen_R1NC: Tensor,
    scores: Callable[[Tensor], Tensor],
    sums: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """o_RHNX: sums of what is seen, weighted by scores' softmax, in float32 at least; piece by
    piece of the context, so that its length does not bound what fits in memory.
    """
    total = sum_RHNX = widened(latents_RCX.new_zeros(()))
    best, pieces = total - torch.inf, latents_RCX.split(PIECE, 1)
    for piece_RCX, seen in zip(pieces, seen_R1NC.split(PIECE, 3), strict=True):
        scores_RHNC = scores(piece_RCX).masked_fill_(~seen, -torch.inf)
        newest = torch.maximum(best, scores_RHNC.amax(-1, keepdim=True))
        kept, weights_RHNC = (best - newest).exp(), scores_RHNC.sub_(newest).exp_()
        total = total * kept + weights_RHNC.sum(-1, keepdim=True)
        sum_RHNX = sum_RHNX * kept + sums(weights_RHNC, piece_RCX)
        best = newest
    return sum_RHNX / total


def widened(x: Tensor) -> Tensor:
    """The same numbers in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
