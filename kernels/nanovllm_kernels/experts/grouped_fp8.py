"""Grouped GEMMs of routed experts in block fp8 for many rows, with fp8 activations.

A token is quantised once and written to the sorted rows of its pairs, so that both GEMMs read
contiguous rows. The first GEMM gates and quantises its result for the second.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from nanovllm_kernels.compile_cache import Job
from nanovllm_kernels.experts import cases as expert_cases
from nanovllm_kernels.experts.cases import OF_QUANTISED, MoECase
from nanovllm_kernels.experts.reference import ExpertProducts
from nanovllm_kernels.experts.route_reference import ExpertRows
from nanovllm_kernels.fp8_reference import BLOCK, FP8, Quantised, Scaled
from nanovllm_kernels.products.quantise import quantise

LEAST_ROWS = 8  # per expert; with fewer, kernels with 16-bit activations run


def tile(num_pairs: int, num_experts: int) -> int:
    """Return the tile size for `num_pairs` pairs of `num_experts` experts of this rank."""
    from nanovllm_kernels.products.block_fp8_cute import experts_tile_rows  # imports CuTe DSL

    return experts_tile_rows(num_pairs, num_experts)


def fits(num_pairs: int, gate_up_E2FD: Tensor) -> bool:
    num_experts, num_lines, num_inputs = gate_up_E2FD.shape
    return (
        num_pairs > LEAST_ROWS * num_experts
        and gate_up_E2FD.dtype == FP8
        and num_lines % (2 * BLOCK) == 0  # the gate must end with a block of scales
        and num_inputs % 16 == 0
    )


def expert_gate_up(
    x_TD: Tensor, gate_up_E2FD: Tensor, scale_EXX: Tensor, rows: ExpertRows, num_chosen: int
) -> Quantised:
    """Return silu(gate) * up of the sorted rows, y_XF, for `expert_down` only."""
    from nanovllm_kernels.products.block_fp8_cute import block_fp8_gated_experts

    x8 = quantise(x_TD, rows.row_of_TK)
    return block_fp8_gated_experts(x8, Scaled(gate_up_E2FD, scale_EXX), rows)


def expert_down(
    y_XF: Quantised, down_EDF: Tensor, scale_EXX: Tensor, rows: ExpertRows, num_chosen: int
) -> Tensor:
    """Return y_XD of sorted rows. Rows without an expert of this rank are not written."""
    from nanovllm_kernels.products.block_fp8_cute import block_fp8_experts

    return block_fp8_experts(*y_XF, down_EDF, scale_EXX, rows)


def jobs(gate_up_E2FD: Tensor, num_chosen: int) -> list[Job]:
    """Return the compile jobs of both products."""
    from nanovllm_kernels.products.block_fp8_cute import (
        EXPERT_TILES,
        GATED_EXPERT_TILES,
        Kind,
        compile_tile,
    )

    kinds = [(*sizes, BLOCK, *Kind(grouped=True)) for sizes in EXPERT_TILES.values()]
    kind = Kind(grouped=True, gated=True)
    kinds += [(*sizes, BLOCK, *kind) for sizes in GATED_EXPERT_TILES.values()]
    return [compile_tile.job(*kind) for kind in kinds]


GROUPED_FP8 = ExpertProducts(expert_gate_up, expert_down, tile, fits, "fp8", jobs)


def gate_up_alone(*args: Tensor) -> Tensor:
    return expert_gate_up(*args).dequantised().bfloat16()


def down_alone(y_XF: Tensor, *more: Tensor) -> Tensor:
    return expert_down(quantise(y_XF), *more)


CHECKED = (
    MoECase(9, 2, 3, 128, 144),
    MoECase(300, 8, 33, 256, 400),
    MoECase(300, 1, 5, 128, 64, kind="first"),
    MoECase(200, 4, 64, 128, 128, kind="last"),
    MoECase(256, 4, 16, 128, 256, first=4, num=5),
    MoECase(256, 4, 16, 128, 256, first=4, num=5, kind="first"),
)
TIMED = tuple(MoECase(T, 8, 128, 768, 2048) for T in (1024, 8192))
GROUPED_FP8_GATE_UP, GROUPED_FP8_DOWN = expert_cases.kernels(
    "grouped_fp8",
    gate_up_alone,
    down_alone,
    128,
    *(tuple(replace(one, block_fp8=True) for one in each) for each in (CHECKED, TIMED)),
    share=OF_QUANTISED,
)
