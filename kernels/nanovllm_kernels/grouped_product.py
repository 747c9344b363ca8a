"""Compiles grouped_linear's products out of parts of the package quack.

Imports torch.compile with them, for 4 s: for starts that do not find the products on disk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute
from quack.epilogue.library import linear_act_mod
from quack.gemm_default_epi import GemmDefaultSm90
from quack.rounding import RoundingMode
from quack.tile_scheduler import TileSchedulerOptions
from quack.varlen_utils import VarlenArguments

from nanovllm_kernels.compile_cache import Compiled
from nanovllm_kernels.gated_product import DTYPES, HOPPER
from nanovllm_kernels.like import like


class Tile(NamedTuple):
    """What a block computes at once, and how many blocks of rows share weights."""

    rows: int
    lines: int
    cluster: int
    pingpong: bool  # two tiles at a time, of one warp group each; else one tile of both

    def of(self, product: Any, dtype: Any, **kind: Any) -> Any:  # noqa: ANN401
        """The library's product with this tile.

        It is not launched before the kernel ahead of it ends: some of its warps read the rows'
        ranges without waiting for that.
        """
        return product(
            Float32,
            dtype,
            (self.rows, self.lines),
            (self.cluster, 1, 1),
            pingpong=self.pingpong,
            is_persistent=True,
            use_pdl=False,
            **kind,
        )


class GateUp:
    """Rows of tokens, found through their pairs, times gate and up of their expert."""

    def __init__(self, dtype: Any, tile: Tile, num_chosen: int) -> None:  # noqa: ANN401
        epilogue = linear_act_mod(
            "swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False
        )
        self.of_pairs = epilogue._mint((), HOPPER, True, False, (), RoundingMode.RN, (), False)
        self.product = tile.of(self.of_pairs, dtype, gather_A=True, concat_layout=("B",))
        self.num_chosen = num_chosen

    @cute.jit
    def __call__(
        self,
        x_TD: cute.Tensor,
        gate_up_EXD: cute.Tensor,
        y_XF: cute.Tensor,
        starts_E1: cute.Tensor,
        pair_of_X: cute.Tensor,
        num_clusters: Int32,
        stream: CUstream,
    ) -> None:
        num_tokens, num_inputs = x_TD.shape
        # A pair (t, k) is row t: a matrix of T*K rows, of which K lie in one place.
        layout = cute.make_layout(
            ((self.num_chosen, num_tokens), num_inputs),
            stride=((0, x_TD.stride[0]), x_TD.stride[1]),
        )
        of_pairs = cute.make_tensor(x_TD.iterator, layout)
        ranges = VarlenArguments(mCuSeqlensM=starts_E1, mAIdx=pair_of_X)
        outputs = self.of_pairs.EpilogueArguments(mAuxOut=y_XF)
        schedule = TileSchedulerOptions(num_clusters)
        self.product(
            of_pairs, gate_up_EXD, None, None, outputs, schedule, ranges, stream, None, None
        )


class Down:
    """Rows sorted by expert, times down of their expert."""

    def __init__(self, dtype: Any, tile: Tile) -> None:  # noqa: ANN401
        self.product = tile.of(GemmDefaultSm90, dtype, gather_A=False)

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


def compile_gate_up_product(
    dtype_name: str, tile: tuple[int, int, int, bool], num_chosen: int
) -> Compiled:
    """Compiles the product for any sizes and so many experts a token. Needs no GPU."""
    dtype, num_inputs = DTYPES[dtype_name], cute.sym_int(divisibility=8)
    compiled: Compiled = cute.compile(
        GateUp(dtype, Tile(*tile), num_chosen),
        like(dtype, cute.sym_int(), num_inputs, divisibility=8),
        like(dtype, cute.sym_int(), cute.sym_int(divisibility=16), num_inputs, divisibility=8),
        like(dtype, cute.sym_int(), cute.sym_int(divisibility=8), divisibility=8),
        like(Int32, cute.sym_int()),
        like(Int32, cute.sym_int()),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
    return compiled


def compile_down_product(dtype_name: str, tile: tuple[int, int, int, bool]) -> Compiled:
    """Compiles the product for any sizes. Needs no GPU."""
    dtype, num_inputs = DTYPES[dtype_name], cute.sym_int(divisibility=8)
    compiled: Compiled = cute.compile(
        Down(dtype, Tile(*tile)),
        like(dtype, cute.sym_int(), num_inputs, divisibility=8),
        like(dtype, cute.sym_int(), cute.sym_int(divisibility=8), num_inputs, divisibility=8),
        like(dtype, cute.sym_int(), cute.sym_int(divisibility=8), divisibility=8),
        like(Int32, cute.sym_int()),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
    return compiled
