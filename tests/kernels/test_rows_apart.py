"""Checks that rows have the same bits with any others: what passes, and what they find."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from nanovllm_kernels import rows_apart
from nanovllm_kernels.experts.products import ALONE, FEW, FEW_EXPERTS, ORDERED_EXPERTS
from nanovllm_kernels.experts.route_reference import Chosen
from nanovllm_kernels.products.invariant import NO_WORKSPACE, without_workspace
from nanovllm_kernels.products.skinny_linear import ORDERED_LINEAR, SKINNY_LINEAR, Kind, shape_of
from nanovllm_kernels.rows_apart import Check, parts_of
from torch import Tensor

from tests.interpreted import in_interpreter, in_parent, passes
from tests.kernels.compiled import printed
from tests.kernels.test_triton_compiles import COMPILE

CPU = torch.device("cpu")
TILES = """
import re
from nanovllm_kernels.experts.products import ALONE, FEW, MANY, product_kernel, shape_of
types = dict(x_XD="*bf16", weight_END="*fp8e4nv", scale_EXX="*fp32", tile_expert_X="*i32",
             pair_of_X="*i32", starts_E1="*i32", tile_start_X="*i32", out_XN="*bf16")
absent = dict.fromkeys(("weights_TK", "shared_TD", "residual_TD"))
tables, found = dict.fromkeys(("pair_of_X", "starts_E1", "tile_start_X")), set()
for tile in (FEW, MANY) if {ordered} else (ALONE, FEW, MANY):
    shape = shape_of(tile, 1, ordered={ordered})
    ptx = compiled(product_kernel, types, shape.warps, types, N=768, D=2048, GATED=True, TOGETHER=1,
                   FEATURES=shape.weights // 2, TILE=tile, DEPTH=shape.depth, STAGES=shape.stages,
                   WAITS=False, **absent, **(tables if tile == ALONE else {{}}))
    found |= set(re.findall(r"wgmma(?=.mma)|mma.sync", ptx))
print(*found)
"""


@in_interpreter
@pytest.mark.parametrize("nth", range(10))
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
    elif nth == 8:
        checks = iter([rows_apart.deltas(132, 1100, (24,), CPU)])
    elif nth == 9:
        checks = iter([rows_apart.latents_of(20, CPU)])
    (check,) = [check for n, check in enumerate(checks) if n == nth or nth > 3]
    assert check.differing() == []


@in_parent
def test_kernels_in_the_interpreter() -> None:
    passes(__file__, 10)


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
def test_experts_in_fp8_multiply_by_one_kind_of_instruction() -> None:
    """Products by mma.sync and by wgmma add in other orders: 33 rows differed from 8,192."""
    assert instructions(ordered=True) == {"wgmma"}
    assert instructions(ordered=False) == {"wgmma", "mma.sync"}


def instructions(*, ordered: bool) -> set[str]:
    """Return the instructions of products with fp8 weights, over all numbers of tokens."""
    code = TILES.format(ordered=ordered)
    return set(printed(COMPILE + code)[-1].split())


@in_parent
def test_unsorted_pairs_have_a_tile_of_the_sorted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 tokens rounded one of 17,000 results otherwise than those of 16 and 128."""
    tiles = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *tensors, TILE, **_: tiles.append(TILE)

    monkeypatch.setattr("nanovllm_kernels.experts.products.product_kernel", Launch())
    x_TD, weight = torch.ones(3, 256).bfloat16(), torch.ones(17, 512, 256).to(torch.float8_e4m3fn)
    rows, scale = Chosen(torch.zeros(3, 5, dtype=torch.int32)), torch.ones(17, 4, 2)
    for products in (ORDERED_EXPERTS, FEW_EXPERTS):
        products.gate_up(x_TD, weight, scale, rows, 5)
        products.down(torch.ones(15, 256).bfloat16(), weight, scale, rows, 5)
    assert tiles == [FEW, FEW, ALONE, ALONE]


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
