"""From products of low rank to a latent in the cache and rotated queries, in one launch.

Meaning: nanovllm_kernels.latent_reference. The first program of a token normalises its latent,
rotates what all heads share of its key and writes its row of the cache; the others rotate the last
elements of HEADS heads each, where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows
from nanovllm_kernels.latent_reference import LEAST_SCALE, MOST_8, parts_of
from nanovllm_kernels.rope_store import quantised

HEADS = 8


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
    (rank,), half = norm_weight_X.shape, cos_sin_LA.shape[1] // 2
    num_tokens, num_heads, head_size = q_THA.shape
    assert kv_TX.stride(1) == 1 and q_THA.is_contiguous() and cos_sin_LA.is_contiguous()
    assert pages_PSX.is_contiguous()
    parts, waits = parts_of(pages_PSX, rank, 2 * half), follows(num_tokens, q_THA.device)
    latent_store_kernel[(num_tokens * (1 + triton.cdiv(num_heads, HEADS)),)](
        *(kv_TX, norm_weight_X, q_THA, cos_sin_LA, positions_T, slot_mapping_T, *parts),
        *(kv_TX.stride(0), parts[0].stride(1), parts[1].stride(1), eps, LEAST_SCALE, MOST_8),
        **dict(H=num_heads, A=head_size, X=rank, X_BLOCK=triton.next_power_of_2(rank), HALF=half),
        **dict(HALF_BLOCK=triton.next_power_of_2(half), HEADS=HEADS, WAITS=waits),
        num_warps=2,
        launch_pdl=waits,
    )
    return q_THA


@triton.jit
def rotated(at, inside, angles, HALF: tl.constexpr):
    """Elements 2 i and 2 i + 1 of what starts `at`, turned by angle i."""
    x, y = tl.load(at, inside, 0.0), tl.load(at + 1, inside, 0.0)
    cos, sin = tl.load(angles, inside, 0.0), tl.load(angles + HALF, inside, 0.0)
    x32, y32 = x.to(tl.float32), y.to(tl.float32)
    return (x32 * cos - y32 * sin).to(x.dtype), (y32 * cos + x32 * sin).to(x.dtype)


@triton.jit
def latent_store_kernel(
    kv_TX,
    norm_weight_X,
    q_THA,
    cos_sin_LA,
    positions_T,
    slot_mapping_T,
    latents_PSX,
    keys_PSA,
    scales_PS,
    kv_stride,
    latent_stride,
    key_stride,
    eps,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    H: tl.constexpr,
    A: tl.constexpr,
    X: tl.constexpr,
    X_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    WAITS: tl.constexpr,
):
    if WAITS:
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = 1 + (H + HEADS - 1) // HEADS
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    a = tl.arange(0, HALF_BLOCK)[None, :]
    angles = cos_sin_LA + tl.load(positions_T + token) * (2 * HALF) + a
    if part > 0:
        head = ((part - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        at = q_THA + (token * H + head + 1) * A - 2 * HALF + 2 * a
        inside = (a < HALF) & (head < H)
        x, y = rotated(at, inside, angles, HALF)
        tl.store(at, x, inside)
        tl.store(at + 1, y, inside)
    else:
        kv_TX += token * kv_stride
        slot = tl.load(slot_mapping_T + token)
        n = tl.arange(0, X_BLOCK)
        latent = tl.load(kv_TX + n, n < X, 0.0)
        wide = latent.to(tl.float32)
        wide = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / X + eps)).to(latent.dtype).to(tl.float32)
        wide *= tl.load(norm_weight_X + n, n < X, 0.0).to(tl.float32)
        normed = wide.to(latent.dtype)
        if scales_PS is not None:
            wide = normed.to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(wide), 0) / MOST, LEAST, tl.PropagateNan.ALL)
            tl.store(scales_PS + slot * (latent_stride // 4), scale)
            normed = quantised(wide, scale, latents_PSX)
        tl.store(latents_PSX + slot * latent_stride + n, normed, n < X)
        first, second = rotated(kv_TX + X + 2 * a, a < HALF, angles, HALF)
        to = keys_PSA + slot * key_stride + 2 * a
        tl.store(to, first.to(to.dtype.element_ty), a < HALF)
        tl.store(to + 1, second.to(to.dtype.element_ty), a < HALF)
