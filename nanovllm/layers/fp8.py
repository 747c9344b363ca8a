"""Block fp8: which weights are e4m3 with a scale for each 128 x 128, and how they are multiplied.

A model is built as if it were not quantised, block by block and of shapes alone; then the weights
that its quantization names change their type and get scales, and only that is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import gcd
from typing import Literal

import torch
import torch.nn.functional as F
from msgspec import Struct
from nanovllm_kernels.fp8_reference import BLOCK, FP8, Scaled
from torch import Tensor, nn

from nanovllm.config import ConfigError
from nanovllm.layers.linear import AddLinear, Layer, Linear, NormLinear, Placement
from nanovllm.layers.ops import Implementation, Ops
from nanovllm.parallel.mesh import Span


class BlockFp8(Struct, frozen=True):
    """The fields of quantization_config in use. Quantised are all products of the blocks but
    routers, and but those that are named here by a whole dotted name of the checkpoint:
    `model.layers.0.mlp.down_proj`.
    """

    quant_method: Literal["fp8"]
    weight_block_size: tuple[int, int]
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    activation_scheme: Literal["dynamic"] = "dynamic"
    modules_to_not_convert: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.weight_block_size != (BLOCK, BLOCK):
            raise ValueError(
                f"weight_block_size is {list(self.weight_block_size)}; only [128, 128] is supported"
            )


class Fp8Ops(Ops):
    """Operations whose products take Scaled weights."""

    def _plain(self, weight: Scaled, num_rows: int) -> Implementation:  # type: ignore[override]
        return Implementation("dequantised", dequantised_linear)


def dequantised_linear(x_TD: Tensor, weight: Scaled) -> Tensor:
    return F.linear(x_TD, weight.dequantised().to(x_TD.dtype))


def fp8_ops(ops: Ops) -> Fp8Ops:
    """The same operations around products of fp8 weights."""
    return Fp8Ops(ops.rms_norm, ops.add_rms_norm, ops.silu_mul, ops.rope_store)


def blocks(
    make: Callable[[int], Layer],
    count: int,
    ops: Ops,
    rules: Iterable[tuple[str, ...]],
    quantised: BlockFp8 | None,
) -> Iterator[Layer]:
    """The model's blocks, in the types that they are loaded in. `rules`: the model's WEIGHTS.

    A block may hold modules with a method `to_fp8`, experts say, beside products.
    """
    if quantised is None:
        yield from (make(layer) for layer in range(count))
        return
    device, products = torch.get_default_device(), fp8_ops(ops)
    for layer in range(count):
        with torch.device("meta"):
            block = make(layer)
        for path, module in block.named_modules():
            names = checkpoint_modules(f"layers.{layer}.{path}", layer, rules)
            if names and not is_kept(names, quantised):
                if isinstance(module, NormLinear | AddLinear):
                    to_fp8(module, products)
                elif hasattr(module, "to_fp8"):
                    module.to_fp8()
        yield block.to_empty(device=device)


def checkpoint_modules(path: str, layer: int, rules: Iterable[tuple[str, ...]]) -> set[str]:
    """The checkpoint's names of what is fused in a module; of experts, the first one's."""
    own = [rule[0] for rule in rules if rule[1].format(layer).rpartition(".")[0] == path]
    return {name.format(layer, 0)[:-7] for name in own if name.endswith(".weight")}


def is_kept(names: set[str], quantised: BlockFp8) -> bool:
    """Whether a module is not quantised. Raises ConfigError if parts of it are and others not."""
    kept = names & (quantised.modules_to_not_convert or set())
    if kept and kept != names:
        raise ConfigError(
            f"quantization_config.modules_to_not_convert has {min(kept)} without "
            f"{min(names - kept)}, which is multiplied together with it"
        )
    return bool(kept)


def to_fp8(linear: Linear, ops: Fp8Ops) -> None:
    """Changes the type of a weight whose storage is not allocated yet, and adds its scales."""
    placement = linear.placements["weight"]
    linear.block_rows = BLOCK if placement.dim else block_rows_of(placement)
    num_rows, width = linear.weight.shape
    scales = -(-num_rows // linear.block_rows), -(-width // BLOCK)
    linear.weight = fp8_parameter(num_rows, width, dtype=FP8)
    linear.weight_scale = fp8_parameter(*scales, dtype=torch.float32)
    each = BLOCK if placement.dim else linear.block_rows
    parts = tuple((name, in_blocks(span, each)) for name, span in placement.parts)
    linear.placements["weight_scale"] = Placement(placement.dim, parts)
    linear.choose(ops)


def fp8_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def block_rows_of(placement: Placement) -> int:
    """Rows that share a scale: 128, or fewer if parts, or the shares of ranks, start in between."""
    found, at = BLOCK, 0
    for _, span in placement.parts:
        found, at = gcd(found, at, span.start), at + span.count
    return found


def in_blocks(span: Span, each: int) -> Span:
    """The same cut, counted in blocks. Raises ConfigError if it starts within one."""
    if span.start % each:
        raise ConfigError(
            f"parallel.tp cuts {span.full} inputs of block fp8 at {span.start}, not at a multiple "
            f"of {each}"
        )
    return Span(-(-span.full // each), span.start // each, -(-span.count // each))
