"""Float32 reference of attention in the latent space, row by row, and the format of cached rows.

A token has one row in the cache, for all heads: its normalised latent, then the rotated part of its
key. An fp8 row is bytes: the latent in float8_e4m3fn, then the rotated part in bfloat16. The
latent's float32 scale follows, and padding to a multiple of 16. The rotated part keeps 16 bits,
because its few elements determine the positions that a head attends to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm_kernels.attention.reference import paged_prefill
from nanovllm_kernels.fp8_reference import FP8, LARGEST
from nanovllm_kernels.norms.reference import quantised, rms_norm

LEAST_SCALE = 2.0**-40  # for latents of zeros


def row_size(rank: int, rotated: int, *, is_fp8: bool) -> int:
    """Return the size of a token's row: in bytes for fp8, else in elements of the model's dtype."""
    return -(-(rank + 2 * rotated + 4) // 16) * 16 if is_fp8 else rank + rotated


def parts_of(rows_XX: Tensor, rank: int, rotated: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return views of rows: the latents, the rotated parts, and the scales or None.

    Rows may have any dimensions before the last. The scales have no last dimension.
    """
    if rows_XX.dtype != torch.uint8:
        return rows_XX[..., :rank], rows_XX[..., rank : rank + rotated], None
    assert rank % 4 == rotated % 2 == 0
    scales = rows_XX.view(torch.float32)[..., (rank + 2 * rotated) // 4]
    rotated_XX = rows_XX.view(torch.bfloat16)[..., rank // 2 : rank // 2 + rotated]
    return rows_XX.view(FP8)[..., :rank], rotated_XX, scales


def dequantised(rows_TX: Tensor, rank: int, rotated: int, dtype: torch.dtype) -> Tensor:
    """Return cached rows as numbers of the model's dtype: the latent, then the rotated part."""
    if rows_TX.dtype != torch.uint8:
        return rows_TX
    latent_TX, rotated_TX, scales_T = parts_of(rows_TX, rank, rotated)
    assert scales_T is not None
    latent_TX = (latent_TX.float() * scales_T[..., None]).to(dtype)
    return torch.cat([latent_TX, rotated_TX.to(dtype)], -1)


def stored(latent_TX: Tensor, rotated_TX: Tensor, pages_PSX: Tensor) -> Tensor:
    """Return the rows that a cache like `pages_PSX` stores for these latents and rotated parts."""
    if pages_PSX.dtype != torch.uint8:
        return torch.cat([latent_TX, rotated_TX], 1)
    rows_TX = pages_PSX.new_zeros(len(latent_TX), pages_PSX.shape[2])
    sizes = latent_TX.shape[1], rotated_TX.shape[1]
    to_latent_TX, to_rotated_TX, to_scales_T = parts_of(rows_TX, *sizes)
    assert to_scales_T is not None
    scales_T = (latent_TX.float().abs().amax(1) / LARGEST).clamp(min=LEAST_SCALE)
    to_latent_TX.view(torch.uint8)[:] = quantised(latent_TX, scales_T[:, None]).view(torch.uint8)
    to_rotated_TX[:] = rotated_TX
    to_scales_T[:] = scales_T
    return rows_TX


def latent_store(
    kv_TX: Tensor,
    norm_weight_X: Tensor,
    eps: float,
    q_THA: Tensor,
    cos_sin_LA: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    pages_PSX: Tensor,
) -> Tensor:
    """Return the rotated q_THA, which may be overwritten.

    Normalise a token's latent, rotate the shared part of its key, and write both to the cache.
    """
    latent_TX, key_TX = kv_TX.tensor_split([len(norm_weight_X)], 1)
    latent_TX, cos_sin_TA = rms_norm(latent_TX, norm_weight_X, eps), cos_sin_LA[positions_T]
    rows_TX = stored(latent_TX, in_pairs(key_TX[:, None], cos_sin_TA)[:, 0], pages_PSX)
    pages_PSX.flatten(0, 1)[slot_mapping_T] = rows_TX
    return in_pairs(q_THA, cos_sin_TA)


def in_pairs(x_THA: Tensor, cos_sin_TA: Tensor) -> Tensor:
    """Rotate the last elements of heads in adjacent pairs, 2 i and 2 i + 1, each by angle i."""
    cos_TA, sin_TA = cos_sin_TA[:, None].chunk(2, -1)
    plain_THA, rotated_THA = x_THA.tensor_split([-cos_sin_TA.shape[1]], 2)
    a, b = rotated_THA.float().unflatten(2, (-1, 2)).unbind(3)
    pairs = torch.stack([a * cos_TA - b * sin_TA, b * cos_TA + a * sin_TA], 3)
    return torch.cat([plain_THA, pairs.flatten(2).to(x_THA.dtype)], 2)


def latent_decode(
    q_THX: Tensor,
    rotated_THA: Tensor,
    pages_PSX: Tensor,
    page_table_RM: Tensor,
    lengths_R: Tensor,
    plan_N5: Tensor,
    scale: float,
    *,
    starts_R1: Tensor | None = None,
    width: int = 1,
    of_sizes: bool = False,
) -> Tensor:
    """Return o_THX in float32: each query's mean of latents, weighted by the softmax of scores.

    With `of_sizes`, return the mean of their absolute values. Without `starts_R1` each row has one
    query. If a row has c queries, the i-th sees the first lengths_R[r] - (c - 1 - i) tokens. The
    plan only divides the work.
    """
    rank, rotated = q_THX.shape[2], rotated_THA.shape[2]
    rows_PSGX = dequantised(pages_PSX, rank, rotated, torch.float32)[:, :, None]
    latents_PSGX = rows_PSGX[..., :rank].abs() if of_sizes else rows_PSGX[..., :rank]
    q_THA = torch.cat([q_THX, rotated_THA], 2).float() * (scale * math.sqrt(rank + rotated))
    if starts_R1 is None:
        starts_R1 = torch.arange(len(lengths_R) + 1)
    rows = page_table_RM, starts_R1, lengths_R, width
    return paged_prefill(q_THA, rows_PSGX, latents_PSGX, *rows)
