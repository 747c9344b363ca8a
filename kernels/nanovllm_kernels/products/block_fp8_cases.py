"""Plain torch references and cases of the products with block-scaled fp8 operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal
from nanovllm_kernels.fp8_reference import LARGEST, Quantised, Scaled
from nanovllm_kernels.products import quantise_cases
from nanovllm_kernels.products.block_fp8_cute import (
    DEEP,
    EXPERT_TILES,
    GATED_EXPERT_TILES,
    GATED_TILES,
    TILES,
    Tile,
    block_fp8_experts,
    block_fp8_gated,
    block_fp8_gated_experts,
    block_fp8_linear,
)
from nanovllm_kernels.products.linear_cases import gated_sizes

UNWRITTEN = 7.0  # in rows without an expert, which must stay as they are


class TileRows(NamedTuple):
    """Fields of route_reference.ExpertRows that a product reads."""

    starts_E1: Tensor
    tile_expert_X: Tensor
    tile_start_X: Tensor
    num_tiles_1: Tensor
    tile: int


def rows_of(counts: tuple[int, ...], tile: int, device: torch.device) -> TileRows:
    """Return sorted rows for experts with `counts` rows each, in tiles of `tile` rows."""
    starts = [0, *accumulate(counts)]
    tiles = [(e, row) for e, (a, b) in enumerate(pairwise(starts)) for row in range(a, b, tile)]
    padded = [*tiles, *[(-1, -1)] * len(counts)]
    experts, firsts = zip(*padded, strict=True)
    ints = (torch.tensor(n, dtype=torch.int32) for n in (starts, experts, firsts, [len(tiles)]))
    return TileRows(*(each.to(device) for each in ints), tile)


def dequantised(numbers: Tensor, scale: Tensor, block_rows: int) -> Tensor:
    """Dequantise to float32. Scales are of `block_rows` x 128 blocks; the last may be partial."""
    return Scaled(numbers, scale, block_rows).dequantised()


def operands(x8_TD: Tensor, x_scale_BT: Tensor, w8_ND: Tensor, w_scale: Tensor, g: int) -> Tensors:
    """Return both operands of a product in float32."""
    return dequantised(x8_TD, x_scale_BT.T.contiguous(), 1), dequantised(w8_ND, w_scale, g)


def reference(
    x8_TD: Tensor,
    x_scale_BT: Tensor,
    w8_ND: Tensor,
    w_scale: Tensor,
    residual_TN: Tensor | None = None,
    block_rows: int = DEEP,
    tile: Tile | None = None,
) -> Tensor:
    y = functional.linear(*operands(x8_TD, x_scale_BT, w8_ND, w_scale, block_rows))
    return (y if residual_TN is None else y + residual_TN.float()).bfloat16()


def scale(expected: Tensors, args: Args) -> Tensors:
    """Return the error scale of a product.

    A tensor core truncates bits of its addends, so besides rounding there is an error of 2 ** -9
    times the sum of absolute terms. Sums of more than 128 positive terms have larger errors if they
    stay in the tensor core.
    """
    x, w = operands(*args[:4], args[5])
    return (expected[0].abs() + functional.linear(x.abs(), w.abs()) / 4,)


def experts_reference(
    x8_XD: Tensor, x_scale_BX: Tensor, w8_END: Tensor, w_scale: Tensor, rows: TileRows, y_XN: Tensor
) -> Tensor:
    for its, one in by_expert(x8_XD, x_scale_BX, w8_END, w_scale, rows):
        y_XN[its] = reference(*one)
    return y_XN


def experts_scale(expected: Tensors, args: Args) -> Tensors:
    sizes = args[5].float()
    for its, one in by_expert(*args[:5]):
        sizes[its] = scale((expected[0][its],), one)[0]
    return (sizes,)


def by_expert(
    x8_XD: Tensor, x_scale_BX: Tensor, w8_END: Tensor, w_scale: Tensor, rows: TileRows
) -> Iterator[tuple[slice, Args]]:
    """Yield each expert's rows, and the arguments of its product as a dense one."""
    for expert, (start, end) in enumerate(pairwise(rows.starts_E1.tolist())):
        x = x8_XD[start:end], x_scale_BX[:, start:end]
        yield slice(start, end), (*x, w8_END[expert], w_scale[expert], None, DEEP)


def gated(x8: Tensor, x_scale: Tensor, *weight: Any) -> Quantised:  # noqa: ANN401
    w8_ND, w_scale, _, block_rows, tile = weight
    return block_fp8_gated(Quantised(x8, x_scale), Scaled(w8_ND, w_scale, block_rows), tile)


def experts_gated(*args: Any) -> Quantised:  # noqa: ANN401
    return block_fp8_gated_experts(Quantised(*args[:2]), Scaled(*args[2:4]), args[4])


