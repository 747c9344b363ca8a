"""Products x W^T with the operations around them, and the choice of one by number of rows.

Decision: a product is chosen together with the norm before it and the gate or residual addition
after it. In a step of few rows the time is that of launches and weights, and one kernel does it
all. The choice depends on the number of rows, which a CUDA graph fixes. A weight has one
`RowTable` for each `Fusion`, which caches the first product that fits for each number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch.nn.functional as F
from nanovllm_kernels.fp8_reference import FEW_ROWS, Fp8Linear, Quantised, Scaled, Weight
from torch import Tensor

from nanovllm.layers.residual import Output, Slices

Multiply: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (x_TD, weight_ND) -> y_TN


class Fusion(NamedTuple):
    """The operations around a product. The default has none: y = x W^T in one tensor."""

    norm: bool = False  # x is the residual stream, which the product normalises
    gate: bool = False  # y is silu(first half) * second half
    residual: bool = False  # y is added to the residual stream
    quantised: bool = False  # y may be Quantised rows, since the next product takes them
    sliced: bool = False  # y may be Slices, since the next operation sums them

    @property
    def is_none(self) -> bool:
        return not (self.norm or self.gate or self.residual)

    def reductions(self) -> tuple[Fusion, ...]:
        """Return this fusion, then those with a separate norm, and with no other operation."""
        return (
            self,
            self._replace(norm=False),
            Fusion(quantised=self.quantised, sliced=self.sliced),
        )


class Norm(NamedTuple):
    """Operands of an RMS norm."""

    weight_D: Tensor
    eps: float


class ProductKernel(Protocol):
    """One way to compute x W^T, alone or with the operations of a `Fusion`."""

    @property
    def name(self) -> str: ...

    @property
    def norm_quantise(self) -> Callable[..., Quantised] | None:
        """The kernel for a norm before this product, if it takes Quantised rows; or None.

        Its arguments are (x, residual_TD or None, norm_weight_D, eps). It overwrites the residual
        stream with the sum.
        """
        ...

    def fits(self, num_rows: int, weight: Weight, fusion: Fusion) -> bool:
        """Return True if `run` can compute this product with all operations of `fusion`."""
        ...

    def run(
        self,
        x: Tensor | Quantised,
        weight: Weight,
        *,
        norm: Norm | None = None,
        residual_TN: Tensor | None = None,
        gated: bool = False,
    ) -> Output | Quantised:
        """Return y. With a residual stream, add to it in place and return it."""
        ...


class SkinnyLinear(Protocol):
    """Kernels with the operations before and after a product, for few rows."""

    def fits(self, num_rows: int, weight: Any, **kind: bool) -> bool:  # noqa: ANN401
        """Return True if the kernel supports this case. Flags in `kind`: normed, gated, added."""
        ...

    def linear(self, x_TD: Tensor, weight: Any) -> Tensor: ...  # noqa: ANN401

    def linear_add(self, x_TD: Tensor, weight: Any, residual_TN: Tensor) -> Tensor: ...  # noqa: ANN401

    def norm_linear(
        self,
        x_TD: Tensor,
        norm_weight_D: Tensor,
        eps: float,
        weight: Any,  # noqa: ANN401
        *,
        gated: bool = False,
    ) -> Tensor: ...


class FusedLinear(Protocol):
    """A kernel of the library: run(x_TD, weight_ND[, residual_TN])."""

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool: ...

    def __call__(self, *tensors: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Skinny:
    """Few rows: all operations of a fusion in a launch or two. A gate needs a norm before it."""

    kernels: SkinnyLinear
    is_fp8: bool = False  # for Scaled weights; the kernels quantise the rows
    name = "skinny"
    norm_quantise = None

    def fits(self, num_rows: int, weight: Weight, fusion: Fusion) -> bool:
        norm, gate, residual, *_ = fusion
        if isinstance(weight, Scaled) != self.is_fp8 or (gate and not norm):
            return False
        if isinstance(weight, Scaled) and not weight.multiplies_16_bits:
            return False
        return self.kernels.fits(num_rows, weight, normed=norm, gated=gate, added=residual)

    def run(
        self,
        x: Any,  # noqa: ANN401
        weight: Weight,
        *,
        norm: Norm | None = None,
        residual_TN: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        if norm is not None:
            return self.kernels.norm_linear(x, norm.weight_D, norm.eps, weight, gated=gated)
        if residual_TN is not None:
            return self.kernels.linear_add(x, weight, residual_TN)
        return self.kernels.linear(x, weight)


@dataclass(frozen=True, slots=True)
class Fp8:
    """More rows of an fp8 weight. The norm before it quantises its rows.

    With a gate it returns Quantised rows. Up to FEW_ROWS rows have no gate here if the kernels
    include one for few rows.
    """

    kernels: Fp8Linear
    name = "fp8"

    @property
    def norm_quantise(self) -> Callable[..., Quantised]:
        return self.kernels.norm_quantise

    def fits(self, num_rows: int, weight: Weight, fusion: Fusion) -> bool:
        if fusion.norm or not multiplies(self.kernels, weight):
            return False
        is_gated = self.kernels.skinny is None or num_rows > FEW_ROWS
        return not fusion.gate or (fusion.quantised and is_gated)

    def run(
        self,
        x: Tensor | Quantised,
        weight: Any,  # noqa: ANN401
        *,
        residual_TN: Tensor | None = None,
        gated: bool = False,
        **_: object,
    ) -> Tensor | Quantised:
        x8 = x if isinstance(x, Quantised) else self.kernels.quantise(x)
        if gated:
            return self.kernels.gated(x8, weight)
        values, scales = x8
        return self.kernels.product(
            values, scales, weight.weight_ND, weight.scale, residual_TN, weight.block_rows
        )


@dataclass(frozen=True, slots=True)
class Gated:
    """Many rows, with the gate. Their gate and up are never in memory."""

    kernel: FusedLinear
    name = "quack"
    norm_quantise = None

    def fits(self, num_rows: int, weight: Weight, fusion: Fusion) -> bool:
        is_gated = fusion.gate and not fusion.norm
        return is_gated and isinstance(weight, Tensor) and self.kernel.fits(num_rows, weight)

    def run(self, x: Any, weight: Any, **_: object) -> Tensor:  # noqa: ANN401
        return self.kernel(x, weight)


@dataclass(frozen=True, slots=True)
class AddedLibrary:
    """Thousands of rows: the library adds the residual stream in its epilogue."""

    kernel: FusedLinear
    name = "library"
    norm_quantise = None

    def fits(self, num_rows: int, weight: Weight, fusion: Fusion) -> bool:
        is_added = fusion.residual and not (fusion.norm or fusion.gate)
        return is_added and isinstance(weight, Tensor) and self.kernel.fits(num_rows, weight)

    def run(self, x: Any, weight: Any, *, residual_TN: Any = None, **_: object) -> Tensor:  # noqa: ANN401
        return self.kernel(x, weight, residual_TN)


@dataclass(frozen=True, slots=True)
class Sliced:
    """Some hundred rows: partial products over slices of the inputs (split-K)."""

    kernel: FusedLinear
    name = "sliced"
    norm_quantise = None

    def fits(self, num_rows: int, weight: Weight, fusion: Fusion) -> bool:
        can_slice = fusion.sliced and fusion.is_none
        return can_slice and isinstance(weight, Tensor) and self.kernel.fits(num_rows, weight)

    def run(self, x: Any, weight: Any, **_: object) -> Slices:  # noqa: ANN401
        return Slices(self.kernel(x, weight))


@dataclass(frozen=True, slots=True)
class Library:
    """Any number of rows, and no other operation."""

    multiply: Multiply = F.linear
    name = "library"
    norm_quantise = None

    def fits(self, num_rows: int, weight: Weight, fusion: Fusion) -> bool:
        return fusion.is_none and isinstance(weight, Tensor)

    def run(self, x: Any, weight: Any, **_: object) -> Tensor:  # noqa: ANN401
        return self.multiply(x, weight)


@dataclass(frozen=True, slots=True)
class Dequantised:
    """Any number of rows of an fp8 weight, which is dequantised for each product."""

    multiply: Multiply = F.linear
    name = "dequantised"
    norm_quantise = None

    def fits(self, num_rows: int, weight: Weight, fusion: Fusion) -> bool:
        return fusion.is_none and isinstance(weight, Scaled)

    def run(self, x: Tensor | Quantised, weight: Any, **_: object) -> Tensor:  # noqa: ANN401
        x_TD = x.dequantised().bfloat16() if isinstance(x, Quantised) else x
        return self.multiply(x_TD, weight.dequantised().to(x_TD.dtype))


def multiplies(kernels: Fp8Linear, weight: Weight) -> bool:
    """Return True if the kernels for more than a few rows support a weight."""
    if not isinstance(weight, Scaled) or not weight.multiplies_16_bits:
        return False
    return kernels.obstacle(*weight.shape, weight.block_rows) is None


# -- choice --------------------------------------------------------------------------------------


class Implementation(NamedTuple):
    """The implementation of a layer's product for a number of rows."""

    name: str  # shown by `describe.by_rows`
    run: Callable[..., Any]
    fused: Fusion = Fusion()  # the operations that `run` includes
    norm_quantise: Callable[..., Quantised] | None = None  # the product's


