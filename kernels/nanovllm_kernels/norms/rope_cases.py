"""Inputs, cases and tolerances of rope_store and of the mean_squares before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, bits, normal
from nanovllm_kernels.norms import reference, rope_store


@dataclass(frozen=True, slots=True)
class Alone:
    """A single rank."""

    tp_size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


ALONE = Alone()


def inputs(
    kind: str,
    T: int,
    H: int,
    G: int,
    A: int,
    dtype: torch.dtype,
    device: torch.device,
    num_rotated: int = 0,
    *,
    is_fp8: bool = False,
) -> Args:
    """Return inputs with cells scattered over the pages and positions over the cos_sin table.

    `num_rotated` elements of a head are rotated, or all if it is 0. With `kind` "plain" there is no
    norm, with "row" a norm is over all heads.
    """
    page_tokens, num_pages, length = 16, triton.cdiv(T, 16) + 2, 4096
    width = (H + 2 * G) * A
    qkv_TX = normal(device, T, width + 64 * (kind == "strided"), dtype=dtype)[:, :width]
    if kind == "spike":
        qkv_TX[:, A // 3 :: A] = 1e4
    if kind == "slices":
        qkv_TX = normal(device, 2, T, width, dtype=dtype)
    norm_weights: list[Tensor | None] = [None, None]
    if kind == "row":
        norm_weights = [normal(device, heads * A, dtype=dtype, seed=heads) for heads in (H, G)]
    elif kind != "plain":
        norm_weights = [normal(device, A, dtype=dtype, seed=seed) for seed in (1, 2)]
    generator = torch.Generator().manual_seed(3)
    slot_mapping = torch.randperm(num_pages * page_tokens, generator=generator)[:T]
    positions = torch.randint(length, (T,), generator=generator)
    angles_LA = normal(device, length, (num_rotated or A) // 2, dtype=torch.float32, seed=4) * 3
    cos_sin_LA = torch.cat([angles_LA.cos(), angles_LA.sin()], 1)
    cache = normal(device, 2, num_pages, page_tokens, G, A, dtype=dtype, seed=5)
    scales_2G = None
    if is_fp8:  # the scales are so small that spikes saturate
        cache = cache.to(torch.float8_e4m3fn)
        scales_2G = 2.0 ** (normal(device, 2, G, dtype=torch.float32, seed=6) - 4)
    return (
        qkv_TX, *norm_weights, 1e-6, cos_sin_LA, positions.to(device), slot_mapping.to(device),
        cache[0], cache[1], scales_2G, ALONE if kind == "row" else None,
    )  # fmt: skip


def outputs(q_THA: Tensor, args: Args) -> Tensors:
    return q_THA, args[7], args[8]


def pair_sizes(expected: Tensors, args: Args) -> Tensors:
    """Return error scales. A rotated element sums two terms: at most twice the larger of a pair."""
    num_rotated, sizes = args[4].shape[1], []
    for tensor in expected:
        size = 2 * tensor.float().abs()
        half = torch.stack(size[..., :num_rotated].chunk(2, -1)).amax(0)
        size[..., :num_rotated] = torch.cat([half, half], -1)
        sizes.append(size)
    return tuple(sizes)


def case(
    kind: str, T: int, heads: tuple[int, int, int], dtype: torch.dtype, num_rotated: int = 0,
    *, is_fp8: bool = False,
) -> Case:  # fmt: skip
    H, G, A = heads
    name = f"{kind} T={T} {H=} {G=} {A=}{f' R={num_rotated}' * (num_rotated > 0)} {bits(dtype)}"
    case_inputs = partial(inputs, kind, T, H, G, A, dtype, num_rotated=num_rotated, is_fp8=is_fp8)
    return Case(f"{name}{' fp8' * is_fp8}", case_inputs, T <= 7)


def cases() -> tuple[Case, ...]:
    heads = ((16, 8, 128), (32, 8, 128), (14, 2, 64), (3, 1, 80), (16, 2, 256), (1, 1, 16))
    checked = [case("normal", T, h, torch.bfloat16) for T in (1, 7, 513) for h in heads]
    checked += [case("normal", 7, heads[0], torch.float32)]
    checked += [case("plain", 513, heads[1], torch.bfloat16)]
    checked += [
        case(kind, 7, heads[0], torch.bfloat16) for kind in ("plain", "strided", "spike", "slices")
    ]
    checked += [
        case(kind, *of)
        for kind in ("row", "normal")
        for of in (
            (7, (6, 1, 128), torch.bfloat16, 64),
            (7, (3, 2, 24), torch.float32, 8),
            (7, (5, 5, 80), torch.bfloat16, 80),
            (513, (48, 8, 128), torch.bfloat16, 64),
            (513, (16, 2, 256), torch.bfloat16, 64),
        )
    ]
    checked += [
        case(*of, is_fp8=True)
        for of in (
            ("normal", 7, (16, 8, 128), torch.bfloat16),
            ("spike", 7, (14, 2, 64), torch.bfloat16),
            ("row", 7, (3, 1, 80), torch.float32),
            ("plain", 513, (32, 8, 128), torch.bfloat16),
            ("slices", 513, (16, 2, 256), torch.bfloat16),
        )
    ]
    timed = [
        Case(
            f"T={T} H={H} G={G} A=128{' fp8' * is_fp8}",
            partial(inputs, "normal", T, H, G, 128, torch.bfloat16, is_fp8=is_fp8),
            num_bytes=2 * T * (2 * H + (3 if is_fp8 else 4) * G) * 128 + 4 * T * 128,
        )
        for is_fp8 in (False, True)
        for T, H, G in ((1, 16, 8), (256, 16, 8), (256, 32, 8), (8192, 16, 8), (8192, 32, 8))
    ]
    return (*checked, *timed)


# In 16 bits, an element of the normalised head, its product with the norm's weight and the sum may
# each round to the neighbouring number. In 32 bits, there are sums 8 additions deep and six
# roundings. In 8 bits, elements that differ by these may round to neighbouring numbers, which are
# at most an eighth apart.
ROPE_STORE = Kernel(
    "rope_store",
    rope_store.rope_store,
    reference.rope_store,
    cases(),
    ulps_16=3,
    ulps_32=16,
    ulps_8=0.5,
    scale=pair_sizes,
    outputs=outputs,
)


def mean_inputs(kind: str, T: int, H: int, G: int, A: int, device: torch.device) -> Args:
    return inputs(kind, T, H, G, A, torch.bfloat16, device)[0], (H * A, G * A), 2


# Sums are up to 13 additions deep, of terms that do not cancel.
MEAN_SQUARES = Kernel(
    "mean_squares",
    rope_store.mean_squares,
    reference.mean_squares,
    tuple(
        Case(
            f"{kind} T={T} H={H} G={G} A={A}",
            partial(mean_inputs, kind, T, H, G, A),
            T <= 7,
            num_bytes=2 * T * (H + G) * A if kind == "normal" and H == 48 else 0,
        )
        for kind in ("normal", "strided", "spike", "slices")
        for T in (1, 7, 256, 8192)
        for H, G, A in ((48, 8, 128), (3, 1, 80), (1, 1, 16))
    ),
    ulps_32=16,
)
