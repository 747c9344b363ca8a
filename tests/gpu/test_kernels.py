"""All cases of all kernels on the GPU. `nanovllm check-kernels` also times them."""

from __future__ import annotations

import pytest
import torch
from nanovllm_kernels import KERNELS
from nanovllm_kernels.case import Case, Kernel, check
from nanovllm_kernels.timing import graph_us

from nanovllm.registry import resolve

CUDA = torch.device("cuda")
CASES = [
    pytest.param(kernel, case, id=f"{kernel.name}: {case.name}")
    for kernel in (resolve(KERNELS, name) for name in KERNELS)
    for case in kernel.cases
    if not case.is_timed
]


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_case(kernel: Kernel, case: Case) -> None:
    assert check(kernel, case, CUDA) <= 1


def test_graph_timing_grows_with_the_work() -> None:
    """A copy of twice the bytes takes about twice the time, independent of the host's speed."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    half = 1 << 29
    whole_us = graph_us([lambda: target.copy_(source)] * 4)
    half_us = graph_us([lambda: target[:half].copy_(source[:half])] * 4)
    assert 1.7 < whole_us / half_us < 2.3
