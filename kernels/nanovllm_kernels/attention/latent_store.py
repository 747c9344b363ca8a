"""Norm and store of latents, and rotation of queries, after the low-rank projections; one launch.

The reference is latent_reference.py. The first program of a token normalises its latent, rotates
the shared part of its key and writes its row of the cache. Each other program rotates the last
elements of some heads in place.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention import latent_reference as reference
from nanovllm_kernels.attention.latent_reference import LEAST_SCALE, parts_of
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.device import launches_early
from nanovllm_kernels.fp8_reference import LARGEST
from nanovllm_kernels.norms.rope_store import quantised
from nanovllm_kernels.triton_parts import wait

MANY = 512  # minimum tokens for programs with many heads
SIZES = (  # of cases: tokens, heads, elements of a head, of the latent, of the rotated part
    ((9, 11, 40, 80, 24), torch.bfloat16),
    ((4, 2, 12, 24, 4), torch.float32),
    *(((tokens, 128, 192, 512, 64), torch.bfloat16) for tokens in (1, 8, 64, 128, 8192)),
)


def latent_store(
    kv_TX: Tensor,
    norm_weight_X: Tensor,
    eps: float,
    q_THA: Tensor,
    cos_sin_LA: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    pages_PSX: Tensor,
    *,
    ordered: bool = False,
) -> Tensor:
    """Return the rotated q_THA. `ordered`: a token's norm adds its squares in one order.

    The order follows from the warps of a program, which are fewer with few tokens.
    """
    (rank,), half = norm_weight_X.shape, cos_sin_LA.shape[1] // 2
    num_tokens, num_heads, head_size = q_THA.shape
    assert kv_TX.stride(1) == 1 and q_THA.is_contiguous() and cos_sin_LA.is_contiguous()
    assert pages_PSX.is_contiguous()
    parts, waits = parts_of(pages_PSX, rank, 2 * half), launches_early(num_tokens, q_THA.device)
    is_many = num_tokens >= MANY
    heads, warps = 64 if is_many else 8, 4 if is_many or ordered else 2
    latent_store_kernel[(num_tokens * (1 + triton.cdiv(num_heads, heads)),)](
        *(kv_TX, norm_weight_X, q_THA, cos_sin_LA, positions_T, slot_mapping_T, *parts),
        *(kv_TX.stride(0), parts[0].stride(1), parts[1].stride(1), eps, LEAST_SCALE, LARGEST),
        **dict(H=num_heads, A=head_size, X=rank, X_BLOCK=triton.next_power_of_2(rank), HALF=half),
        **dict(HALF_BLOCK=triton.next_power_of_2(half), HEADS=heads, WAITS=waits),
        num_warps=warps,
        launch_pdl=waits,
    )
    return q_THA


ORDERED = partial(latent_store, ordered=True)


@triton.jit
def rotated(x, cos, sin):
    """Rotate elements 2 i and 2 i + 1 of each row of x by angle i."""
    first, second = tl.split(tl.reshape(x.to(tl.float32), [x.shape[0], x.shape[1] // 2, 2]))
    rotated_pairs = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(rotated_pairs, x.shape).to(x.dtype)


@triton.jit(do_not_specialize_on_alignment=["positions_T", "slot_mapping_T"])
def latent_store_kernel(
    kv_TX, norm_weight_X, q_THA, cos_sin_LA, positions_T, slot_mapping_T, latents_PSX, keys_PSA,
    scales_PS, kv_stride, latent_stride, key_stride, eps, LEAST: tl.constexpr, MOST: tl.constexpr,
    H: tl.constexpr, A: tl.constexpr, X: tl.constexpr, X_BLOCK: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, HEADS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 1 + (H + HEADS - 1) // HEADS
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    pair, a = tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, 2 * HALF_BLOCK)[None, :]
    angles = cos_sin_LA + tl.load(positions_T + token) * (2 * HALF) + pair
    cos, sin = tl.load(angles, pair < HALF, 0.0), tl.load(angles + HALF, pair < HALF, 0.0)
    if part > 0:
        head = ((part - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        at = q_THA + (token * H + head + 1) * A - 2 * HALF + a
        inside = (a < 2 * HALF) & (head < H)
        wait(WAITS)  # the tensors read before were written before the model's first kernel
        tl.store(at, rotated(tl.load(at, inside, 0.0), cos, sin), inside)
    else:
        kv_TX += token * kv_stride
        slot, n = tl.load(slot_mapping_T + token), tl.arange(0, X_BLOCK)
        weight = tl.load(norm_weight_X + n, n < X, 0.0).to(tl.float32)
        wait(WAITS)
        latent, key = tl.load(kv_TX + n, n < X, 0.0), tl.load(kv_TX + X + a, a < 2 * HALF, 0.0)
        wide = latent.to(tl.float32)
        wide = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / X + eps)).to(latent.dtype).to(tl.float32)
        normed = (wide * weight).to(latent.dtype)
        if scales_PS is not None:
            wide = normed.to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(wide), 0) / MOST, LEAST, tl.PropagateNan.ALL)
            tl.store(scales_PS + slot * (latent_stride // 4), scale)
            normed = quantised(wide, scale, latents_PSX)
        tl.store(latents_PSX + slot * latent_stride + n, normed, n < X)
        key = rotated(key, cos, sin).to(keys_PSA.dtype.element_ty)
        tl.store(keys_PSA + slot * key_stride + a, key, a < 2 * HALF)


def inputs(sizes: tuple[int, ...], dtype: torch.dtype, is_fp8: bool, device: torch.device) -> Args:
    """Return inputs with tokens scattered over the pages, and positions over the table."""
    T, H, A, rank, rotated = sizes
    angles = normal(device, 512, rotated // 2, dtype=torch.float32, seed=4) * 3
    table = torch.cat([angles.cos(), angles.sin()], 1)
    row = reference.row_size(rank, rotated, is_fp8=is_fp8)
    pages = torch.zeros(T // 16 + 2, 16, row, dtype=torch.uint8 if is_fp8 else dtype, device=device)
    generator = torch.Generator().manual_seed(5)
    slots = torch.randperm(16 * len(pages), generator=generator)[:T].to(device)
    positions = torch.randint(512, (T,), generator=generator).to(device)
    weight, q = normal(device, rank, dtype=dtype), normal(device, T, H, A, dtype=dtype)
    kv = normal(device, T, 8 + rank + rotated, dtype=dtype, seed=2)[:, 8:]
    return kv, weight, 1e-6, q, table, positions, slots, pages


def stored_too(q_THA: Tensor, args: Args) -> Tensors:
    """Return q and the dequantised cache rows. In fp8, a rounded sum may be the next number."""
    sizes = args[1].shape[0], args[4].shape[1]
    rows = reference.dequantised(args[7].flatten(0, 1), *sizes, args[0].dtype)
    return q_THA, *rows.split(sizes, 1)


def largest(expected: Tensors, args: Args) -> Tensors:
    """Return the error scales. Pairs may cancel. Steps are an eighth in 8 bits, a 128th in 16."""
    sizes = [tensor.abs() + tensor.abs().amax(-1, keepdim=True) for tensor in expected]
    if args[7].dtype == torch.uint8:
        eps = torch.finfo(args[0].dtype).eps
        sizes[1:] = sizes[1] * 0.125 / eps, sizes[2] * 2**-7 / eps
    return tuple(sizes)


LATENT_STORE = Kernel(
    "latent_store",
    latent_store,
    reference.latent_store,
    tuple(
        Case(
            f"{'+'.join(map(str, sizes))} {bits(dtype)}{' fp8' * is_fp8}",
            partial(inputs, sizes, dtype, is_fp8),
            small=sizes[1] < 100,
            num_bytes=4 * sizes[0] * ((sizes[1] + 1) * sizes[4] + sizes[3]) * (sizes[1] > 100),
        )
        for sizes, dtype in SIZES
        for is_fp8 in (False, True)
    ),
    ulps_16=1,
    ulps_32=8,
    scale=largest,
    outputs=stored_too,
)
