"""Checks that rows have the same bits with any others: what passes, and what they find."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from nanovllm_kernels import rows_apart
from nanovllm_kernels.products.invariant import NO_WORKSPACE, without_workspace
from nanovllm_kernels.products.skinny_linear import ORDERED_LINEAR, SKINNY_LINEAR, Kind, shape_of
from nanovllm_kernels.rows_apart import Check, parts_of
from torch import Tensor

from tests.interpreted import in_interpreter, in_parent, passes

CPU = torch.device("cpu")


@in_interpreter
@pytest.mark.parametrize("nth", range(8))
def test_kernels_treat_rows_apart_in_the_interpreter(nth: int) -> None:
    checks: Iterator[Check] = rows_apart.row_kernels(20, 40, device=CPU)
    if nth == 4:
        checks = rows_apart.attention((4, 2, 32), 40, CPU)
    elif nth == 5:
        checks = iter([rows_apart.latent(4, 72, 40, device=CPU)])
    elif nth == 6:
        checks = iter([rows_apart.per_head(2, 24, 40, 70, device=CPU)])
    elif nth == 7:
        checks = iter([rows_apart.delta((1, 2, 16, 16), 30, CPU)])
    (check,) = [check for n, check in enumerate(checks) if n == nth or nth > 3]
    assert check.differing() == []


@in_parent
def test_kernels_in_the_interpreter() -> None:
    passes(__file__, 8)


@in_parent
def test_a_kernel_that_looks_at_other_rows_is_found() -> None:
    x_TD = torch.arange(300.0)[:, None].expand(300, 4)

    def centred(part: slice) -> Tensor:
        return x_TD[part] - x_TD[part].mean(0)

    def many(part: slice) -> Tensor:
        return x_TD[part] + (len(x_TD[part]) > 128)

    parts = [part for part in parts_of(300) if part != slice(0, 300)]
    assert Check("centred", "", 300, centred).differing() == parts
    found = Check("many", "", 300, many).differing()
    assert found == [part for part in parts_of(300) if part.stop - part.start <= 128]
    assert Check("doubled", "", 300, lambda part: 2 * x_TD[part]).differing() == []


@in_parent
def test_an_ordered_product_has_one_slice_and_nothing_fused() -> None:
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16)
    shapes = [shape_of(4096, 4096, Kind(), 64, ordered=ordered) for ordered in (False, True)]
    assert [shape.splits for shape in shapes if shape] == [2, 1]
    assert SKINNY_LINEAR.fits(64, weight, normed=True)
    assert ORDERED_LINEAR.fits(64, weight)
    for kind in ("normed", "gated", "added"):
        assert not ORDERED_LINEAR.fits(64, weight, **{kind: True})


@in_parent
def test_the_library_has_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NO_WORKSPACE:
        monkeypatch.setenv(name, "another")
    without_workspace()
    assert {name: os.environ[name] for name in NO_WORKSPACE} == NO_WORKSPACE
