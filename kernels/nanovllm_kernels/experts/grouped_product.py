"""Compilation of grouped_linear's product from parts of the package quack.

This imports torch.compile, which takes 4 s. It is needed only in starts that do not find the
compiled product on disk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute
from quack.gemm_default_epi import GemmDefaultSm90
from quack.tile_scheduler import TileSchedulerOptions
from quack.varlen_utils import VarlenArguments

from nanovllm_kernels.compile_cache import Compiled
from nanovllm_kernels.like import compiled, like
from nanovllm_kernels.products.gated_product import DTYPES


class Tile(NamedTuple):
    """Tile of a thread block, and the number of blocks in a cluster, which share rows."""

    rows: int
    features: int
    cluster: int
    pingpong: bool  # two tiles at a time, one per warp group; otherwise both groups share a tile


class Down:
    """GEMM of rows sorted by expert with the expert's down weight.

    It is launched after the preceding kernel ends, since some of its warps read the row ranges
    without waiting for that kernel.
    """

    def __init__(self, dtype: Any, tile: Tile) -> None:  # noqa: ANN401
        self.product = GemmDefaultSm90(
            Float32,
            dtype,
            (tile.rows, tile.features),
            (1, tile.cluster, 1),
            pingpong=tile.pingpong,
            is_persistent=True,
            use_pdl=False,
            gather_A=False,
        )

    @cute.jit
    def __call__(
        self,
        y_XF: cute.Tensor,
        down_EDF: cute.Tensor,
        y_XD: cute.Tensor,
        starts_E1: cute.Tensor,
        num_clusters: Int32,
        stream: CUstream,
    ) -> None:
        ranges = VarlenArguments(mCuSeqlensM=starts_E1)
        nothing = GemmDefaultSm90.EpilogueArguments()
        schedule = TileSchedulerOptions(num_clusters)
        self.product(y_XF, down_EDF, y_XD, None, nothing, schedule, ranges, stream, None, None)


def compile_down_product(dtype_name: str, tile: tuple[int, int, int, bool]) -> Compiled:
    """Compile the product for any sizes. Needs no GPU."""
    dtype, num_inputs = DTYPES[dtype_name], cute.sym_int(divisibility=8)
    return compiled(
        Down(dtype, Tile(*tile)),
        like(dtype, cute.sym_int(), num_inputs, divisibility=8),
        like(dtype, cute.sym_int(), cute.sym_int(divisibility=8), num_inputs, divisibility=8),
        like(dtype, cute.sym_int(), cute.sym_int(divisibility=8), divisibility=8),
        like(Int32, cute.sym_int()),
        Int32(1),
    )