def gated_reference(*args: Any) -> Quantised:  # noqa: ANN401
    """Gate and quantise the product, which stays in float32 and is never rounded to 16 bits."""
    return quantise_cases.silu_mul_reference(functional.linear(*operands(*args[:4], args[5])))


def gated_experts_reference(*args: Any) -> Quantised:  # noqa: ANN401
    results = [gated_reference(*one) for _, one in by_expert(*args[:5])]
    return Quantised(*(torch.cat(each, n) for n, each in enumerate(zip(*results, strict=True))))


def gated_outputs(result: Quantised, args: Args) -> Tensors:
    """Return the dequantised numbers and the scales.

    For experts, rows of no expert are replaced by one row of zeros.
    """
    values_XF, scale_BX = result.dequantised(), result.scale_BX
    if isinstance(args[4], TileRows):
        end = args[4].starts_E1[-1]
        values_XF = functional.pad(values_XF[:end], (0, 0, 0, 1))
        scale_BX = functional.pad(scale_BX[:, :end], (0, 1))
    return values_XF, scale_BX


def gated_scale(expected: Tensors, args: Args) -> Tensors:
    """Return the error scales of gated_outputs.

    Each is the error of quantise_cases plus that of the product. One ulp of the product is a 16th
    of one of quantise_cases.
    """
    y = functional.linear(*operands(*args[:4], args[5]))
    errors = gated_sizes(y, scale((y,), args)[0]) / 16
    largest = functional.pad(errors, (0, -errors.shape[1] % DEEP)).unflatten(1, (-1, DEEP)).amax(-1)
    values, scales = quantise_cases.sizes(expected, args)
    return values + errors, scales + largest.t() / LARGEST


def gated_experts_scale(expected: Tensors, args: Args) -> Tensors:
    values_XF, scale_BX = expected[0].clone(), expected[1].clone()
    for its, one in by_expert(*args[:5]):
        values_XF[its], scale_BX[:, its] = gated_scale((values_XF[its], scale_BX[:, its]), one)
    return values_XF, scale_BX


def numbers(device: torch.device, *shape: int, seed: int = 0, sign: int = 0) -> Tensor:
    """Return normal e4m3 numbers. With `sign` all are positive."""
    values = normal(device, *shape, dtype=torch.float32, seed=seed)
    return (values.abs() if sign else values).to(torch.float8_e4m3fn)


def scales(device: torch.device, *shape: int, seed: int) -> Tensor:
    return normal(device, *shape, dtype=torch.float32, seed=seed).exp2()


