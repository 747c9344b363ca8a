"""Block fp8: e4m3 weights with one scale per 128 x 128 block, and their products.

A model is first built unquantised, block by block, on the meta device. Then the weights that its
quantization config covers change their type and get scales. Only the result is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import Struct
from nanovllm_kernels.fp8_reference import BLOCK, FEW_ROWS, FP8, Quantised, Scaled
from torch import Tensor, nn

from nanovllm.config import ConfigError
from nanovllm.layers.linear import AddLinear, Layer, Linear, NormLinear, Placement
from nanovllm.layers.ops import Implementation, Ops
from nanovllm.layers.residual import Added, Parted, Pending, Residual, as_tensor
from nanovllm.parallel.mesh import Span

SUPPORTED: dict[str, tuple[Any, ...]] = {  # values of quantization_config
    "quant_method": ("fp8",),
    "weight_block_size": ((BLOCK, BLOCK),),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
}


class BlockFp8(Struct, frozen=True):
    """The used fields of quantization_config.

    All products of the blocks are quantised except routers and the modules listed here, which have
    full dotted names of the checkpoint: `model.layers.0.mlp.down_proj`.
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

    def __post_init__(self) -> None:
        for name, values in SUPPORTED.items():
            if (found := getattr(self, name)) not in values:
                only = " or ".join(map(json.dumps, values))
                raise ValueError(f"{name} is {json.dumps(found)}; only {only} is supported")


class Fp8Ops(Ops):
    """Operations whose products take Scaled weights.

    Few rows use the skinny products. More rows are quantised by the preceding norm or gate, and a
    gate returns Quantised rows. Without kernels, weights are dequantised for each product.
    """

    passes_on: bool

    def _plain(self, weight: Any, num_rows: int) -> Implementation:  # noqa: ANN401
        found: Implementation = super()._plain(weight, num_rows)
        if found.name == "skinny":
            return found
        if not self._multiplies(weight):
            return Implementation("dequantised", dequantised_linear)
        return Implementation("fp8", self._product)

    def _multiplies(self, weight: Scaled) -> bool:
        kernels = self.fp8_linear
        return kernels is not None and kernels.obstacle(*weight.shape, weight.block_rows) is None

    def _product(
        self, x: Tensor | Quantised, weight: Scaled, residual_TN: Tensor | None = None
    ) -> Tensor:
        assert self.fp8_linear is not None
        values, scales = x if isinstance(x, Quantised) else self.fp8_linear.quantise(x)
        weight_ND, scale, block_rows = weight
        return self.fp8_linear.product(values, scales, weight_ND, scale, residual_TN, block_rows)

    def _added(self, weight: Any, num_rows: int) -> Implementation:  # noqa: ANN401
        found: Implementation = super()._added(weight, num_rows)
        if found.name != "fp8":
            return found

        def run(x: Tensor | Quantised, weight: Scaled, residual: Added) -> Residual:
            return Added(self._product(x, weight, residual.stream_TD))

        return Implementation("fp8+residual", run)

    def _normed(
        self,
        weight: Any,  # noqa: ANN401
        gated: bool,
        is_added: bool,
        num_rows: int,
    ) -> Implementation:
        found: Implementation = super()._normed(weight, gated, is_added, num_rows)
        if found.norms or self._plain(weight, num_rows).name != "fp8":
            return found
        kernels = self.fp8_linear
        assert kernels is not None
        is_quantised = gated and self.passes_on and num_rows > FEW_ROWS

        def run(
            residual: Residual, norm_weight_D: Tensor, eps: float, weight: Scaled
        ) -> tuple[Any, Added]:
            x: Tensor | Quantised
            if isinstance(residual, Parted):
                x, stream = residual.normed(norm_weight_D, eps)
            else:
                stream = Added(residual.stream_TD)
                if isinstance(residual, Pending):
                    update = as_tensor(residual.update)
                    x = kernels.norm_quantise(update, stream.stream_TD, norm_weight_D, eps)
                else:
                    x = kernels.norm_quantise(stream.stream_TD, None, norm_weight_D, eps)
            if is_quantised:
                x8 = x if isinstance(x, Quantised) else kernels.quantise(x)
                return kernels.gated(x8, weight), stream
            y_TN = self._product(x, weight)
            return self.silu_mul(y_TN) if gated else y_TN, stream

        name = "norm+fp8+gate" if gated else "norm+fp8"
        if is_quantised:
            name = "norm+gated-fp8"
        return Implementation(name, run)


def dequantised_linear(x: Tensor | Quantised, weight: Scaled) -> Tensor:
    x_TD = x.dequantised().bfloat16() if isinstance(x, Quantised) else x
    return F.linear(x_TD, weight.dequantised().to(x_TD.dtype))


