"""Compilation of gated_linear's product from parts of the package quack.

This imports torch.compile, which takes 4 s. It is needed only in starts that do not find the
compiled product on disk.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, cute
from quack.epilogue.library import linear_act_mod
from quack.rounding import RoundingMode
from quack.tile_scheduler import TileSchedulerOptions

from nanovllm_kernels.compile_cache import Compiled
from nanovllm_kernels.like import compiled, like

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
HOPPER = 9


class Product:
    """Tiles of `rows` by `features`. Two form a cluster and share their common operand."""

    def __init__(self, dtype: Any, rows: int, features: int, is_tall: bool) -> None:  # noqa: ANN401
        epilogue = linear_act_mod(
            "swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False
        )
        self.of_pairs = epilogue._mint((), HOPPER, True, False, (), RoundingMode.RN, (), False)
        self.product = self.of_pairs(
            Float32,
            dtype,
            (rows, features),
            (2, 1, 1) if is_tall else (1, 2, 1),
            pingpong=True,
            is_persistent=True,
            gather_A=False,
            concat_layout=("B",),  # all gates, then all ups
        )

    @cute.jit
    def __call__(
        self,
        x_TD: cute.Tensor,
        weight_ND: cute.Tensor,
        y_TF: cute.Tensor,
        num_clusters: Int32,
        stream: CUstream,
    ) -> None:
        outputs = self.of_pairs.EpilogueArguments(mAuxOut=y_TF)
        schedule = TileSchedulerOptions(num_clusters)
        self.product(x_TD, weight_ND, None, None, outputs, schedule, None, stream, None, None)


def compile_product(dtype_name: str, rows: int, features: int, is_tall: bool) -> Compiled:
    """Compile the product for any sizes. Needs no GPU if CUTE_DSL_ARCH is set."""
    dtype, num_inputs = DTYPES[dtype_name], cute.sym_int()
    return compiled(
        Product(dtype, rows, features, is_tall),
        like(dtype, cute.sym_int(), num_inputs, divisibility=8),
        like(dtype, cute.sym_int(), num_inputs, divisibility=8),
        like(dtype, cute.sym_int(), cute.sym_int(divisibility=8), divisibility=8),
        Int32(1),
    )
