"""The products of routed experts for many rows: gate and up in Triton, and down of the package
quack, a CuTe DSL product.

Tiles are handed out on the GPU, by the ranges that stand there: the host knows the number of pairs
alone, so a CUDA graph does not depend on the routing.

Decision: the library's product for down, as gated_linear's; it is compiled here and called
directly. It stores tiles by TMA, which can't scatter rows: both results are sorted as the rows are,
and what sums a token's experts up finds them. With 160 rows an expert tiles of 192 take 425 us
instead of 481, if pairs of blocks share rows; with 512 they take 378 instead of 355.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm_kernels import expert_cases
from nanovllm_kernels.case import bits
from nanovllm_kernels.compile_cache import CachedCompile, Compiled, Job
from nanovllm_kernels.device import processors
from nanovllm_kernels.expert_cases import MoECase
from nanovllm_kernels.experts_reference import ExpertProducts
from nanovllm_kernels.gated_experts import expert_gate_up
from nanovllm_kernels.route_reference import ExpertRows

TileSizes = tuple[int, int, int, bool]  # grouped_product.Tile
SMALL, LARGE = 64, 192  # tiles that rows are sorted in
MANY = 64  # rows of an expert, from which on the larger one is used
# By the rows of an expert that the next begins with: its last tile is half empty on average.
DOWN_TILES: dict[int, TileSizes] = {
    MANY: (64, 256, 1, True),
    112: (128, 192, 1, True),
    256: (192, 128, 2, True),
    1 << 30: (128, 192, 1, True),
}
LEAST_ROWS = 12  # of an expert: fewer are other kernels'


def tile(num_pairs: int, num_experts: int) -> int:
    """The tile for so many pairs of so many experts of this rank."""
    return LARGE if num_pairs >= MANY * num_experts else SMALL


def fits(num_pairs: int, gate_up_E2FD: Tensor) -> bool:
    num_experts, num_features, num_inputs = gate_up_E2FD.shape
    return (
        num_pairs > LEAST_ROWS * num_experts
        and gate_up_E2FD.dtype.itemsize == 2
        and num_features % 16 == num_inputs % 8 == 0
        and num_pairs * num_inputs < 2**31  # gate and up find an input by 32 bits
    )


def expert_down(
    y_XF: Tensor, down_EDF: Tensor, scale_EXX: Tensor | None, rows: ExpertRows, num_chosen: int
) -> Tensor:
    """y_XD of sorted rows; rows of no expert of this rank are not written."""
    y_XD = y_XF.new_empty(len(y_XF), down_EDF.shape[1])
    sizes = down_tile(len(y_XF) // len(down_EDF))
    run = compile_down(bits(y_XF.dtype), sizes)
    run(y_XF, down_EDF, y_XD, rows.starts_E1, processors(y_XF.device) // sizes[2])
    return y_XD


def down_tile(num_rows: int) -> TileSizes:
    """The tile for so many rows an expert, as if all pairs were this rank's."""
    return next(sizes for end, sizes in DOWN_TILES.items() if num_rows < end)


@CachedCompile
def compile_down(dtype_name: str, sizes: TileSizes) -> Compiled:
    """Compiles the product for any sizes.

    Its arguments: y, the weights, the result, where experts start, how many clusters of blocks run
    at once.
    """
    from nanovllm_kernels.grouped_product import compile_down_product  # imports torch.compile

    return compile_down_product(dtype_name, sizes)


def jobs(gate_up_E2FD: Tensor, num_chosen: int) -> list[Job]:
    """What a model with such weights may need of it."""
    name = bits(gate_up_E2FD.dtype)
    return [compile_down.job(name, sizes) for sizes in {*DOWN_TILES.values()}]


GROUPED = ExpertProducts(expert_gate_up, expert_down, tile, fits, "quack", jobs)
CHECKED = (
    MoECase(1, 1, 1, 8, 8),
    MoECase(9, 2, 3, 40, 72),
    MoECase(300, 8, 33, 200, 136),  # nothing is a multiple of a tile
    MoECase(300, 1, 5, 96, 64, kind="first"),  # one expert has everything
    MoECase(200, 4, 64, 96, 128, kind="last"),
    MoECase(256, 4, 16, 192, 256, first=4, num=5),
    MoECase(256, 4, 16, 192, 256, first=4, num=5, kind="first"),  # this rank has nothing to do
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
