"""From products of low rank to latents in the cache and rotated queries.

Meaning: nanovllm_kernels.latent_reference. `latent_store` normalises a token's latent, rotates what
all heads share of its key and writes its row of the cache, all in the first program of a token;
what queries are made of, which lies before it in the product, is put together by the others.
`rotate_heads` rotates the last elements of each head where they are, unless they are still slices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.device import follows
from nanovllm_kernels.latent_reference import LEAST_SCALE, parts_of
from nanovllm_kernels.rope_store import quantised

COPIED = 1024  # columns of a program
HEADS = 8


def latent_store(
    qkv_TX: Tensor,
    norm_weight_X: Tensor,
    eps: float,
    cos_sin_LA: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    pages_PSX: Tensor,
) -> Tensor:
    (rank,), rotated = norm_weight_X.shape, cos_sin_LA.shape[1]
    num_tokens, width = qkv_TX.shape[-2], qkv_TX.shape[-1] - rank - rotated
    assert pages_PSX.stride(0) == pages_PSX.shape[1] * pages_PSX.stride(1)
    assert qkv_TX.stride(-1) == pages_PSX.stride(2) == 1
    q_TX = torch.empty(num_tokens, width, dtype=qkv_TX.dtype, device=qkv_TX.device)
    parts, waits = parts_of(pages_PSX, rank, rotated), follows_few(qkv_TX)
    latent_store_kernel[(num_tokens * (1 + triton.cdiv(width, COPIED)),)](
        qkv_TX,
        norm_weight_X,
        cos_sin_LA,
        positions_T,
        slot_mapping_T,
        q_TX,
        *parts,
        qkv_TX.stride(0),
        qkv_TX.stride(-2),
        cos_sin_LA.stride(0),
        parts[0].stride(1),
        parts[1].stride(1),
        eps,
        LEAST_SCALE,
        SLICES=len(qkv_TX) if qkv_TX.ndim == 3 else 1,
        WIDTH=width,
        COPIED=COPIED,
        X=rank,
        X_BLOCK=triton.next_power_of_2(rank),
        HALF=rotated // 2,
        HALF_BLOCK=triton.next_power_of_2(rotated // 2),
        WAITS=waits,
        num_warps=2,
        launch_pdl=waits,
    )
    return q_TX


def rotate_heads(q_TX: Tensor, num_heads: int, cos_sin_LA: Tensor, positions_T: Tensor) -> Tensor:
    num_tokens, head_size = q_TX.shape[-2], q_TX.shape[-1] // num_heads
    q_THA = q_TX if q_TX.ndim == 2 else torch.empty_like(q_TX[0])
    assert q_TX.is_contiguous()
    waits, groups = follows_few(q_TX), triton.cdiv(num_heads, HEADS)
    rotate_heads_kernel[(num_tokens * groups,)](
        q_TX,
        cos_sin_LA,
        positions_T,
        q_THA,
        num_tokens * num_heads * head_size,
        cos_sin_LA.stride(0),
        SLICES=len(q_TX) if q_TX.ndim == 3 else 1,
        H=num_heads,
        A=head_size,
        A_BLOCK=triton.next_power_of_2(head_size),
        HALF=cos_sin_LA.shape[1] // 2,
        HALF_BLOCK=triton.next_power_of_2(cos_sin_LA.shape[1] // 2),
        HEADS=HEADS,
        WAITS=waits,
        num_warps=2,
        launch_pdl=waits,
    )
    return q_THA.view(num_tokens, num_heads, head_size)


def follows_few(x_TX: Tensor) -> bool:
    return follows(x_TX.shape[-2], x_TX.device)


@triton.jit
def summed(at, inside, slice_stride, SLICES: tl.constexpr):
    """The sum of slices in their type, which is added up in float32."""
    x = tl.load(at, inside, 0.0)
    if SLICES > 1:
        total = x.to(tl.float32)
        for nth in tl.static_range(1, SLICES):
            total += tl.load(at + nth * slice_stride, inside, 0.0).to(tl.float32)
        x = total.to(x.dtype)
    return x


@triton.jit
def rotated(at, inside, slice_stride, angles, turned, SLICES: tl.constexpr, HALF: tl.constexpr):
    """Elements 2 i and 2 i + 1 of what starts `at`, turned by angle i, each where it was."""
    x = summed(at, inside, slice_stride, SLICES)
    y = summed(at + 1, inside, slice_stride, SLICES)
    cos = tl.load(angles, turned, 0.0)
    sin = tl.load(angles + HALF, turned, 0.0)
    x32, y32 = x.to(tl.float32), y.to(tl.float32)
    return (x32 * cos - y32 * sin).to(x.dtype), (y32 * cos + x32 * sin).to(x.dtype)


@triton.jit
def latent_store_kernel(
    qkv_TX,
    norm_weight_X,
    cos_sin_LA,
    positions_T,
    slot_mapping_T,
    q_TX,
    latents_PSX,
    keys_PSA,
    scales_PS,
    slice_stride,
    qkv_stride,
    angle_stride,
    latent_stride,
    key_stride,
    eps,
    LEAST: tl.constexpr,
    SLICES: tl.constexpr,
    WIDTH: tl.constexpr,
    COPIED: tl.constexpr,
    X: tl.constexpr,
    X_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    WAITS: tl.constexpr,
):
    if WAITS:
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = 1 + (WIDTH + COPIED - 1) // COPIED
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    qkv_TX += token * qkv_stride
    if part > 0:
        n = (part - 1) * COPIED + tl.arange(0, COPIED)
        tl.store(
            q_TX + token * WIDTH + n, summed(qkv_TX + n, n < WIDTH, slice_stride, SLICES), n < WIDTH
        )
    else:
        slot = tl.load(slot_mapping_T + token)
        n = tl.arange(0, X_BLOCK)
        x = summed(qkv_TX + WIDTH + n, n < X, slice_stride, SLICES)
        scaled = x.to(tl.float32) * tl.rsqrt(
            tl.sum(x.to(tl.float32) * x.to(tl.float32), 0) / X + eps
        )
        weight = tl.load(norm_weight_X + n, n < X, 0.0).to(tl.float32)
        y = (scaled.to(x.dtype).to(tl.float32) * weight).to(x.dtype)
        if scales_PS is not None:
            y = y.to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(y), 0) / 448.0, LEAST, tl.PropagateNan.ALL)
            tl.store(scales_PS + slot * (latent_stride // 4), scale)
            y = quantised(y, scale, latents_PSX)
        tl.store(latents_PSX + slot * latent_stride + n, y, n < X)
        a = tl.arange(0, HALF_BLOCK)
        angles = cos_sin_LA + tl.load(positions_T + token) * angle_stride + a
        of_key, at = a < HALF, qkv_TX + WIDTH + X + 2 * a
        x, y = rotated(at, of_key, slice_stride, angles, of_key, SLICES, HALF)
        to = keys_PSA + slot * key_stride + 2 * a
        tl.store(to, x.to(to.dtype.element_ty), of_key)
        tl.store(to + 1, y.to(to.dtype.element_ty), of_key)


@triton.jit
def rotate_heads_kernel(
    q_TX,
    cos_sin_LA,
    positions_T,
    q_THA,
    slice_stride,
    angle_stride,
    SLICES: tl.constexpr,
    H: tl.constexpr,
    A: tl.constexpr,
    A_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    WAITS: tl.constexpr,
):
    if WAITS:
        tl.extra.cuda.gdc_wait()
    GROUPS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    head = (tl.program_id(0) % GROUPS * HEADS + tl.arange(0, HEADS))[:, None]
    at = (token * H + head) * A
    a = tl.arange(0, HALF_BLOCK)[None, :]
    angles = cos_sin_LA + tl.load(positions_T + token) * angle_stride + a
    of_head = (a < HALF) & (head < H)
    turned = at + A - 2 * HALF + 2 * a
    x, y = rotated(q_TX + turned, of_head, slice_stride, angles, a < HALF, SLICES, HALF)
    tl.store(q_THA + turned, x, of_head)
    tl.store(q_THA + turned + 1, y, of_head)
    if SLICES > 1:
        a = tl.arange(0, A_BLOCK)[None, :]
        inside = (a < A - 2 * HALF) & (head < H)
        tl.store(q_THA + at + a, summed(q_TX + at + a, inside, slice_stride, SLICES), inside)
