"""Experts in block fp8 with 8-bit activations: the order of the operations, and their limits."""

from __future__ import annotations

import pytest
import torch
from nanovllm_kernels.case import check
from nanovllm_kernels.experts import grouped_fp8
from nanovllm_kernels.experts.grouped_fp8 import GROUPED_FP8, GROUPED_FP8_DOWN, GROUPED_FP8_GATE_UP
from nanovllm_kernels.experts.reference import used
from nanovllm_kernels.fp8_reference import Quantised, Scaled
from nanovllm_kernels.products import block_fp8_cute, quantise_cases

CPU = torch.device("cpu")


def product(x8_XD, x_scale_BX, w8_END, w_scale, rows) -> torch.Tensor:
    """Compute the product in place of the compiled kernel."""
    assert rows.tile in block_fp8_cute.EXPERT_TILES
    x_XD = Quantised(x8_XD, x_scale_BX).dequantised()
    y_XN = torch.full((len(x_XD), w8_END.shape[1]), torch.nan, dtype=torch.bfloat16)
    for expert, start, end in used(rows):
        weight_ND = Scaled(w8_END[expert], w_scale[expert]).dequantised()
        y_XN[start:end] = (x_XD[start:end] @ weight_ND.T).bfloat16()
    return y_XN


def gated_product(x8: Quantised, weight: Scaled, rows) -> Quantised:
    assert rows.tile in block_fp8_cute.GATED_EXPERT_TILES
    gate_up_X2F = block_fp8_cute.block_fp8_experts(*x8, *weight[:2], rows)
    return quantise_cases.silu_mul_reference(gate_up_X2F)


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_fp8_cute, "block_fp8_experts", product)
    monkeypatch.setattr(block_fp8_cute, "block_fp8_gated_experts", gated_product)
    monkeypatch.setattr(grouped_fp8, "quantise", quantise_cases.reference)


def test_cases_pass_with_room() -> None:
    for kernel in (GROUPED_FP8_GATE_UP, GROUPED_FP8_DOWN):
        found = [check(kernel, case, CPU) for case in kernel.cases if not case.is_timed]
        assert len(found) == 6 and 0.2 < max(found) < 0.8


def test_a_wrong_scale_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(x8_XD, x_scale_BX, *more) -> torch.Tensor:
        return product(x8_XD, x_scale_BX.roll(1, 1), *more)

    monkeypatch.setattr(block_fp8_cute, "block_fp8_experts", shifted)
    for kernel in (GROUPED_FP8_GATE_UP, GROUPED_FP8_DOWN):
        assert check(kernel, kernel.cases[1], CPU) > 2


def test_each_tile_gates_in_its_product() -> None:
    tiles = {GROUPED_FP8.tile(num, 16) for num in (1, 2048, 4096)}
    assert tiles == {*block_fp8_cute.GATED_EXPERT_TILES} == {*block_fp8_cute.EXPERT_TILES}
    kinds = [job.arguments for job in GROUPED_FP8.jobs(torch.empty(0), 1)]
    assert kinds == [
        "(64, 128, 1, 128, False, True, False)",
        "(128, 128, 1, 128, False, True, False)",
        "(256, 128, 2, 128, False, True, False)",
        "(128, 256, 2, 128, False, True, True)",
        "(128, 256, 1, 128, False, True, True)",
        "(64, 256, 1, 128, False, True, True)",
    ]


def test_they_are_for_many_rows_of_whole_blocks() -> None:
    def fits(num_pairs: int, num_lines: int, num_inputs: int, dtype=torch.float8_e4m3fn) -> bool:
        weight = torch.empty(16, num_lines, num_inputs, dtype=dtype, device="meta")
        return GROUPED_FP8.fits(num_pairs, weight)

    assert [fits(num, 768, 144) for num in (128, 129)] == [False, True]
    assert not fits(129, 128, 144) and not fits(129, 768, 136)
    assert not fits(129, 768, 144, torch.bfloat16)
    assert [GROUPED_FP8.tile(num, 16) for num in (129, 2048, 4096)] == [64, 128, 256]