class RowTable(dict[int, Implementation]):
    """Implementation by number of rows, for all weights of one shape. Filled on first use."""

    def __init__(self, choose: Callable[[int], Implementation]) -> None:
        super().__init__()
        self._choose = choose

    def __missing__(self, num_rows: int) -> Implementation:
        product = self[num_rows] = self._choose(num_rows)
        return product


LIBRARY: tuple[ProductKernel, ...] = (Library(), Dequantised())


def preference(
    kernels: Mapping[str, Any], multiply: Multiply = F.linear
) -> tuple[ProductKernel, ...]:
    """Return the products for every weight, in order of preference.

    `kernels` are those of the recipe, by operation. `multiply` computes all others. Without kernels
    it computes every product, so that the number of rows changes no sum.
    """
    preferred: list[ProductKernel] = []
    if "fp8_linear" in kernels:
        fp8: Fp8Linear = kernels["fp8_linear"]
        if fp8.skinny is not None:
            preferred.append(Skinny(fp8.skinny, is_fp8=True))
        preferred.append(Fp8(fp8))
    if "gated_linear" in kernels:
        preferred.append(Gated(kernels["gated_linear"]))
    if "sliced_linear" in kernels:
        preferred.append(Sliced(kernels["sliced_linear"]))
    if "skinny_linear" in kernels:
        preferred.append(Skinny(kernels["skinny_linear"]))
    if "added_linear" in kernels:
        preferred.append(AddedLibrary(kernels["added_linear"]))
    return (*preferred, Library(multiply), Dequantised(multiply))


def first_that_fits(
    products: Iterable[ProductKernel], weight: Weight, fusion: Fusion, num_rows: int
) -> Implementation:
    """Return the first product that supports a case, with the operations that it includes.

    A product with more of the operations is better than any with fewer.
    """
    for fused in fusion.reductions():
        for product in products:
            if product.fits(num_rows, weight, fused):
                label = labelled(product.name, fused)
                return Implementation(label, product.run, fused, product.norm_quantise)
    raise AssertionError("the library fits every case")


def labelled(name: str, fused: Fusion) -> str:
    """Return a name like "norm+skinny+gate": the operations of one launch."""
    parts = {"norm": fused.norm, name: True, "gate": fused.gate, "residual": fused.residual}
    return "+".join(part for part, is_included in parts.items() if is_included)
