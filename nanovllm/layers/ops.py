"""Operations that layers are composed of, and the choice of their implementations.

The plain-torch reference in nanovllm_kernels.norms.reference defines the meaning of each operation.
`kernels.<name>: torch` in a recipe selects the reference, for ablations and for bisecting faults;
`compile` leaves the fusion to torch.compile.

Decision: a product is chosen together with the norm before it and the gate or residual addition
after it. In a step of few rows the time is that of launches and weights, and one kernel does it
all. The choice depends on the number of rows, which a CUDA graph fixes. Each shape of weight has a
`RowTable`, which caches the choice for each number of rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from nanovllm_kernels.fp8_reference import Fp8Linear, Weight
from nanovllm_kernels.products.gated_linear import obstacle
from torch import Tensor

from nanovllm.attention import delta_kernels
from nanovllm.attention.delta_kernels import DeltaKernels
from nanovllm.config import ConfigError, Kernels
from nanovllm.layers.expert_products import TORCH, ExpertKernels
from nanovllm.layers.residual import Added, Parted, Pending, Product, Residual, Slices, as_tensor
from nanovllm.registry import resolve

IMPLEMENTATIONS = {
    "torch": {
        "rms_norm": "nanovllm_kernels.norms.reference:rms_norm",
        "add_rms_norm": "nanovllm_kernels.norms.reference:add_rms_norm",
        "silu_mul": "nanovllm_kernels.norms.reference:silu_mul",
        "sigmoid_mul": "nanovllm_kernels.norms.reference:sigmoid_mul",
        "rope_store": "nanovllm_kernels.norms.reference:rope_store",
        "gated_linear": "nanovllm.layers.ops:ONE_BY_ONE",
        "skinny_linear": "nanovllm.layers.ops:ONE_BY_ONE",
        "sliced_linear": "nanovllm.layers.ops:ONE_BY_ONE",
        "added_linear": "nanovllm.layers.ops:ONE_BY_ONE",
        "fp8_linear": "nanovllm.layers.ops:ONE_BY_ONE",
        "experts": "nanovllm.layers.expert_products:TORCH",
        "delta": "nanovllm.attention.delta_kernels:TORCH",
    },
    "library": {
        "sliced_linear": "nanovllm_kernels.products.library_linear:SLICED_LINEAR",
        "added_linear": "nanovllm_kernels.products.library_linear:ADDED_LINEAR",
    },
    "triton": {
        "rms_norm": "nanovllm_kernels.norms.norm:rms_norm",
        "add_rms_norm": "nanovllm_kernels.norms.norm:add_rms_norm",
        "silu_mul": "nanovllm_kernels.norms.activation:silu_mul",
        "sigmoid_mul": "nanovllm_kernels.norms.activation:sigmoid_mul",
        "rope_store": "nanovllm_kernels.norms.rope_store:rope_store",
        "experts": "nanovllm.layers.expert_kernels:TRITON",
        "delta": "nanovllm.attention.delta_triton:TRITON",
    },
    "cute": {
        "gated_linear": "nanovllm_kernels.products.gated_linear:GATED_LINEAR",
        "skinny_linear": "nanovllm_kernels.products.skinny_linear:SKINNY_LINEAR",
        "experts": "nanovllm.layers.expert_kernels:CUTE",
        "fp8_linear": "nanovllm_kernels.products.dense_fp8:FP8_LINEAR",
    },
    "tiled": {"fp8_linear": "nanovllm_kernels.products.dense_fp8:TILED_FP8"},
}


class FusedLinear(Protocol):
    """A product fused with the operation after it: run(x_TD, weight_ND[, residual_TN]).

    Gated: silu(gate) * up, for steps of many rows. Sliced: partial products y_ITN over slices of
    the inputs, whose sum over I is x W^T, for some hundred rows. Added: added to the residual
    stream, for thousands of rows.
    """

    def fits(self, num_rows: int, weight_ND: Tensor) -> bool: ...

    def __call__(self, *tensors: Tensor) -> Tensor: ...


class SkinnyLinear(Protocol):
    """Products fused with the operations before and after, for up to 128 rows."""

    def fits(self, num_rows: int, weight_ND: Tensor, **kind: bool) -> bool:
        """Return True if the kernel supports this case. Flags in `kind`: normed, gated, added."""
        ...

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor: ...

    def linear_add(self, x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor) -> Tensor: ...

    def norm_linear(
        self,
        x_TD: Tensor,
        norm_weight_D: Tensor,
        eps: float,
        weight_ND: Tensor,
        *,
        gated: bool = False,
    ) -> Tensor: ...


ONE_BY_ONE = None  # no fused kernel; separate operations for any number of rows


class Implementation(NamedTuple):
    """One way to compute a product with the operations fused to it."""

    name: str  # shown by `describe.by_rows`
    run: Callable[..., Any]
    norms: bool = False  # True if the norm is part of the same launch


class RowTable(dict[int, Implementation]):
    """Implementation by number of rows, for all weights of one shape. Filled on first use."""

    def __init__(self, choose: Callable[[int], Implementation]) -> None:
        super().__init__()
        self._choose = choose

    def __missing__(self, num_rows: int) -> Implementation:
        found = self[num_rows] = self._choose(num_rows)
        return found


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation per operation.

    rms_norm(x_TD, weight_D, eps) -> y_TD
        x / sqrt(mean(x^2) + eps), computed in float32, cast to x's dtype, times the weight.
    add_rms_norm(x, residual_TD, weight_D, eps) -> (y_TD, sum_TD)
        sum = x + residual; y = rms_norm(sum). May overwrite both inputs. x is x_TD, or partial
        products x_ITD, which are summed here.
    silu_mul(gate_up_T2F) -> y_TF
        silu(first half) * second half of each row.
    sigmoid_mul(gate, x_TF) -> y_TF
        sigmoid(gate) * x. The gate is gate_TF, or partial products gate_ITF, which are summed here.
    rope_store(qkv, q_norm_X, k_norm_X, eps, cos_sin_LA, positions_T, slot_mapping_T, k_PSGA,
               v_PSGA, scales_2G=None, ranks=None) -> q_THA
        Splits qkv_TX, or the sum of partial products qkv_ITX, into heads [H q | G k | G v] of size
        A (G from k_PSGA). Normalises q and k if norm weights are given: of A elements for each
        head separately, or, with ranks (reference.Ranks), of H * A and G * A elements for the heads
        of all ranks together. Rotates the first R elements of each head of q and k half-split
        (cos_sin_LA, float32, row = position: cosines in the first half of the R columns, sines in
        the second). Writes k and v to their places in the cache; in a float8_e4m3fn cache, divided
        by their heads' scales_2G (keys, values) and saturated. Returns the rotated q.
    experts
        The kernels of routed experts: layers/expert_products.py.
    delta
        The kernels of the gated delta rule: attention/delta_kernels.py.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor]
    rope_store: Callable[..., Tensor]
    gated_linear: FusedLinear | None = ONE_BY_ONE
    skinny_linear: SkinnyLinear | None = ONE_BY_ONE
    sliced_linear: FusedLinear | None = ONE_BY_ONE
    added_linear: FusedLinear | None = ONE_BY_ONE
    fp8_linear: Fp8Linear | None = ONE_BY_ONE  # layers/fp8.py
    experts: ExpertKernels = TORCH
    delta: DeltaKernels = delta_kernels.TORCH
    tables: dict[tuple[object, ...], RowTable] = field(
        init=False, default_factory=dict, compare=False
    )

    def norm(self, residual: Residual, weight_D: Tensor, eps: float) -> tuple[Tensor, Added]:
        """Return the normalised stream, and the stream. May overwrite its input."""
        if isinstance(residual, Parted):
            return residual.normed(weight_D, eps)
        if isinstance(residual, Added):
            return self.rms_norm(residual.stream_TD, weight_D, eps), residual
        x = as_tensor(residual.update)
        y_TD, stream_TD = self.add_rms_norm(x, residual.stream_TD, weight_D, eps)
        return y_TD, Added(stream_TD)

    # -- tables of implementations, by rows -----------------------------------------------------

    def plain(self, weight_ND: Weight) -> RowTable:
        """Return the table of run(x_TD, weight_ND) -> y_TN."""
        return self._table(weight_ND, self._plain)

    def added(self, weight_ND: Weight) -> RowTable:
        """Return the table of run(x_TD, weight_ND, Added) -> Residual."""
        return self._table(weight_ND, self._added)

    def normed(self, weight_ND: Weight, *, gated: bool, is_added: bool) -> RowTable:
        """Return the table of run(residual, norm_weight_D, eps, weight_ND) -> (Product, Added).

        It computes the product of the normalised residual stream. `gated`: silu of the first half
        times the second half. `is_added`: the residual is Added, else it has a pending product.
        """
        return self._table(weight_ND, self._normed, gated, is_added)

    def _table(
        self, weight_ND: Weight, choose: Callable[..., Implementation], *more: bool
    ) -> RowTable:
        key = choose.__name__, *more, *weight_ND.shape, weight_ND.dtype
        if key not in self.tables:
            self.tables[key] = RowTable(partial(choose, weight_ND, *more))
        return self.tables[key]

    def _plain(self, weight_ND: Tensor, num_rows: int) -> Implementation:
        if self.skinny_linear is not None and self.skinny_linear.fits(num_rows, weight_ND):
            return Implementation("skinny", self.skinny_linear.linear)
        return Implementation("library", F.linear)

    def _sliced(self, weight_ND: Tensor, num_rows: int) -> Implementation:
        sliced = self.sliced_linear
        if sliced is not None and sliced.fits(num_rows, weight_ND):
            return Implementation("sliced", lambda x_TD, weight: Slices(sliced(x_TD, weight)))
        return self._plain(weight_ND, num_rows)

    def _added(self, weight_ND: Tensor, num_rows: int) -> Implementation:
        skinny, added = self.skinny_linear, self.added_linear
        add: Callable[..., Tensor]
        if skinny is not None and skinny.fits(num_rows, weight_ND, added=True):
            name, add = "skinny", skinny.linear_add
        elif added is not None and added.fits(num_rows, weight_ND):
            name, add = "library", added
        else:
            product = self._sliced(weight_ND, num_rows)

            def leave(x_TD: Tensor, weight: Tensor, residual: Added) -> Residual:
                return Pending(residual.stream_TD, product.run(x_TD, weight))

            return Implementation(product.name, leave)

        def run(x_TD: Tensor, weight: Tensor, residual: Added) -> Residual:
            return Added(add(x_TD, weight, residual.stream_TD))

        return Implementation(f"{name}+residual", run)

    def _normed(
        self, weight_ND: Tensor, gated: bool, is_added: bool, num_rows: int
    ) -> Implementation:
        skinny, kind = self.skinny_linear, {"normed": True, "gated": gated}
        if skinny is not None and is_added and skinny.fits(num_rows, weight_ND, **kind):
            multiply = partial(skinny.norm_linear, gated=gated)

            def fused(
                residual: Added, norm_weight_D: Tensor, eps: float, weight: Tensor
            ) -> tuple[Product, Added]:
                return multiply(residual.stream_TD, norm_weight_D, eps, weight), residual

            name = "norm+skinny+gate" if gated else "norm+skinny"
            return Implementation(name, fused, norms=True)
        product = (self._gated if gated else self._sliced)(weight_ND, num_rows)

        def run(
            residual: Residual, norm_weight_D: Tensor, eps: float, weight: Tensor
        ) -> tuple[Product, Added]:
            x_TD, stream = self.norm(residual, norm_weight_D, eps)
            return product.run(x_TD, weight), stream

        return Implementation(product.name, run)

    def _gated(self, weight_ND: Tensor, num_rows: int) -> Implementation:
        if self.gated_linear is not None and self.gated_linear.fits(num_rows, weight_ND):
            return Implementation("quack+gate", self.gated_linear)
        product = self._plain(weight_ND, num_rows)
        return Implementation(product.name, lambda x, weight: self.silu_mul(product.run(x, weight)))


OPERATIONS = tuple(entry.name for entry in fields(Ops) if entry.name != "tables")


def select_ops(kernels: Kernels, device: torch.device) -> Ops:
    """Return the recipe's operations. Raise ConfigError if one cannot run on this device."""
    chosen = {}
    for name in OPERATIONS:
        asked = getattr(kernels, name)
        kind = fastest(name, device) if asked == "auto" else asked
        if kind == "triton" and device.type == "cpu":
            raise ConfigError(f"kernels.{name} is triton, which needs a GPU; use torch")
        if kind in ("cute", "tiled") and (reason := obstacle(device)) is not None:
            raise ConfigError(f"kernels.{name} is {kind}, but {reason}; use torch")
        if kind == "compile":
            chosen[name] = compiled(name, device)
        else:
            chosen[name] = resolve(IMPLEMENTATIONS[kind], name)
    return Ops(**chosen)


def compiled(operation: str, device: torch.device) -> Any:  # noqa: ANN401
    """Return the reference through torch.compile.

    It compiles for one token, for the next number of tokens, and then for any number: only sizes
    that have changed become dynamic. With `dynamic=True`, widths would be dynamic, too.
    """
    if device.type == "cpu" and shutil.which("g++") is None:
        raise ConfigError(f"kernels.{operation} is compile, which needs g++ on a CPU; use torch")
    return torch.compile(resolve(IMPLEMENTATIONS["torch"], operation))


def fastest(operation: str, device: torch.device) -> str:
    """Return the implementation that "auto" means on this device."""
    if operation in IMPLEMENTATIONS["cute"] and obstacle(device) is None:
        return "cute"
    is_beside = operation not in IMPLEMENTATIONS["torch"]  # sampling, batch preparation
    kinds = () if device.type == "cpu" else ("triton", "library")
    return next((k for k in kinds if is_beside or operation in IMPLEMENTATIONS[k]), "torch")
