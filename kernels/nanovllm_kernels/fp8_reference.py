"""Block fp8 in plain torch: e4m3 numbers with shared float32 scales. Defines the kernels' results.

A weight has one scale per block of `block_rows` x 128 numbers; activations have one per row and 128
numbers. A number is its e4m3 value times its scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn
ROWS_UNIT, WIDTH_UNIT = 8, 16  # kernels need weights whose rows and width are multiples of these
LARGEST = 448.0  # largest FP8 number; the type has no infinity
FEW_ROWS = 16  # maximum rows of products that also quantise them


class Scaled(NamedTuple):
    """A weight [N, D] in FP8, and float32 scales [N / block_rows, D / 128], rounded up."""

    weight_ND: Tensor
    scale: Tensor
    block_rows: int = BLOCK
    rows_dtype: torch.dtype = torch.bfloat16  # of the rows that it is multiplied with

    @property
    def shape(self) -> torch.Size:
        return self.weight_ND.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight_ND.dtype

    @property
    def multiplies_16_bits(self) -> bool:
        """True if kernels can multiply with the weight, since they take bfloat16 rows."""
        return self.rows_dtype == torch.bfloat16

    def dequantised(self) -> Tensor:
        """Return the weight in float32."""
        num_rows, width = self.shape
        scale_ND = spread(self.scale, num_rows, width, self.block_rows)
        return self.weight_ND.float() * scale_ND


Weight: TypeAlias = Tensor | Scaled


class Quantised(NamedTuple):
    """Quantised rows. A number is its value times the scale of its row's block."""

    values_XD: Tensor
    scale_BX: Tensor  # B is D / 128, rounded up

    def dequantised(self) -> Tensor:
        """Return the numbers in float32."""
        scale_XD = self.scale_BX.t().repeat_interleave(BLOCK, 1)
        return self.values_XD.float() * scale_XD[:, : self.values_XD.shape[1]]


def empty(num_rows: int, width: int, device: torch.device) -> Quantised:
    """Return Quantised rows with uninitialised contents."""
    scale_BX = torch.empty(-(-width // BLOCK), num_rows, dtype=torch.float32, device=device)
    return Quantised(torch.empty(num_rows, width, dtype=FP8, device=device), scale_BX)


class Fp8Linear(NamedTuple):
    """Kernels that multiply with Scaled weights and quantise activations."""

    product: Callable[..., Tensor]  # of Quantised rows, like block_fp8_cute.block_fp8_linear
    obstacle: Callable[..., str | None]  # (num_features, width, block_rows): the reason, or None
    skinny: Any  # layers.products.SkinnyLinear for few rows, which it quantises; or None
    quantise: Callable[[Tensor], Quantised]
    norm_quantise: Callable[..., Quantised]  # (x, residual_TD or None, norm_weight_D, eps)
    gated: Callable[[Quantised, Scaled], Quantised]  # silu(gate) * up of the product's two halves


def spread(scale: Tensor, num_rows: int, width: int, block_rows: int = BLOCK) -> Tensor:
    """Return the scale of every element. `scale` may have leading dimensions, such as experts."""
    rows = scale.repeat_interleave(block_rows, -2)[..., :num_rows, :]
    return rows.repeat_interleave(BLOCK, -1)[..., :width]


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [.., N, D] in FP8 and its scales of 128 x 128 blocks, with maximum 448.

    Blocks at the ends may be smaller. A block of zeros has scale 1.
    """
    num_rows, width = weight.shape[-2:]
    ends = 0, -width % BLOCK, 0, -num_rows % BLOCK
    padded = torch.nn.functional.pad(weight.float().abs(), ends)
    largest = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).amax((-1, -3))
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (weight.float() / spread(scale, num_rows, width)).to(FP8), scale
