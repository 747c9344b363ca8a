"""Division, choice and compilation of the fp8 products of few rows in CuTe DSL, without a GPU.

Their results are checked in test_few_fp8_ptx.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nanovllm_kernels.fp8_reference import FP8, Scaled
from nanovllm_kernels.products import few_fp8_cute, quantise_cases
from nanovllm_kernels.products.dense_fp8 import FP8_LINEAR
from nanovllm_kernels.products.few_fp8_cute import (
    FEW_FP8,
    Kind,
    Shape,
    arguments,
    compiled_for,
    shape_of,
)

from nanovllm.layers.products import Fusion, first_that_fits, preference
from tests.kernels.compiled import compiled_with
from tests.kernels.products.test_block_fp8_cute import RESOURCES

LAYERS = [  # rows of W, inputs, blocks; then splits, KB, steps, and stages for 1, 8 and 16 rows
    ("8B qkv", 6144, 4096, 384, (4, 37, 8), [3, 3, 3]),
    ("8B o", 4096, 4096, 256, (4, 55, 8), [5, 5, 4]),
    ("8B gate_up", 24576, 4096, 384, (1, 74, 32), [4, 7, 7]),
    ("8B down", 4096, 12288, 256, (4, 55, 24), [3, 5, 4]),
    ("0.6B gate_up", 6144, 1024, 384, (4, 37, 2), [3, 3, 3]),
    ("0.6B down", 1024, 3072, 128, (8, 74, 3), [8, 7, 6]),
    ("R1 latents", 2112, 7168, 264, (8, 55, 7), [5, 5, 4]),
    ("R1 down", 7168, 18432, 224, (2, 74, 72), [7, 7, 6]),
    ("R1 gate_up", 36864, 7168, 576, (1, 44, 56), [4, 4, 3]),
    ("Qwen3-Next qkvz", 12288, 2048, 384, (2, 37, 8), [3, 3, 3]),
]


@pytest.mark.parametrize(
    ("lines", "width", "blocks", "division", "stages"),
    [layer[1:] for layer in LAYERS],
    ids=[layer[0] for layer in LAYERS],
)
def test_blocks_run_at_once_and_leave_memory_to_the_next_launch(
    lines: int, width: int, blocks: int, division: tuple, stages: list[int]
) -> None:
    """A multiprocessor has 228 KB of shared memory, and reserves 1 KB for each block."""
    shapes = [shape_of(lines, width, rows) for rows in (1, 8, 16)]
    assert [shape.stages for shape in shapes] == stages
    splits, room, steps = division
    assert {(shape.splits, shape.steps) for shape in shapes} == {(splits, steps)}
    assert (shapes[0].room, shapes[1].room) == (room, room)
    assert lines // 64 * splits == blocks and steps * splits * 128 == width
    for shape in shapes:
        assert 132 * (228 // (shape.room + 1)) >= blocks


def test_one_and_two_rows_are_quantised_by_each_block() -> None:
    assert [shape_of(4096, 4096, rows).own for rows in (1, 2, 3, 16)] == [True, True, False, False]
    assert [shape_of(4096, 4096, rows).rows for rows in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert not shape_of(36864, 7168, 1).own  # 56 KB of x do not fit
    assert shape_of(6144, 4096, 16).room == 44  # five blocks per multiprocessor


def test_what_cannot_be_divided() -> None:
    assert shape_of(96, 4096, 1) is None
    assert shape_of(4096, 4160, 1) is None
    assert shape_of(16384, 53248, 1) is None  # more steps than threads that load scales
    assert shape_of(64, 128, 16) == Shape(16, 1, 74, 1, own=False)
    assert [shape_of(64, 128, rows) for rows in (0, 17)] == [None, None]


def weight_of(lines: int, width: int, block_rows: int = 128) -> Scaled:
    scale = torch.ones(-(-lines // block_rows), width // 128)
    return Scaled(torch.zeros(lines, width, dtype=FP8), scale, block_rows)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Return the launches.

    Each is (own, kind, type of x, whether scales, residual and norm are given, size of y).
    """
    found: list[tuple[object, ...]] = []

    def compile_product(*of: object):
        def run(x, x_scale, weight, w_scale, y, residual, norm_weight, eps) -> None:
            given = [each is not None for each in (x_scale, residual, norm_weight)]
            found.append((Shape(*of[:5]).own, Kind(*of[5:]), x.dtype, *given, tuple(y.shape)))

        return run

    monkeypatch.setattr(few_fp8_cute, "compile_product", compile_product)
    monkeypatch.setattr(few_fp8_cute, "few_quantise", quantise_cases.few_reference)
    return found


