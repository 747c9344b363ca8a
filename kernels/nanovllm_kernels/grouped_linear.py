"""The products of routed experts for many rows: CuTe DSL products of the package quack.

Rows of an expert are found through the sorted pairs; gate and up of one element are in one thread,
which multiplies them. Tiles are handed out on the GPU, by the ranges that stand there: the host
knows the number of pairs alone, so a CUDA graph does not depend on the routing.

Decision: the library's product, as gated_linear's; it is compiled here and called directly. It
stores tiles by TMA, which can't scatter rows: both results are sorted as the rows are, and what
sums a token's experts up finds them.

Decision: with many rows gate and up are the Triton product's of experts.py. Of 8,192 tokens of
30B-A3B it takes 798 us, the library's, which gathers rows, 919 at best.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm_kernels import expert_cases, experts
from nanovllm_kernels.case import bits
from nanovllm_kernels.compile_cache import CachedCompile, Compiled, Job
from nanovllm_kernels.device import processors
from nanovllm_kernels.expert_cases import Routed
from nanovllm_kernels.experts_reference import ExpertProducts
from nanovllm_kernels.route_reference import ExpertRows

TileSizes = tuple[int, int, int, bool]  # grouped_product.Tile
GATE_UP_TILE: TileSizes = (64, 256, 1, True)  # of rows that are sorted in tiles of 64
# By the tile that rows are sorted in: an expert's last tile is half empty on average.
DOWN_TILES: dict[int, TileSizes] = {64: (64, 256, 1, True), 128: (128, 192, 1, True)}
MANY = 64  # rows of an expert, from which on the larger tile is used
LEAST_ROWS = 12  # of an expert: fewer are other kernels'


def tile(num_pairs: int, num_experts: int) -> int:
    """The tile for so many pairs of so many experts of this rank."""
    return 128 if num_pairs >= MANY * num_experts else 64


def fits(num_pairs: int, gate_up_E2FD: Tensor) -> bool:
    num_experts, num_lines, num_inputs = gate_up_E2FD.shape
    return (
        num_pairs > LEAST_ROWS * num_experts
        and gate_up_E2FD.dtype.itemsize == 2
        and num_lines % 16 == 0
        and num_inputs % 8 == 0
    )


def expert_gate_up(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    scale_EXX: Tensor | None,
    rows: ExpertRows,
    num_chosen: int,
) -> Tensor:
    """The gated sorted rows silu(gate) * up, y_XF; those of no expert of this rank are not
    written."""
    if rows.tile > GATE_UP_TILE[0]:
        return experts.expert_gate_up(x_TD, gate_up_E2FD, scale_EXX, rows, num_chosen)
    y_XF = x_TD.new_empty(len(rows.pair_of_X), gate_up_E2FD.shape[1] // 2)
    run = compile_gate_up(bits(x_TD.dtype), GATE_UP_TILE, num_chosen)
    run(x_TD, gate_up_E2FD, y_XF, rows.starts_E1, rows.pair_of_X, clusters(x_TD, GATE_UP_TILE))
    return y_XF


def expert_down(
    y_XF: Tensor, down_EDF: Tensor, scale_EXX: Tensor | None, rows: ExpertRows, num_chosen: int
) -> Tensor:
    """y_XD of sorted rows; rows of no expert of this rank are not written."""
    y_XD = y_XF.new_empty(len(y_XF), down_EDF.shape[1])
    sizes = DOWN_TILES[rows.tile]
    run = compile_down(bits(y_XF.dtype), sizes)
    run(y_XF, down_EDF, y_XD, rows.starts_E1, clusters(y_XF, sizes))
    return y_XD


def clusters(x: Tensor, sizes: TileSizes) -> int:
    """How many clusters of blocks run at once."""
    return processors(x.device) // sizes[2]


@CachedCompile
def compile_gate_up(dtype_name: str, sizes: TileSizes, num_chosen: int) -> Compiled:
    """Compiles the product for any sizes and so many experts a token.

    Its arguments: x, the weights, y, where experts start, the pairs, how many clusters run at once.
    """
    from nanovllm_kernels.grouped_product import compile_gate_up_product  # imports torch.compile

    return compile_gate_up_product(dtype_name, sizes, num_chosen)


@CachedCompile
def compile_down(dtype_name: str, sizes: TileSizes) -> Compiled:
    """Compiles the product for any sizes. Its arguments are gate_up's without the pairs."""
    from nanovllm_kernels.grouped_product import compile_down_product  # imports torch.compile

    return compile_down_product(dtype_name, sizes)


def jobs(gate_up_E2FD: Tensor, num_chosen: int) -> list[Job]:
    """What a model with such weights may need of the two above."""
    name = bits(gate_up_E2FD.dtype)
    downs = (compile_down.job(name, sizes) for sizes in DOWN_TILES.values())
    return [compile_gate_up.job(name, GATE_UP_TILE, num_chosen), *downs]


GROUPED = ExpertProducts(expert_gate_up, expert_down, tile, fits, "quack", jobs)
CHECKED = (
    Routed(1, 1, 1, 8, 8),
    Routed(9, 2, 3, 40, 72),
    Routed(300, 8, 33, 200, 136),  # nothing is a multiple of a tile
    Routed(300, 1, 5, 96, 64, kind="first"),  # one expert has everything
    Routed(200, 4, 64, 96, 128, kind="last"),
    Routed(256, 4, 16, 192, 256, first=4, num=5),
    Routed(256, 4, 16, 192, 256, first=4, num=5, kind="first"),  # this rank has nothing to do
    Routed(130, 6, 256, 64, 512),
)
TIMED = tuple(Routed(T, 8, 128, 768, 2048) for T in (256, 1024, 8192))
GATE_UP_64, DOWN_64 = expert_cases.kernels(
    "grouped_64", expert_gate_up, expert_down, 64, CHECKED, TIMED[:2]
)
_, DOWN = expert_cases.kernels("grouped", expert_gate_up, expert_down, 128, CHECKED, TIMED[1:])
