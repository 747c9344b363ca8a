"""Products of up to 64 quantised rows with fp8 weights: division of work, and choice of a kernel.

Their results are checked in Triton's interpreter (few_fp8_cases.py, test_interpreted.py), and their
compilation in test_triton_compiles.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nanovllm_kernels.fp8_reference import FP8, Quantised, Scaled
from nanovllm_kernels.products import block_fp8_cute, dense_fp8, few_fp8
from nanovllm_kernels.products.few_fp8 import SHAPES, steps_of
from nanovllm_kernels.products.skinny_linear import Kind


@pytest.mark.parametrize(
    ("num_tiles", "num_blocks", "steps", "programs"),
    [
        (96, 32, 8, 384),  # QKV of an 8B model
        (64, 32, 6, 384),
        (64, 96, 16, 384),
        (33, 56, 5, 396),  # latents of queries and keys in R1
        (56, 128, 19, 392),
        (1, 3, 3, 1),
        (1, 9, 4, 3),
    ],
)
def test_programs_run_at_once(num_tiles, num_blocks, steps, programs) -> None:
    assert steps_of(num_tiles, num_blocks, 16, 3, 132) == steps
    assert num_tiles * -(-num_blocks // steps) == programs


@pytest.mark.parametrize(
    ("num_tiles", "rows", "steps", "most"),
    [
        (288, 16, 14, 9),  # R1's gate_up: 9 quarters, not 3 whole ones
        (288, 32, 56, 3),
        (288, 64, 56, 3),
        (192, 16, 28, 3),
    ],
)
def test_processors_have_nearly_the_same_to_do(num_tiles, rows, steps, most) -> None:
    assert steps_of(num_tiles, 56, rows, 3, 132) == steps
    assert -(-num_tiles * 56 // steps // 132) == most


@pytest.mark.parametrize(("rows", "steps"), [(16, 19), (32, 32), (64, 32)])
def test_parts_of_many_rows_are_not_cut_further(rows: int, steps: int) -> None:
    """The output projection of R1 has the given depth steps per program for each number of rows."""
    programs = few_fp8.shape_of(rows, 7168).programs
    assert steps_of(56, 128, rows, programs, 132) == steps


def test_few_tiles_have_more_loads_on_their_way() -> None:
    assert [few_fp8.shape_of(16, lines).stages for lines in (100, 4096, 4097)] == [4, 4, 3]
    assert [few_fp8.shape_of(64, lines).stages for lines in (4096, 24576)] == [5, 4]


def weight_of(num_features: int, width: int, block_rows: int = 128) -> Scaled:
    scale = torch.ones(-(-num_features // block_rows), -(-width // 128))
    return Scaled(torch.zeros(num_features, width, dtype=FP8), scale, block_rows)


def test_up_to_64_rows_are_for_the_kernel_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(few_fp8, "product", lambda x, *_, **more: asked.append((len(x), "few")))
    monkeypatch.setattr(dense_fp8, "block_fp8_linear", lambda x, *_: asked.append((len(x), "many")))
    weight = weight_of(16, 128)
    for rows in (0, 1, 64, 65):
        x8_TD = torch.zeros(rows, 128, dtype=FP8)
        dense_fp8.FP8_LINEAR.product(x8_TD, torch.ones(1, rows), *weight[:2], None, 128)
    assert asked == [(0, "many"), (1, "few"), (64, "few"), (65, "many")]
    assert max(SHAPES) == few_fp8.MOST_ROWS == 64


def test_products_gate_all_rows_that_are_not_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []

    def stand(name: str) -> Callable[..., object]:
        return lambda x, *_: asked.append((len(getattr(x, "values_XD", x)), name)) or x

    monkeypatch.setattr(few_fp8, "product", stand("few"))
    monkeypatch.setattr(dense_fp8, "silu_mul_quantise", stand("gate"))
    monkeypatch.setattr(dense_fp8, "block_fp8_gated", stand("gated"))
    weight = weight_of(256, 128)
    for rows in (0, 1, 64, 65, 256):
        x8 = Quantised(torch.zeros(rows, 128, dtype=FP8), torch.ones(1, rows))
        dense_fp8.FP8_LINEAR.gated(x8, weight)
    of_few = [(rows, name) for rows in (1, 64) for name in ("few", "gate")]
    assert asked == [(0, "gated"), *of_few, (65, "gated"), (256, "gated")]
    assert dense_fp8.TILED_FP8.gated is block_fp8_cute.block_fp8_gated


def test_tiles_of_many_rows_are_compiled_early() -> None:
    found = dense_fp8.compiled_for(weight_of(6144, 4096), Kind(normed=True), few=False)
    assert {arguments[-4:] for arguments, _ in found} == {(128, False, False, False)}
    assert (256, 128, 2, 128, False, False, False) in {arguments for arguments, _ in found}
    gated = dense_fp8.compiled_for(weight_of(6144, 4096, 64), Kind(normed=True, gated=True))
    assert {arguments for arguments, _ in gated} == {
        (*tile, 64, False, False, True) for tile in ((128, 256, 2), (64, 256, 1))
    }
    assert dense_fp8.compiled_for(weight_of(6144, 4096, 8), Kind()) == set()
