"""Cases of latent_store."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nanovllm_kernels.attention import latent_reference as reference
from nanovllm_kernels.attention.latent_store import latent_store
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal

SIZES = (  # tokens, heads, elements of a head, of the latent, of the rotated part
    ((9, 11, 40, 80, 24), torch.bfloat16),
    ((4, 2, 12, 24, 4), torch.float32),
    *(((tokens, 128, 192, 512, 64), torch.bfloat16) for tokens in (1, 8, 64, 128, 8192)),
)


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
