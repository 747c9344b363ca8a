"""Products of few rows in CuTe DSL without a GPU: division of the weights, and compilation.

Their results are checked on a GPU only (check-kernels, tests/gpu).
"""

from __future__ import annotations

import pytest

from tests.kernels.compiled import printed

CODE = """
import torch
from nanovllm_kernels.products.skinny_linear import SKINNY_LINEAR, Kind, Product
from nanovllm_kernels.products.skinny_linear import compile_product, shape_of
plain, added, normed, gated = Kind(), Kind(added=True), Kind(True), Kind(True, True)
"""
LAYERS = """
for num_features, width, kind, num_rows in (
    (4096, 1024, normed, 64),
    (1024, 2048, added, 64),
    (6144, 1024, gated, 64),
    (6144, 4096, normed, 128),
    (4096, 12288, added, 64),
    (24576, 4096, gated, 64),
    (24576, 4096, gated, 128),
    (151936, 4096, plain, 64),
    (12352, 2048, normed, 64),
    (2560, 5120, normed, 64),
    (12800, 5120, gated, 64),
    (12800, 5120, gated, 128),
    (25600, 5120, gated, 64),
    (34816, 5120, gated, 64),
    (16480, 5120, normed, 64),
):
    shape = shape_of(num_features, width, kind, num_rows)
    stages = Product(shape, kind).stages
    run = compile_product(*shape, *kind)
    blocks = -(-num_features // shape.features) * shape.splits
    print(*shape, stages, blocks, callable(run))
"""
CHOICE = """
for num_features, width, num_rows, kind in (
    (4096, 1024, 64, {}),
    (4096, 1024, 65, {}),  # the library is faster, the weights are few
    (4096, 4096, 128, {"added": True}),
    (4096, 4096, 129, {"added": True}),
    (151936, 4096, 64, {}),
    (151936, 4096, 65, {}),  # in many waves, with little room
    (4096, 1056, 1, {}),  # not whole steps of both slices
    (5003, 1024, 1, {}),
    (1152, 1024, 1, {"normed": True}),  # 64 or 144 blocks
    (3072, 1024, 1, {"normed": True, "gated": True}),  # 128 blocks, each with a share of 12
    (2048, 1024, 1, {"normed": True, "gated": True}),
    (3088, 2048, 64, {"normed": True}),  # 32 blocks of 96 and one of 16, in four slices
    (8240, 5120, 64, {"normed": True}),  # 128 blocks of 64 and one of 48
    (8240, 5120, 65, {"normed": True}),
    (8236, 5120, 1, {"normed": True}),  # a row of the result does not begin at 16 bytes
    (8240, 5120, 1, {"normed": True, "gated": True}),  # both halves would have a partial block
):
    weight = torch.empty(num_features, width, dtype=torch.bfloat16, device="meta")
    fits = (SKINNY_LINEAR.fits(num_rows, of, **kind) for of in (weight, weight.half()))
    print(*fits)
"""


def said(code: str) -> list[str]:
    return printed(CODE + code, QUACK_CACHE_ENABLED="0")


def test_it_compiles_for_the_layers_of_published_models() -> None:
    """The shapes of all layers are as expected, and their kernels compile.

    A shape is weight rows, slices, blocks per multiprocessor, groups, stages and blocks. On 132
    multiprocessors, one or two blocks run at once on each. Eight features per block and slice
    cannot divide weights of Qwen3-32B on four GPUs and on two. The last two are of Qwen3.5-27B:
    stored in 8 bytes, and with a partial last block. So is the one of 12,352 rows.
    """
    assert said(LAYERS) == [
        "64 2 2 1 5 128 True",
        "32 4 2 1 7 128 True",
        "96 2 2 1 4 128 True",
        "96 2 1 2 5 128 True",
        "64 2 1 1 12 128 True",
        "96 1 2 1 5 256 True",
        "192 1 1 2 5 128 True",
        "128 1 2 1 4 1187 True",
        "96 1 2 1 5 129 True",
        "80 4 2 1 4 128 True",
        "100 1 1 1 10 128 True",
        "100 1 1 2 7 128 True",
        "100 1 2 1 5 256 True",
        "136 1 2 1 4 256 True",
        "128 1 1 1 9 129 True",
    ]


def test_what_fits() -> None:
    found = [line.split() for line in said(CHOICE)]
    assert [fits for fits, _ in found] == [
        *("True", "False", "True", "False", "True"),
        *("False", "False", "False", "False", "True", "True"),
        *("True", "True", "False", "False", "False"),
    ]
    assert {of_other_dtype for _, of_other_dtype in found} == {"False"}


def test_a_share_of_eight_features_is_preferred() -> None:
    """A share of two is used only for weights that shares of eight do not divide evenly.

    A share is the part of a cluster's features that one block finishes.
    """
    code = """
for num_features, width, kind in (
    (4096, 1024, normed), (4096, 12288, added), (6144, 1024, gated), (24576, 4096, gated),
    (151936, 4096, plain), (12352, 2048, normed), (2560, 5120, normed), (12800, 5120, gated),
):
    product = Product(shape_of(num_features, width, kind, 1), kind)
    print(product.share, product.vector, product.pitch, product.columns, product.padded)
"""
    assert said(code) == [
        "32 8 64 64 40",
        "32 8 64 64 40",
        "24 8 48 96 56",
        "48 8 48 96 104",
        "128 8 128 128 136",
        "96 8 96 96 104",
        "20 4 80 80 24",
        "50 2 56 112 104",
    ]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_layers_of_larger_models_fit(tp_size: int) -> None:
    """All layers of DeepSeek-R1-Distill-Llama 70B have a shape, also on two and four ranks."""
    code = f"""
tp = {tp_size}
layers = [
    (10240 // tp, 8192, Kind(True)),
    (8192, 8192 // tp, Kind(added=True)),
    (57344 // tp, 8192, Kind(True, True)),
    (8192, 28672 // tp, Kind(added=True)),
]
for num_features, width, kind in layers:
    shape = shape_of(num_features, width, kind, 32)
    print(shape and num_features % shape.features == 0 and width % (64 * shape.splits) == 0)
"""
    assert said(code) == ["True"] * 4
