"""Choice of GEMM kernels for block-fp8 weights by number of rows, and their compile jobs."""

from __future__ import annotations

from torch import Tensor

from nanovllm_kernels.compile_cache import CachedCompile
from nanovllm_kernels.fp8_reference import BLOCK, Fp8Linear, Quantised, Scaled
from nanovllm_kernels.products import block_fp8_cute, few_fp8, few_fp8_cute
from nanovllm_kernels.products.block_fp8_cute import (
    block_fp8_gated,
    block_fp8_linear,
    compile_tile,
    obstacle,
    tile_of,
)
from nanovllm_kernels.products.few_fp8 import MOST_ROWS
from nanovllm_kernels.products.few_fp8_cute import FEW_FP8
from nanovllm_kernels.products.quantise import norm_quantise, quantise, silu_mul_quantise
from nanovllm_kernels.products.skinny_linear import PROCESSORS, Kind

TILED = range(7, 14)  # base-2 logarithms of the row counts whose tiles are compiled early


def fp8_product(
    x8_TD: Tensor,
    x_scale_BT: Tensor,
    w8_ND: Tensor,
    w_scale: Tensor,
    residual_TN: Tensor | None = None,
    block_rows: int = BLOCK,
) -> Tensor:
    """Compute block_fp8_linear with the faster kernel for this number of rows."""
    if 0 < len(x8_TD) <= MOST_ROWS:
        weight = Scaled(w8_ND, w_scale, block_rows)
        return few_fp8.product(x8_TD, x_scale_BT, weight, residual_TN)
    return block_fp8_linear(x8_TD, x_scale_BT, w8_ND, w_scale, residual_TN, block_rows)


def fp8_gated(x8: Quantised, weight: Scaled) -> Quantised:
    """Compute block_fp8_gated. Up to MOST_ROWS rows, the gate is a separate kernel."""
    if 0 < len(x8.values_XD) <= MOST_ROWS:
        return silu_mul_quantise(few_fp8.product(*x8, weight))
    return block_fp8_gated(x8, weight)


FP8_LINEAR = Fp8Linear(fp8_product, obstacle, FEW_FP8, quantise, norm_quantise, fp8_gated)
TILED_FP8 = FP8_LINEAR._replace(  # also for few rows
    product=block_fp8_linear, skinny=None, gated=block_fp8_gated
)


def compiled_for(
    weight: Scaled, kind: Kind, *, few: bool = True
) -> set[tuple[tuple[int, ...], CachedCompile[*tuple[int, ...]]]]:
    """Return the compile jobs of a weight: tiles for the row counts of TILED, and of few rows.

    `few`: FEW_FP8 is in use.
    """
    if obstacle(*weight.shape, weight.block_rows) is not None:
        return set()
    of = weight.block_rows, *block_fp8_cute.Kind(added=kind.added, gated=kind.gated)
    num_lines, rows = len(weight.weight_ND), [2**n for n in TILED]
    tiles = {tile_of(n, num_lines, PROCESSORS, gated=kind.gated) for n in rows}
    jobs = few_fp8_cute.compiled_for(weight, kind) if few else set()
    return jobs | {((*tile, *of), compile_tile) for tile in tiles}
