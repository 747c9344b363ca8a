"""Products by the library, in the two ways that suit it better than one plain product.

Sliced (split-K): of a step of some hundred rows the library's tiles do not fill the GPU, and for
192 or 224 rows it chooses tiles badly. Here the inputs are cut into slices, each a product of its
own in one batched launch; what follows, the norm with the residual stream or the rotation, sums
them up in float32. Added: of thousands of rows the library adds the residual stream itself.

Decision: measured on an H200, us of one product, then of two slices, at 192 rows of Qwen3-8B: qkv
23.6 and 18.4, o 18.0 and 12.8, down 53.9 and 30.9; of 0.6B in four slices o 6.4 and 4.6, down 7.8
and 5.3. At 512 rows of 8B slices are slower, and so they are for 0.6B's qkv, which has many more
features than inputs. 8192 rows of 8B with the norm: o 415 and, added, 386; down 1184 and 1215 (so
not of long inputs).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nanovllm_kernels import linear_cases
from nanovllm_kernels.case import Args, Case, Kernel, Tensors, normal
from nanovllm_kernels.reference import summed

LEAST_SLICED_ROWS = 65  # fewer are other kernels'
TILE = 128  # rows and features of a tile of the library's, about
TILES = 192  # half more than a GPU runs at once; with more there is nothing to fill
MOST_SLICES = 4
ALIGNMENT = 8  # elements: of a slice's inputs
LEAST_ADDED_WORK = 6 * 10**10  # multiply-adds
MOST_ADDED_INPUTS = 4096


class SlicedLinear:
    """One of layers.ops.SlicedLinear."""

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool:
        return num_slices(num_rows, *weight_ND.shape) > 1

    def __call__(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        """y_STN, whose sum over S is x W^T."""
        slices = num_slices(len(x_TD), *weight_ND.shape), -1
        x_ITD = x_TD.unflatten(1, slices).transpose(0, 1)
        return torch.bmm(x_ITD, weight_ND.unflatten(1, slices).permute(1, 2, 0))


class AddedLinear:
    """One of layers.ops.AddedLinear."""

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool:
        is_long = weight_ND.shape[1] > MOST_ADDED_INPUTS
        return not is_long and num_rows * weight_ND.numel() >= LEAST_ADDED_WORK

    def __call__(self, x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor) -> Tensor:
        """Computes x W^T + the residual stream, in its place."""
        return residual_TN.addmm_(x_TD, weight_ND.t())


def num_slices(num_rows: int, num_features: int, num_inputs: int) -> int:
    """1, 2 or 4: as many as fill the GPU with tiles, unless writing them takes what that saves."""
    if num_rows < LEAST_SLICED_ROWS or 2 * num_inputs < num_features:
        return 1
    tiles, slices = -(-num_rows // TILE) * -(-num_features // TILE), MOST_SLICES
    while slices > 1 and (slices * tiles > TILES or num_inputs % (slices * ALIGNMENT)):
        slices //= 2
    return slices


SLICED_LINEAR, ADDED_LINEAR = SlicedLinear(), AddedLinear()


def sum_of_slices(y: Tensor, args: Args) -> Tensors:
    """The sum of slices, as what follows sums them up."""
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
