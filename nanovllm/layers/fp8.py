"""Block fp8: e4m3 weights with one scale per 128 x 128 block, and their products.

A model is first built unquantised, block by block, on the meta device. Then the weights that its
quantization config covers change their type and get scales. Only the result is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import gcd
from typing import Any, TypeVar

import torch
from msgspec import Struct
from nanovllm_kernels.fp8_reference import (
    BLOCK,
    FP8,
    ROWS_UNIT,
    WIDTH_UNIT,
    Scaled,
    quantise_weight,
)
from torch import Tensor, nn

from nanovllm.config import ConfigError
from nanovllm.layers.linear import AddLinear, Layer, Linear, NormLinear, Placement
from nanovllm.layers.ops import Ops
from nanovllm.layers.products import Dequantised, Fusion
from nanovllm.parallel.mesh import Span

SUPPORTED: dict[str, tuple[Any, ...]] = {  # values of quantization_config
    "quant_method": ("fp8",),
    "weight_block_size": ((BLOCK, BLOCK),),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
}
COPIED = 64 * BLOCK  # rows that are quantised at a time, in float32

Made = TypeVar("Made", bound=nn.Module)


class BlockFp8(Struct, frozen=True):
    """The used fields of quantization_config.

    All products of the blocks are quantised except routers and the modules listed here. An entry is
    a module's full dotted name in the checkpoint, `model.layers.0.mlp.down_proj`, or its first or
    last names: `model.layers.0` or `mlp.down_proj`.
    """

    quant_method: str | None = None
    weight_block_size: tuple[int, ...] | None = None
    fmt: str = "e4m3"
    activation_scheme: str = "dynamic"
    modules_to_not_convert: frozenset[str] | None = None
    ignored_layers: frozenset[str] | None = None  # another name of modules_to_not_convert

    @property
    def kept(self) -> frozenset[str]:
        return (self.modules_to_not_convert or frozenset()) | (self.ignored_layers or frozenset())

    def keeps(self, module: str) -> bool:
        """Return True if an entry covers the module with this full dotted name."""
        names = module.split(".")
        firsts = (".".join(names[: n + 1]) for n in range(len(names)))
        lasts = (".".join(names[n:]) for n in range(len(names)))
        return not self.kept.isdisjoint({*firsts, *lasts})

    def __post_init__(self) -> None:
        for name, values in SUPPORTED.items():
            if (value := getattr(self, name)) not in values:
                only = " or ".join(map(json.dumps, values))
                raise ValueError(f"{name} is {json.dumps(value)}; only {only} is supported")


def blocks(
    make: Callable[[int], Layer],
    count: int,
    rules: Iterable[tuple[str, ...]],
    quantised: BlockFp8 | None,
) -> Iterator[Layer]:
    """Yield the model's blocks with the types of the checkpoint. `rules`: the model's WEIGHTS.

    Besides products, a block may have modules with a method `to_fp8`, such as experts.
    """
    if quantised is None:
        yield from (make(layer) for layer in range(count))
        return
    for layer in range(count):

        def is_quantised(path: str, module: nn.Module, layer: int = layer) -> bool:
            names = checkpoint_modules(f"layers.{layer}.{path}", layer, rules)
            can_change = isinstance(module, NormLinear | AddLinear) or hasattr(module, "to_fp8")
            return can_change and bool(names) and not is_kept(names, quantised)

        yield in_fp8(partial(make, layer), is_quantised)


def in_fp8(make: Callable[[], Made], is_quantised: Callable[[str, nn.Module], bool]) -> Made:
    """Return the module that `make` returns, with those of its parts in fp8 that are quantised.

    `is_quantised` takes the path and the module of each part.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        whole = make()
    parts = dict(whole.named_modules())
    kept = {path for path, part in parts.items() if not is_quantised(path, part)}
    changed = [(path, part) for path, part in parts.items() if path not in kept]
    for _, part in changed:
        change: Callable[[], None] = getattr(part, "to_fp8", partial(to_fp8, part))
        change()
    whole.to_empty(device=device)
    for path, part in changed:
        if isinstance(part, NormLinear):
            next_product = f"{path.rpartition('.')[0]}.down"
            part.set_tables(quantised=next_product not in kept)
        elif isinstance(part, Linear):
            part.set_tables()
    return whole


def has_whole_blocks(_: str, module: nn.Module) -> bool:
    """Return True for a product that ranks cut between fp8 blocks, and that the kernels support."""
    if not isinstance(module, Linear):
        return False
    placement, (num_rows, width) = module.placements["weight"], module.weight.shape
    ends = [(span.start, span.start + span.count, span.full) for _, span in placement.parts]
    is_cut_inside = any(start % BLOCK or (end % BLOCK and end < full) for start, end, full in ends)
    is_whole = block_rows_of(placement) == BLOCK and not is_cut_inside
    return is_whole and num_rows > 0 and not (num_rows % ROWS_UNIT or width % WIDTH_UNIT)


