"""Reference of 8-bit activations. tests/kernels/test_interpreted.py checks the kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from nanovllm_kernels.case import check
from nanovllm_kernels.fp8_reference import Quantised
from nanovllm_kernels.products.quantise_cases import QUANTISE, reference, silu_mul_reference

CPU = torch.device("cpu")


def test_the_largest_of_a_block_is_448_and_zeros_have_scale_1() -> None:
    x_TD = torch.zeros(2, 300)
    x_TD[0, 5], x_TD[0, 6], x_TD[1, 299] = -896, 448.4, 7
    found = reference(x_TD)
    assert found.values_XD[0, 5:7].tolist() == [-448, 224] and found.values_XD[1, 299] == 448
    assert found.scale_BX.tolist() == [[2, 1], [1, 1], [1, 7 / 448]]
    expected_TD = x_TD.clone()
    expected_TD[0, 6] = 448  # rounded to 4 significant bits
    assert torch.equal(found.dequantised(), expected_TD)


def test_a_token_is_at_the_rows_of_its_pairs() -> None:
    x_TD = torch.arange(2 * 130).reshape(2, 130).float()
    once = reference(x_TD)
    found = reference(x_TD, torch.tensor([[2, -1], [0, 1]]))
    assert found.values_XD.shape == (4, 130) and found.scale_BX.shape == (2, 4)
    assert torch.equal(found.dequantised()[:3], once.dequantised()[[1, 1, 0]])


def test_the_gate_is_the_first_half() -> None:
    gate_up_X2F = torch.tensor([[0.0, 20.0, 3.0, 2.0]])
    assert silu_mul_reference(gate_up_X2F).dequantised().tolist() == [[0, 40]]


def test_a_number_that_is_two_steps_off_shows() -> None:
    kernel, case = QUANTISE, QUANTISE.cases[1]

    def off(x_TD: torch.Tensor) -> Quantised:
        found = reference(x_TD)
        return Quantised((found.values_XD.float() * 0.75).to(torch.float8_e4m3fn), found.scale_BX)

    assert check(replace(kernel, run=off), case, CPU) > 1
