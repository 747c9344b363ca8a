"""Products of few rows with fp8 weights, without a GPU: how weights are cut, and that all of it
compiles.

What they compute is checked on a GPU only (check-kernels, tests/gpu).
"""

from __future__ import annotations

from tests.kernels.test_skinny_linear import printed

LAYERS = """
import torch
from nanovllm_kernels.fp8_reference import FP8, Scaled
from nanovllm_kernels.skinny_fp8_cute import SKINNY_FP8, Product, compile_product, cut_of, shape_of
for num_lines, width, kind, num_rows in (
    (6144, 4096, normed, 8),
    (4096, 12288, added, 16),
    (24576, 4096, gated, 1),
    (24576, 4096, gated, 32),
    (3072, 6144, added, 32),
):
    weight = Scaled(torch.empty(num_lines, width, dtype=FP8, device="meta"), None, 64)
    shape = shape_of(num_lines, width, kind, num_rows)
    product = Product(shape, kind, *cut_of(weight, shape))
    run = compile_product(*shape, *kind, *cut_of(weight, shape))
    print(*shape, product.stages, product.warps, callable(run))
"""
CHOICE = """
for num_lines, width, num_rows, block_rows in (
    (4096, 4096, 32, 128),
    (4096, 4096, 33, 128),
    (4096, 4096, 1, 8),
    (4096, 4096, 1, 4),  # fewer lines than a product has share a scale
    (4096, 4160, 1, 128),  # not whole blocks of inputs
    (4096, 4224, 1, 128),  # nor of both slices
    (5003, 4096, 1, 128),
):
    weight = Scaled(torch.empty(num_lines, width, dtype=FP8, device="meta"), None, block_rows)
    print(SKINNY_FP8.fits(num_rows, weight))
"""


def test_it_compiles_and_says_what_fits() -> None:
    """Lines, slices, alone on a multiprocessor, tiles of 8 rows; stages; warps that share them."""
    lines = printed(LAYERS + CHOICE)
    assert lines[:5] == [
        "96 2 False 1 7 7 True",
        "64 2 True 2 12 8 True",
        "96 1 False 1 7 4 True",
        "64 1 False 4 6 4 True",
        "32 4 False 4 8 4 True",
    ]
    assert lines[5:] == ["True", "False", "True", "False", "False", "False", "False"]