def checkpoint_modules(path: str, layer: int, rules: Iterable[tuple[str, ...]]) -> set[str]:
    """Return the checkpoint's names of the weights in a module, without norms.

    Experts are represented by the first.
    """
    own = [rule[0] for rule in rules if rule[1].format(layer).rpartition(".")[0] == path]
    products = [name for name in own if name.endswith(".weight") and "norm." not in name]
    return {name.format(layer, 0)[:-7] for name in products}


def is_kept(names: set[str], quantised: BlockFp8) -> bool:
    """Return True if a module is not quantised. Raise ConfigError if only a part is."""
    kept_names = set(filter(quantised.keeps, names))
    if kept_names and kept_names != names:
        raise ConfigError(
            f"quantization_config.modules_to_not_convert has {min(kept_names)} without "
            f"{min(names - kept_names)}, which is multiplied together with it"
        )
    return bool(kept_names)


def to_fp8(linear: Linear) -> None:
    """Change the type of a weight whose storage is not allocated yet, and add its scales."""
    placement = linear.placements["weight"]
    block_rows = block_rows_of(placement)
    num_rows, width = linear.weight.shape
    linear.block_rows = block_rows
    linear.weight = fp8_parameter(num_rows, width, dtype=FP8)
    linear.weight_scale = fp8_parameter(
        -(-num_rows // block_rows), -(-width // BLOCK), dtype=torch.float32
    )
    each = BLOCK if placement.dim else block_rows
    parts = tuple((name, in_blocks(span, each)) for name, span in placement.parts)
    linear.placements["weight_scale"] = Placement(placement.dim, parts)


def fp8_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class Fp8Copy(Layer):
    """Block fp8 copy of the weight of `source`, which keeps its own.

    The copy is made when the source is loaded. Its tensors are buffers, since no tensor of a
    checkpoint fills them. Blocks start at the first row of this rank's share.
    """

    def __init__(self, source: Linear) -> None:
        super().__init__()
        self._source = (source,)  # in a tuple, so that it is no submodule
        self.dtype = source.dtype
        weight = empty_copy(source.weight.shape, source.dtype)
        self.register_buffer("weight", weight.weight_ND, persistent=False)
        self.register_buffer("weight_scale", weight.scale, persistent=False)
        self.by_rows = source.ops.by_rows(weight, Fusion())

    @property
    def operand(self) -> Scaled:
        weight, scale = self._buffers["weight"], self._buffers["weight_scale"]
        assert weight is not None and scale is not None
        return Scaled(weight, scale, rows_dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.buffers())

    def after_load(self) -> None:
        """Quantise the rows of the source."""
        weight_ND, scale, *_ = self.operand
        for at in range(0, len(weight_ND), COPIED):
            numbers, scales = quantise_weight(self._source[0].weight[at : at + COPIED])
            weight_ND[at : at + COPIED] = numbers
            scale[at // BLOCK : at // BLOCK + len(scales)] = scales

    def product(self, x_TD: Tensor) -> Tensor:
        """Return y_TN for this rank's output features."""
        y_TN: Tensor = self.by_rows[len(x_TD)].run(x_TD, self.operand)
        return y_TN


def empty_copy(shape: tuple[int, ...], dtype: torch.dtype) -> Scaled:
    """Return an uninitialised weight in block fp8 for rows of `dtype`, on the default device."""
    blocks = [-(-size // BLOCK) for size in shape]
    weight_ND, scale = torch.empty(shape, dtype=FP8), torch.empty(blocks, dtype=torch.float32)
    return Scaled(weight_ND, scale, rows_dtype=dtype)


def has_kernel(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Return True if a kernel multiplies rows of `dtype` with a block fp8 weight of this shape."""
    with torch.device("meta"):
        weight = empty_copy(shape, dtype)
    return ops.by_rows(weight, Fusion())[1].name != Dequantised.name


def block_rows_of(placement: Placement) -> int:
    """Return the rows per scale: 128, or fewer if a part or share starts inside a block."""
    num_rows, at = BLOCK, 0
    for _, span in placement.parts if placement.dim == 0 else ():
        num_rows, at = gcd(num_rows, at, span.start), at + span.count
    return num_rows


def in_blocks(span: Span, each: int) -> Span:
    """Return the same cut in units of blocks. Raise ConfigError if it starts inside a block."""
    if span.start % each:
        raise ConfigError(
            f"parallel.tp cuts {span.full} inputs of block fp8 at {span.start}, not at a multiple "
            f"of {each}"
        )
    return Span(-(-span.full // each), span.start // each, -(-span.count // each))
