"""Library GEMMs in the two forms that beat one plain product: split-K, and with addition.

Sliced (split-K): the library's tiles do not fill the GPU in steps of some hundred rows, and for 192
or 224 rows its choice of tiles is bad. Here the inputs are cut into slices, each one product of a
batched launch. The next kernel, a norm with the residual stream or a rotation, sums the slices in
float32. Added: for thousands of rows the library adds the residual stream in its epilogue.

Decision: measured on an H200, in us, one product and then two slices, at 192 rows. In Qwen3-8B, qkv
took 23.6 and 18.4, o 18.0 and 12.8, down 53.9 and 30.9. In 0.6B with four slices, o took 6.4 and
4.6, down 7.8 and 5.3. At 512 rows of 8B slices are slower. The same holds for 0.6B's qkv, which has
many more features than inputs. With 8192 rows of 8B, including the norm, o takes 415 plain and 386
added. For down these are 1184 and 1215, so long inputs are excluded.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal
from nanovllm_kernels.norms.reference import summed
from nanovllm_kernels.products import linear_cases

LEAST_SLICED_ROWS = 65  # fewer rows use other kernels
TILE = 128  # approximate rows and features of a tile of the library
TILES = 192  # 1.5 times the tiles that run at once; with more, the GPU is full without slices
MOST_SLICES = 4
ALIGNMENT = 8  # of a slice's inputs, in elements
LEAST_ADDED_WORK = 6 * 10**10  # multiply-adds
MOST_ADDED_INPUTS = 4096


class SlicedLinear:
    """Implementation of layers.products.FusedLinear."""

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool:
        return num_slices(num_rows, *weight_ND.shape) > 1

    def __call__(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        """Return y_STN, whose sum over S is x W^T."""
        slices = num_slices(len(x_TD), *weight_ND.shape), -1
        x_ITD = x_TD.unflatten(1, slices).transpose(0, 1)
        return torch.bmm(x_ITD, weight_ND.unflatten(1, slices).permute(1, 2, 0))


class AddedLinear:
    """Implementation of layers.products.FusedLinear."""

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool:
        is_long = weight_ND.shape[1] > MOST_ADDED_INPUTS
        return not is_long and num_rows * weight_ND.numel() >= LEAST_ADDED_WORK

    def __call__(self, x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor) -> Tensor:
        """Add x W^T to the residual stream in place and return it."""
        return residual_TN.addmm_(x_TD, weight_ND.t())


def num_slices(num_rows: int, num_features: int, num_inputs: int) -> int:
    """Return 1, 2 or 4 slices: enough to fill the GPU, unless writing them costs the gain."""
    if num_rows < LEAST_SLICED_ROWS or 2 * num_inputs < num_features:
        return 1
    tiles, slices = -(-num_rows // TILE) * -(-num_features // TILE), MOST_SLICES
    while slices > 1 and (slices * tiles > TILES or num_inputs % (slices * ALIGNMENT)):
        slices //= 2
    return slices


SLICED_LINEAR, ADDED_LINEAR = SlicedLinear(), AddedLinear()


def sum_of_slices(y: Tensor, args: Args) -> Tensors:
    """Return the sum of slices, rounded like the next kernel's."""
    return (summed(y).to(y.dtype),)


def add_inputs(T: int, N: int, D: int, device: torch.device) -> Args:
    inputs = linear_cases.linear_inputs(T, N, D, device)
    return *inputs, normal(device, T, N, dtype=torch.bfloat16, seed=2)


def add_reference(x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor) -> Tensor:
    y_TN = linear_cases.linear_reference(x_TD.float(), weight_ND)
    return (y_TN + residual_TN.float()).to(x_TD.dtype)


def add_scale(expected: Tensors, args: Args) -> Tensors:
    return (expected[0].abs() + linear_cases.sizes(*args[:2]) + args[2].abs(),)


SLICED = Kernel(
    "sliced_linear",
    SLICED_LINEAR,
    linear_cases.linear_reference,
    (
        Case("T=65 N=200 D=96", partial(linear_cases.linear_inputs, 65, 200, 96), small=True),
        *(
            Case(
                f"T={T} N={N} D={D}",
                partial(linear_cases.linear_inputs, T, N, D),
                num_bytes=2 * (N * D + T * D + T * N),
            )
            for N, D in ((1024, 2048), (1024, 3072), (6144, 4096), (4096, 4096), (4096, 12288))
            for T in (129, 192, 256, 384)
        ),
    ),
    ulps_16=2,  # each slice is rounded, and then their sum
    scale=linear_cases.linear_scale,
    outputs=sum_of_slices,
)
ADDED = Kernel(
    "added_linear",
    ADDED_LINEAR,
    add_reference,
    (
        Case("T=33 N=200 D=96", partial(add_inputs, 33, 200, 96), small=True),
        *(
            Case(f"T={T} N={N} D={N}", partial(add_inputs, T, N, N), num_flops=2 * T * N * N)
            for T, N in ((4096, 4096), (8448, 4096))
        ),
    ),
    ulps_16=1,
    scale=add_scale,
)