def inputs(
    T: int,
    N: int,
    D: int,
    device: torch.device,
    *,
    added: bool = False,
    block_rows: int = DEEP,
    tile: Tile | None = None,
    sign: int = 0,
    zeros: bool = False,
) -> Args:
    """Return the arguments of block_fp8_linear. With `zeros` every 97th row of x is zero."""
    blocks, padded = -(-D // DEEP), -(-T // 4) * 4
    x_scale_BT = scales(device, blocks, padded, seed=1)
    x_scale_BT[:, T:] = torch.nan
    x8_TD = numbers(device, T, D + 32, sign=sign)[:, :D]
    if zeros:
        x8_TD[1::97] = 0
    w8_ND = numbers(device, N, D, seed=2, sign=sign)
    w_scale = scales(device, -(-N // block_rows), blocks, seed=3) * D**-0.5
    residual_TN = normal(device, T, N, dtype=torch.bfloat16, seed=4) if added else None
    return x8_TD, x_scale_BT, w8_ND, w_scale, residual_TN, block_rows, tile


def experts_inputs(
    counts: tuple[int, ...], unused: int, N: int, D: int, tile: int, device: torch.device
) -> Args:
    """Return the arguments of block_fp8_experts. `unused` rows follow those of the last expert."""
    num_rows, num_experts, blocks = sum(counts) + unused, len(counts), -(-D // DEEP)
    x_scale_BX = scales(device, blocks, -(-num_rows // 4) * 4, seed=1)
    x_scale_BX[:, sum(counts) :] = torch.nan
    x8_XD, w8_END = numbers(device, num_rows, D), numbers(device, num_experts, N, D, seed=2)
    w_scale = scales(device, num_experts, -(-N // DEEP), blocks, seed=3) * D**-0.5
    y_XN = torch.full((num_rows, N), UNWRITTEN, dtype=torch.bfloat16, device=device)
    return x8_XD, x_scale_BX, w8_END, w_scale, rows_of(counts, tile, device), y_XN


def cases() -> tuple[Case, ...]:
    few, many = Tile(64, 64), Tile(256, 128, 2)
    checked = [
        Case(f"T={T} N={N} D={D} {added=} {tile}", partial(inputs, T, N, D, added=added, tile=tile))
        for tile in TILES
        for T, N, D, added in (
            (1, 8, 16, False),
            (tile.rows + 65, 392, 400, True),
            (3 * tile.rows - 1, 1800, 1152, False),
        )
    ]
    checked += [
        Case(f"scales of {g} rows, {tile}", partial(inputs, 300, 448, 512, block_rows=g, tile=tile))
        for g, tile in product((32, 64), (few, many))
    ]
    checked += [
        Case(f"positive, {tile}", partial(inputs, 128, 256, 16384, sign=1, tile=tile))
        for tile in (few, many)
    ]
    sizes = (6144, 4096, False), (24576, 4096, False), (4096, 12288, True)
    times = product((64, 128, 256, 1024, 8192), sizes)
    return *checked, *(timed(1, T, N, D, added=added) for T, (N, D, added) in times)


def experts_cases() -> tuple[Case, ...]:
    odd = (0, 1, 130, 0, 63, 300), (0, 0, 517), (0, 0, 0), (1,) * 40
    checked = [
        Case(f"{counts} N={N} D={D} {tile=}", partial(experts_inputs, counts, 9, N, D, tile))
        for counts, (N, D), tile in product(odd, ((384, 256), (200, 144)), EXPERT_TILES)
    ]
    sizes = (128, 1536, 2048), (128, 2048, 768), (256, 3072, 3072)
    times = product(sizes, ((8, 64), (128, 128), (512, 256)))
    return *checked, *(timed(E, T, N, D, tile) for (E, N, D), (T, tile) in times)


def gated_cases() -> tuple[Case, ...]:
    checked = [
        Case(f"T={T} N={N} D={D} scales of {g} rows, {tile}", partial(of, T, N, D, block_rows=g))
        for tile in GATED_TILES
        for of in (partial(inputs, tile=tile, zeros=True),)
        for T, N, D, g in (
            (1, 256, 16, 128),
            (tile.rows * tile.cluster + 65, 832, 400, 32),
            (3 * tile.rows * tile.cluster - 1, 896, 1152, 64),
            (2 * tile.rows, 4352, 512, 128),
        )
    ]
    sizes = (24576, 4096), (36864, 7168)
    return *checked, *(timed(1, T, *of) for T in (128, 256, 1024, 8192) for of in sizes)


def gated_experts_cases() -> tuple[Case, ...]:
    odd = (0, 1, 130, 0, 63, 300), (0, 256, 517, 128), (0, 0, 0), (1,) * 40
    checked = [
        Case(f"{counts} {tile=}", partial(experts_inputs, counts, 9, 768, 272, tile))
        for counts, tile in product(odd, GATED_EXPERT_TILES)
    ]
    tiles = (8, 64), (128, 128), (256, 256), (512, 256)
    sizes = (128, 1536, 2048), (256, 3072, 3072)
    return *checked, *(timed(E, n, *of, tile) for E, *of in sizes for n, tile in tiles)


def timed(E: int, T: int, N: int, D: int, tile: int = 0, *, added: bool = False) -> Case:
    """Return a timed case of E experts with T rows on average, or of one weight if `tile` is 0."""
    name, of = f"T={T} N={N} D={D} {added=}", partial(inputs, T, N, D, added=added)
    if tile:
        name = f"E={E} of {T} rows N={N} D={D} {tile=}"
        of = partial(experts_inputs, uneven(E, T), 0, N, D, tile)
    return Case(name, of, num_bytes=E * (N * D + T * (D + 2 * N)), num_flops=2 * E * T * N * D)


def uneven(num_experts: int, rows: int) -> tuple[int, ...]:
    """Return counts that average `rows` and range from half to three halves of it."""
    shuffled = (7 * n % num_experts for n in range(num_experts))
    return tuple(rows // 2 + rows * nth // num_experts for nth in shuffled)


# One ulp for rounding the result; `scale` bounds the other errors.
BLOCK_FP8_LINEAR = Kernel(
    "block_fp8_linear", block_fp8_linear, reference, cases(), ulps_16=1, scale=scale
)
BLOCK_FP8_EXPERTS = replace(
    BLOCK_FP8_LINEAR,
    name="block_fp8_experts",
    run=block_fp8_experts,
    reference=experts_reference,
    cases=experts_cases(),
    scale=experts_scale,
)
BLOCK_FP8_GATED = Kernel(
    "block_fp8_gated",
    gated,
    gated_reference,
    gated_cases(),
    ulps_32=quantise_cases.STEP,
    scale=gated_scale,
    outputs=gated_outputs,
)
EXPERTS_GATED = replace(
    BLOCK_FP8_GATED,
    name="experts_gated",
    run=experts_gated,
    reference=gated_experts_reference,
    cases=gated_experts_cases(),
    scale=gated_experts_scale,
)
