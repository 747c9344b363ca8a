"""Latent attention (MLA): one cached vector per token, shared by all heads.

The vector is a latent, from which each head computes its key and value by matrices of its own, and
the rotated part of the key, which all heads share. There are two equivalent orders of computation.
Expanded: compute keys and values from the cached latents. Absorbed: project the query into the
latent space, and project the weighted sum of latents back.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; transformers' DeepseekV3Attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.attention.base import ForwardContext

# Rows with up to this number of tokens use the absorbed form. With R1's sizes, absorbed attention
# costs 2 * (576 + 512) operations per query, token and head, expanded attention 2 * (192 + 128).
# Expansion costs 2 * 512 * 256 per token and head, which pays from 171 queries on.
FEW = 128
PIECE = 1024  # tokens that are expanded at once


class Latents(NamedTuple):
    """One layer's cache, and the matrices of its heads.

    A cached row is the token's normalised latent, then the rotated part of its key. The format of
    an fp8 row is in nanovllm_kernels.attention.latent_reference. Page 0 never belongs to a request.
    """

    pages_PSX: Tensor
    key_HAX: Tensor  # maps a latent (X) to a head's key (A)
    value_HAX: Tensor
    scale: float  # of scores

    @property
    def width(self) -> int:
        """Elements of a head's result."""
        return self.value_HAX.shape[1]


class LatentHeads:
    """A layer's attention: causal, over each row's context in its own cache."""

    cache: Latents  # set by LatentAttention.bind

    def __call__(self, ctx: ForwardContext, q_THA: Tensor, out_THA: Tensor | None = None) -> Tensor:
        """Return o_THA, as wide as values. It is out_THA if given.

        This step's latents are in the cache. The last elements of a query are the rotated ones.
        """
        return ctx.attend(self.cache, q_THA, out_THA)

    def empty(self, q_THA: Tensor) -> Tensor:
        """Return an uninitialised o_THA."""
        return q_THA.new_empty(*q_THA.shape[:2], self.cache.width)


def attend_latents(
    q_RNHA: Tensor, latents_RCX: Tensor, seen_R1NC: Tensor, cache: Latents
) -> Tensor:
    """Return o_RNHA of rows with N tokens each. Every query sees at least the first token."""
    way = absorbed if q_RNHA.shape[1] <= FEW else expanded
    return way(q_RNHA, latents_RCX, seen_R1NC, cache)


def absorbed(q_RNHA: Tensor, latents_RCX: Tensor, seen_R1NC: Tensor, cache: Latents) -> Tensor:
    """Attend in the latent space: latents serve as keys and values of all heads."""
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
    """Attend with keys and values that are computed for each head."""
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
    """Return o_RHNX: softmax-weighted sums over visible tokens, in float32 or wider.

    The context is processed in pieces, so that memory does not depend on its length.
    """
    total = sum_RHNX = widened(latents_RCX.new_zeros(()))
    best, pieces = total - torch.inf, latents_RCX.split(PIECE, 1)
    for piece_RCX, seen in zip(pieces, seen_R1NC.split(PIECE, 3), strict=True):
        scores_RHNC = scores(piece_RCX).masked_fill_(~seen, -torch.inf)
        newest = torch.maximum(best, scores_RHNC.amax(-1, keepdim=True))
        decay, weights_RHNC = (best - newest).exp(), scores_RHNC.sub_(newest).exp_()
        total = total * decay + weights_RHNC.sum(-1, keepdim=True)
        sum_RHNX = sum_RHNX * decay + sums(weights_RHNC, piece_RCX)
        best = newest
    return sum_RHNX / total


def widened(x: Tensor) -> Tensor:
    """Convert to float32, unless x is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
