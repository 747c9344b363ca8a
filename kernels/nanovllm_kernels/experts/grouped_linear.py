"""Grouped GEMMs of routed experts for many rows: gate and up in Triton, down in CuTe DSL by quack.

Tiles are scheduled on the GPU from the experts' row ranges. The host uses only the number of pairs,
so a CUDA graph does not depend on the routing.

Decision: the library's GEMM for down, as in gated_linear. It is compiled here and called directly.
It stores tiles by TMA, which cannot scatter rows. Therefore both results are in sorted order, and
the combine step gathers a token's rows. With 160 rows per expert, tiles of 192 take 425 us instead
of 481 if pairs of blocks share rows. With 512 rows they take 378 instead of 355.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm_kernels.case import bits
from nanovllm_kernels.compile_cache import CachedCompile, Compiled, Job
from nanovllm_kernels.device import processors
from nanovllm_kernels.experts import cases as expert_cases
from nanovllm_kernels.experts.cases import MoECase
from nanovllm_kernels.experts.gated_experts import expert_gate_up
from nanovllm_kernels.experts.reference import ExpertProducts
from nanovllm_kernels.experts.route_reference import ExpertRows

TileSizes = tuple[int, int, int, bool]  # fields of grouped_product.Tile
SMALL, LARGE = 64, 192  # tile sizes by which rows are sorted
MANY = 64  # minimum rows per expert for the larger one
# By upper bound of rows per expert. An expert's last tile is half empty on average.
DOWN_TILES: dict[int, TileSizes] = {
    MANY: (64, 256, 1, True),
    112: (128, 192, 1, True),
    256: (192, 128, 2, True),
    1 << 30: (128, 192, 1, True),
}
LEAST_ROWS = 12  # per expert; other kernels take fewer


def tile(num_pairs: int, num_experts: int) -> int:
    """Return the tile size for `num_pairs` pairs of `num_experts` experts of this rank."""
    return LARGE if num_pairs >= MANY * num_experts else SMALL


def fits(num_pairs: int, gate_up_E2FD: Tensor) -> bool:
    num_experts, num_features, num_inputs = gate_up_E2FD.shape
    return (
        num_pairs > LEAST_ROWS * num_experts
        and gate_up_E2FD.dtype.itemsize == 2
        and num_features % 16 == num_inputs % 8 == 0
        and num_pairs * num_inputs < 2**31  # gate and up use 32-bit offsets into x
    )


def expert_down(
    y_XF: Tensor, down_EDF: Tensor, scale_EXX: Tensor | None, rows: ExpertRows, num_chosen: int
) -> Tensor:
    """Return y_XD of sorted rows. Rows without an expert of this rank are not written."""
    y_XD = y_XF.new_empty(len(y_XF), down_EDF.shape[1])
    sizes = down_tile(len(y_XF) // len(down_EDF))
    run = compile_down(bits(y_XF.dtype), sizes)
    run(y_XF, down_EDF, y_XD, rows.starts_E1, processors(y_XF.device) // sizes[2])
    return y_XD


def down_tile(num_rows: int) -> TileSizes:
    """Return the tile for `num_rows` rows per expert, assuming that all pairs are this rank's."""
    return next(sizes for end, sizes in DOWN_TILES.items() if num_rows < end)


@CachedCompile
def compile_down(dtype_name: str, sizes: TileSizes) -> Compiled:
    """Compile the product for any sizes.

    The arguments of the result are y, the weights, the output, and the first row of each expert.
    The last is the number of clusters that run at once.
    """
    from nanovllm_kernels.experts.grouped_product import (
        compile_down_product,
    )  # imports torch.compile

    return compile_down_product(dtype_name, sizes)


def jobs(gate_up_E2FD: Tensor, num_chosen: int) -> list[Job]:
    """Return the compile jobs that a model with such weights may need."""
    name = bits(gate_up_E2FD.dtype)
    return [compile_down.job(name, sizes) for sizes in {*DOWN_TILES.values()}]


GROUPED = ExpertProducts(expert_gate_up, expert_down, tile, fits, "quack", jobs)
CHECKED = (
    MoECase(1, 1, 1, 8, 8),
    MoECase(9, 2, 3, 40, 72),
    MoECase(300, 8, 33, 200, 136),  # no size is a multiple of a tile
    MoECase(300, 1, 5, 96, 64, kind="first"),  # one expert has all rows
    MoECase(200, 4, 64, 96, 128, kind="last"),
    MoECase(256, 4, 16, 192, 256, first=4, num=5),
    MoECase(256, 4, 16, 192, 256, first=4, num=5, kind="first"),  # this rank has no rows
    MoECase(130, 6, 256, 64, 512),
)
INTERPRETED = tuple(MoECase(T, 2, 3, 40, 72, *of) for T, of in ((10, ()), (90, (1, 2)), (230, ())))
TIMED = tuple(
    MoECase(T, *sizes)
    for sizes in ((8, 128, 768, 2048), (10, 512, 512, 2048))
    for T in (256, 1024, 8192)
)
PRODUCTS = expert_gate_up, expert_down
GROUPED_64_GATE_UP, _ = expert_cases.kernels(
    "grouped_64", *PRODUCTS, SMALL, CHECKED[4:], TIMED[:2], small=INTERPRETED[:1]
)
GROUPED_GATE_UP, _ = expert_cases.kernels(
    "grouped", *PRODUCTS, LARGE, CHECKED, TIMED, small=INTERPRETED
)
_, GROUPED_DOWN = expert_cases.kernels("grouped", *PRODUCTS, LARGE, CHECKED, TIMED)
