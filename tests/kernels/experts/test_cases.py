"""The cases of experts' products pass correct implementations and fail wrong ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nanovllm_kernels.case import check
from nanovllm_kernels.experts import cases as expert_cases
from nanovllm_kernels.experts.cases import OF_QUANTISED, OF_SUMS, MoECase, in_float
from nanovllm_kernels.experts.grouped_linear import CHECKED
from nanovllm_kernels.experts.reference import expert_down, expert_gate_up
from torch import Tensor

CPU = torch.device("cpu")


def gate_up(x_TD: Tensor, *more: object) -> Tensor:
    return in_float(expert_gate_up)(x_TD, *more).bfloat16()


def down(y_XF: Tensor, *more: object) -> Tensor:
    return in_float(expert_down)(y_XF, *more).bfloat16()


def quantised(x_TD: Tensor, *more: object) -> Tensor:
    """Compute gate_up with 8-bit activations."""
    scale_T1 = x_TD.float().abs().amax(-1, keepdim=True) / 448
    return gate_up((x_TD / scale_T1).to(torch.float8_e4m3fn).float() * scale_T1, *more)


def worst(product, of_down=down, share: float = OF_SUMS, *, block_fp8: bool = False) -> list[float]:
    """Return the worst error of each product as a fraction of the allowed error."""
    routed = tuple(replace(one, block_fp8=block_fp8) for one in CHECKED)
    both = expert_cases.kernels("any", product, of_down, 128, routed, share=share)
    return [max(check(kernel, case, CPU) for case in kernel.cases) for kernel in both]


@pytest.mark.parametrize("block_fp8", [False, True])
def test_rounding_of_results_passes(block_fp8: bool) -> None:
    assert all(0.4 < found < 0.6 for found in worst(gate_up, block_fp8=block_fp8))


def test_activations_of_8_bits_pass_with_their_own_bound() -> None:
    assert worst(quantised, share=OF_QUANTISED, block_fp8=True)[0] < 1
    assert worst(quantised, block_fp8=True)[0] > 10


def test_a_missing_element_shows() -> None:
    def without(x: Tensor, *more: object) -> Tensor:
        x = x.clone()
        x[:, 0] = 0
        return x

    found = worst(
        lambda x, *more: gate_up(without(x), *more), lambda y, *more: down(without(y), *more)
    )
    assert min(found) > 3
    eight_bits = worst(
        lambda x, *more: gate_up(without(x), *more), share=OF_QUANTISED, block_fp8=True
    )
    assert eight_bits[0] > 1


def test_a_row_of_another_expert_shows() -> None:
    def shifted(x_TD: Tensor, weight_E2FD: Tensor, *more: object) -> Tensor:
        return gate_up(x_TD, weight_E2FD.roll(1, 0), *more)

    assert worst(shifted)[0] > 10


def test_gate_and_up_in_each_others_place_show() -> None:
    def swapped(x_TD: Tensor, weight_E2FD: Tensor, *more: object) -> Tensor:
        return gate_up(x_TD, weight_E2FD.roll(weight_E2FD.shape[1] // 2, 1), *more)

    assert worst(swapped)[0] > 10


def test_names_say_what_a_case_is() -> None:
    assert str(MoECase(2, 1, 4, 8, 8, first=1, num=2)) == "T=2 K=1 E=4 F=8 D=8 experts 1-3"
    assert str(MoECase(2, 1, 4, 8, 8, kind="last")) == "T=2 K=1 E=4 F=8 D=8 all to the last"