def test_operands_of_a_launch(launched: list) -> None:
    weight, norm_D = weight_of(128, 256), torch.ones(256, dtype=torch.bfloat16)
    for rows in (2, 3):
        x_TD = torch.ones(rows, 256, dtype=torch.bfloat16)
        stream_TN = torch.ones(rows, 128, dtype=torch.bfloat16)
        assert FEW_FP8.linear(x_TD, weight).dtype == torch.bfloat16
        assert FEW_FP8.linear_add(x_TD, weight, stream_TN) is stream_TN
        FEW_FP8.norm_linear(x_TD, norm_D, 1e-6, weight, gated=True)
    plain, added, gated = Kind(), Kind(added=True), Kind(gated=True)
    normed, bf16 = Kind(normed=True, gated=True), torch.bfloat16
    assert launched == [
        (True, plain, bf16, False, False, False, (2, 128)),
        (True, added, bf16, False, True, False, (2, 128)),
        (True, normed, bf16, False, False, True, (2, 64)),
        (False, plain, FP8, True, False, False, (3, 128)),
        (False, added, FP8, True, True, False, (3, 128)),
        (False, gated, FP8, True, False, False, (3, 64)),
    ]


def test_other_weights_are_multiplied_with_quantised_rows() -> None:
    """With a weight that has no shape, the norm, the quantisation and the product are apart."""
    even, uneven, often_scaled = weight_of(128, 256), weight_of(96, 256), weight_of(128, 256, 64)
    assert [FEW_FP8.fits(rows, even) for rows in (1, 16, 17)] == [True, True, False]
    assert not FEW_FP8.fits(1, even._replace(weight_ND=torch.zeros(128, 256)))
    products = preference({"fp8_linear": FP8_LINEAR})
    fusions = Fusion(norm=True), Fusion(residual=True), Fusion(norm=True, gate=True)
    for weight, names in (
        (even, ["norm+skinny", "skinny+residual", "norm+skinny+gate"]),
        (uneven, ["fp8", "fp8+residual", "fp8"]),
        (often_scaled, ["fp8", "fp8+residual", "fp8"]),
    ):
        assert [first_that_fits(products, weight, each, 2).name for each in fusions] == names


def test_kernels_of_all_row_counts_are_compiled_early() -> None:
    kinds = compiled_for(weight_of(6144, 4096), Kind(normed=True, gated=True))
    assert {kind for kind, _ in kinds} == {
        (8, 4, 37, 8, True, True, True, False),
        (8, 4, 37, 8, False, False, True, False),
        (16, 4, 44, 8, False, False, True, False),
    }
    assert compiled_for(weight_of(6144, 4096, 64), Kind()) == set()


def test_nothing_is_kept_in_local_memory(tmp_path: Path) -> None:
    """No kernel spills registers or has a stack. The longest slice that a block quantises too."""
    kinds = [
        arguments(shape_of(*size), Kind(*kind))
        for size, kind in (
            ((24576, 4096, 1), (True, True, False)),
            ((4096, 12288, 2), (False, False, True)),
            ((6144, 4096, 1), (True, False, False)),
            ((24576, 4096, 16), (True, True, False)),
            ((1024, 3072, 16), (False, False, True)),
        )
    ]
    of = "few_fp8_cute.compile_product"
    lines = compiled_with("--keep-cubin", kinds, RESOURCES, tmp_path, of)
    assert len(lines) == len(kinds)
    for line in lines:
        registers, *memory = line.split()
        assert memory == ["STACK:0", "LOCAL:0"], line
        assert int(registers.removeprefix("REG:")) <= 128  # three blocks of 160 threads and more
