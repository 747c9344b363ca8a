"""What latent_store and rotate_heads are checked and timed with."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nanovllm_kernels import latent_reference as reference, latent_store as kernels
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal

BF16 = torch.bfloat16
EPS = 1e-6


def table_of(T: int, rotated: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos_sin_LA, and positions all over it."""
    angles = normal(device, 512, rotated // 2, dtype=torch.float32, seed=4) * 3
    positions = torch.randint(512, (T,), generator=torch.Generator().manual_seed(3))
    return torch.cat([angles.cos(), angles.sin()], 1), positions.to(device)


def store_inputs(
    sizes: tuple[int, int, int, int],
    slices: int,
    is_fp8: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Args:
    """`sizes`: tokens, columns for queries, the latent's, the rotated. Cells are scattered."""
    T, width, rank, rotated = sizes
    qkv = normal(device, *(slices,) * (slices > 1), T, width + rank + rotated, dtype=dtype)
    row = reference.row_size(rank, rotated, is_fp8=is_fp8)
    pages = torch.zeros(T // 16 + 2, 16, row, dtype=torch.uint8 if is_fp8 else dtype, device=device)
    slots = torch.randperm(16 * len(pages), generator=torch.Generator().manual_seed(5))[:T]
    weight = normal(device, rank, dtype=dtype, seed=1)
    return qkv, weight, EPS, *table_of(T, rotated, device), slots.to(device), pages


def stored_too(q_TX: Tensor, args: Args) -> Tensors:
    """What rows of the cache mean, too: of 8 bits a rounded sum may be the next number."""
    (rank,), rotated = args[1].shape, args[3].shape[1]
    rows = reference.dequantised(args[6].flatten(0, 1), rank, rotated, args[0].dtype)
    return q_TX, *rows.split([rank, rotated], 1)


def largest(expected: Tensors, args: Args) -> Tensors:
    """Pairs may cancel, and so may slices. In 8 bits the next number is an eighth away."""
    sizes = [tensor.abs() + tensor.abs().amax(-1, keepdim=True) for tensor in expected]
    if len(sizes) == 3 and args[6].dtype == torch.uint8:
        sizes[1] *= 0.125 / torch.finfo(args[0].dtype).eps
    return tuple(sizes)


def head_inputs(
    T: int, H: int, A: int, rotated: int, slices: int, dtype: torch.dtype, device: torch.device
) -> Args:
    q = normal(device, *(slices,) * (slices > 1), T, H * A, dtype=dtype)
    return q, H, *table_of(T, rotated, device)


STORE = Kernel(
    "latent_store",
    kernels.latent_store,
    reference.latent_store,
    tuple(
        Case(
            f"T={sizes[0]} {'+'.join(map(str, sizes[1:]))} slices={slices}{' fp8' * is_fp8} "
            f"{bits(dtype)}",
            partial(store_inputs, sizes, slices, is_fp8, dtype),
            small=sizes[0] < 100,
            num_bytes=sum(sizes[1:]) * sizes[0] * 4 * (sizes[0] > 100),
        )
        for sizes, slices, dtype in (
            ((5, 8, 32, 8), 1, BF16),
            ((9, 100, 80, 24), 3, BF16),
            ((3, 1536, 512, 64), 1, BF16),
            ((4, 24, 48, 16), 1, torch.float32),
            ((128, 1536, 512, 64), 1, BF16),
            ((8192, 1536, 512, 64), 1, BF16),
        )
        for is_fp8 in (False, True)
    ),
    ulps_16=1,
    ulps_32=8,
    scale=largest,
    outputs=stored_too,
)
HEADS = Kernel(
    "rotate_heads",
    kernels.rotate_heads,
    reference.rotate_heads,
    tuple(
        Case(
            f"T={T} H={H} A={A} rotated={rotated} slices={slices} {bits(dtype)}",
            partial(head_inputs, T, H, A, rotated, slices, dtype),
            small=T < 100,
            num_bytes=4 * T * H * rotated * (T > 100),
        )
        for T, H, A, rotated, slices, dtype in (
            (5, 3, 24, 8, 1, BF16),
            (4, 11, 40, 24, 2, BF16),
            (3, 2, 12, 4, 1, torch.float32),
            (128, 128, 192, 64, 1, BF16),
            (8192, 128, 192, 64, 1, BF16),
        )
    ),
    ulps_16=1,
    ulps_32=8,
    scale=largest,
)