def fp8_ops(ops: Ops, *, passes_on: bool) -> Fp8Ops:
    """Return `ops` with products of fp8 weights. Kernels need a bfloat16 model.

    `passes_on`: the product after a gate also has an fp8 weight.
    """
    is_16_bit = torch.get_default_dtype() == torch.bfloat16
    kernels = ops.fp8_linear if is_16_bit else None
    others = dict(gated_linear=None, sliced_linear=None, added_linear=None, fp8_linear=kernels)
    same = {entry.name: getattr(ops, entry.name) for entry in fields(Ops) if entry.init}
    found = Fp8Ops(**{**same, **others, "skinny_linear": kernels and kernels.skinny})
    vars(found)["passes_on"] = passes_on
    return found


def blocks(
    make: Callable[[int], Layer],
    count: int,
    ops: Ops,
    rules: Iterable[tuple[str, ...]],
    quantised: BlockFp8 | None,
) -> Iterator[Layer]:
    """Yield the model's blocks with the types of the checkpoint. `rules`: the model's WEIGHTS.

    Besides products, a block may have modules with a method `to_fp8`, such as experts.
    """
    if quantised is None:
        yield from (make(layer) for layer in range(count))
        return
    device = torch.get_default_device()
    known: dict[tuple[int, bool], Fp8Ops] = {}
    for layer in range(count):
        with torch.device("meta"):
            block = make(layer)
        modules = dict(block.named_modules())
        kept = set()
        for path, module in modules.items():
            change = getattr(module, "to_fp8", None)
            if isinstance(module, NormLinear | AddLinear):
                change = partial(to_fp8, module)
            names = checkpoint_modules(f"layers.{layer}.{path}", layer, rules)
            if change is None or not names or is_kept(names, quantised):
                kept.add(path)
            else:
                change()
        block.to_empty(device=device)
        for path, module in modules.items():
            if isinstance(module, Linear):
                vars(module)["operand"] = module.weight
            if isinstance(module, NormLinear | AddLinear) and path not in kept:
                passes_on = f"{path.rpartition('.')[0]}.down" not in kept
                kind = block_rows_of(module.placements["weight"]), passes_on
                if kind not in known:
                    known[kind] = fp8_ops(ops, passes_on=passes_on)
                bind(module, known[kind], kind[0])
        yield block


def bind(linear: NormLinear | AddLinear, ops: Fp8Ops, block_rows: int) -> None:
    """Set a layer's operand, whose storage is allocated, and its tables of implementations.

    Layers may share `ops` only if their `block_rows` are equal, since these are not in table keys.
    """
    scale = linear.get_parameter("weight_scale")
    weight = vars(linear)["operand"] = Scaled(linear.weight, scale, block_rows)
    if isinstance(linear, NormLinear):
        linear.by_rows = ops.normed(weight, gated=linear.gated, is_added=True)
        linear.by_rows_pending = ops.normed(weight, gated=linear.gated, is_added=False)
    else:
        linear.by_rows = (ops.plain if linear.mesh.tp_size > 1 else ops.added)(weight)


def checkpoint_modules(path: str, layer: int, rules: Iterable[tuple[str, ...]]) -> set[str]:
    """Return the checkpoint's names of the weights in a module, without norms.

    Experts are represented by the first.
    """
    own = [rule[0] for rule in rules if rule[1].format(layer).rpartition(".")[0] == path]
    products = [name for name in own if name.endswith(".weight") and "norm." not in name]
    return {name.format(layer, 0)[:-7] for name in products}


def is_kept(names: set[str], quantised: BlockFp8) -> bool:
    """Return True if a module is not quantised. Raise ConfigError if only a part is."""
    kept = names & quantised.kept
    if kept and kept != names:
        raise ConfigError(
            f"quantization_config.modules_to_not_convert has {min(kept)} without "
            f"{min(names - kept)}, which is multiplied together with it"
        )
    return bool(kept)


def to_fp8(linear: Linear) -> None:
    """Change the type of a weight whose storage is not allocated yet, and add its scales."""
    placement = linear.placements["weight"]
    block_rows = block_rows_of(placement)
    num_rows, width = linear.weight.shape
    linear.weight = fp8_parameter(num_rows, width, dtype=FP8)
    linear.weight_scale = fp8_parameter(
        -(-num_rows // block_rows), -(-width // BLOCK), dtype=torch.float32
    )
    each = BLOCK if placement.dim else block_rows
    parts = tuple((name, in_blocks(span, each)) for name, span in placement.parts)
    linear.placements["weight_scale"] = Placement(placement.dim, parts)


def fp8_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def block_rows_of(placement: Placement) -> int:
    """Return the rows per scale: 128, or fewer if a part or share starts inside a block."""
    found, at = BLOCK, 0
    for _, span in placement.parts if placement.dim == 0 else ():
        found, at = gcd(found, at, span.start), at + span.count
    return found


def in_blocks(span: Span, each: int) -> Span:
    """Return the same cut in units of blocks. Raise ConfigError if it starts inside a block."""
    if span.start % each:
        raise ConfigError(
            f"parallel.tp cuts {span.full} inputs of block fp8 at {span.start}, not at a multiple "
            f"of {each}"
        )
    return Span(-(-span.full // each), span.start // each, -(-span.count // each))
