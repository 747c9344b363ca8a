"""The operations that layers are written in, and their choice by device and recipe.

Each has one meaning, given by the plain-torch reference in nanovllm_kernels.reference, and any
number of implementations. `kernels.<name>: torch` in a recipe brings the reference back, which is
both the ablation and the bisection tool; `compile` leaves the fusing to torch.compile.

Decision: products are operations too, together with the norm before them and the gate after them,
because a step of a few rows is launches and weights, and one kernel does all of it. The number of
rows, which a CUDA graph fixes, decides: layers do not know.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from nanovllm_kernels.gated_linear import obstacle
from torch import Tensor

from nanovllm.config import ConfigError, Kernels
from nanovllm.registry import resolve

IMPLEMENTATIONS = {
    "torch": {
        "rms_norm": "nanovllm_kernels.reference:rms_norm",
        "add_rms_norm": "nanovllm_kernels.reference:add_rms_norm",
        "silu_mul": "nanovllm_kernels.reference:silu_mul",
        "rope_store": "nanovllm_kernels.reference:rope_store",
        "small_linear": "nanovllm.layers.ops:ONE_BY_ONE",
        "gated_linear": "nanovllm.layers.ops:ONE_BY_ONE",
        "skinny_linear": "nanovllm.layers.ops:ONE_BY_ONE",
        "sliced_linear": "nanovllm.layers.ops:ONE_BY_ONE",
        "added_linear": "nanovllm.layers.ops:ONE_BY_ONE",
    },
    "library": {
        "sliced_linear": "nanovllm_kernels.library_linear:SLICED_LINEAR",
        "added_linear": "nanovllm_kernels.library_linear:ADDED_LINEAR",
    },
    "triton": {
        "rms_norm": "nanovllm_kernels.norm:rms_norm",
        "add_rms_norm": "nanovllm_kernels.norm:add_rms_norm",
        "silu_mul": "nanovllm_kernels.activation:silu_mul",
        "rope_store": "nanovllm_kernels.rope_store:rope_store",
        "small_linear": "nanovllm_kernels.small_linear:SMALL_LINEAR",
    },
    "cute": {
        "gated_linear": "nanovllm_kernels.gated_linear:GATED_LINEAR",
        "skinny_linear": "nanovllm_kernels.skinny_linear:SKINNY_LINEAR",
    },
}


class SmallLinear(Protocol):
    """The methods of Ops of the same names, each in one launch, for steps of a few rows."""

    def fits(self, x_TD: Tensor, weight_ND: Tensor, *, normed: bool = False) -> bool: ...

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor: ...

    def norm_linear(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        gain_D: Tensor,
        eps: float,
        weight_ND: Tensor,
        *,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor]: ...


class GatedLinear(Protocol):
    """silu_mul of linear in one launch, for steps of many rows."""

    def fits(self, x_TD: Tensor, weight_ND: Tensor) -> bool: ...

    def __call__(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor: ...


class SkinnyLinear(Protocol):
    """Methods of Ops, each in one launch, for up to 128 rows. `kind`: normed, gated, added."""

    def fits(self, x_TD: Tensor, weight_ND: Tensor, **kind: bool) -> bool: ...

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor: ...

    def linear_add(self, x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor) -> Tensor: ...

    def norm_linear(
        self, x_TD: Tensor, gain_D: Tensor, eps: float, weight_ND: Tensor, *, gated: bool = False
    ) -> Tensor: ...


class SlicedLinear(Protocol):
    """linear as slices of the inputs, in one launch, for steps of some hundred rows."""

    def fits(self, x_TD: Tensor, weight_ND: Tensor) -> bool: ...

    def __call__(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor: ...


class AddedLinear(Protocol):
    """linear_add in one launch, for steps of thousands of rows."""

    def fits(self, x_TD: Tensor, weight_ND: Tensor) -> bool: ...

    def __call__(self, x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor) -> Tensor: ...


ONE_BY_ONE = None  # the other operations do it, whatever the number of rows


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation per operation.

    rms_norm(x_TD, gain_D, eps) -> y_TD
        x / sqrt(mean(x^2) + eps), computed in float32, cast to x's dtype, times gain.
    add_rms_norm(x_TD, residual_TD, gain_D, eps) -> (y_TD, sum_TD)
        sum = x + residual; y = rms_norm(sum). May overwrite both inputs.
    silu_mul(gate_up_T2F) -> y_TF
        silu(first half) * second half of each line.
    rope_store(qkv_TX, q_gain_A, k_gain_A, eps, cos_sin_LA, positions_T, cells_T, k_PSGA, v_PSGA)
        -> q_THA
        Splits qkv into heads [H q | G k | G v] of width A (G from k_PSGA); normalises q and k per
        head when gains are given (None = no norm); rotates q and k half-split (cos_sin_LA: cos in
        the first A/2 columns, sin in the rest, float32, row = position); writes k and v to the
        cells of the cache; returns the rotated q.

    The methods are compositions of these. A residual stream of None begins with x. Where a product
    goes to one of these two, x of add_rms_norm or qkv may be slices of it, x_STN, summed up there.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    rope_store: Callable[..., Tensor]
    small_linear: SmallLinear | None = ONE_BY_ONE
    gated_linear: GatedLinear | None = ONE_BY_ONE
    skinny_linear: SkinnyLinear | None = ONE_BY_ONE
    sliced_linear: SlicedLinear | None = ONE_BY_ONE
    added_linear: AddedLinear | None = ONE_BY_ONE

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        """x W^T."""
        if self.skinny_linear is not None and self.skinny_linear.fits(x_TD, weight_ND):
            return self.skinny_linear.linear(x_TD, weight_ND)
        if self.small_linear is not None and self.small_linear.fits(x_TD, weight_ND):
            return self.small_linear.linear(x_TD, weight_ND)
        return F.linear(x_TD, weight_ND)

    def slices(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        """linear's, or slices of it."""
        if self.sliced_linear is not None and self.sliced_linear.fits(x_TD, weight_ND):
            return self.sliced_linear(x_TD, weight_ND)
        return self.linear(x_TD, weight_ND)

    def linear_add(
        self, x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(x W^T or its slices, the residual stream), or (the sum, None). May overwrite the stream.

        For add_rms_norm.
        """
        skinny, added = self.skinny_linear, self.added_linear
        if skinny is not None and skinny.fits(x_TD, weight_ND, added=True):
            return skinny.linear_add(x_TD, weight_ND, residual_TN), None
        if added is not None and added.fits(x_TD, weight_ND):
            return added(x_TD, weight_ND, residual_TN), None
        return self.slices(x_TD, weight_ND), residual_TN

    def norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, gain_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(normalised, sum) of x and the residual stream. May overwrite both inputs."""
        if residual_TD is None:
            return self.rms_norm(x_TD, gain_D, eps), x_TD
        return self.add_rms_norm(x_TD, residual_TD, gain_D, eps)

    def norm_linear(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        gain_D: Tensor,
        eps: float,
        weight_ND: Tensor,
        *,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(linear of norm's, or silu_mul of that if `gated`; norm's sum). May overwrite both.

        Not gated it is for rope_store: slices, perhaps.
        """
        skinny, small = self.skinny_linear, self.small_linear
        if (
            skinny is not None
            and residual_TD is None  # the product before has added it
            and skinny.fits(x_TD, weight_ND, normed=True, gated=gated)
        ):
            return skinny.norm_linear(x_TD, gain_D, eps, weight_ND, gated=gated), x_TD
        if small is not None and x_TD.ndim == 2 and small.fits(x_TD, weight_ND, normed=True):
            return small.norm_linear(x_TD, residual_TD, gain_D, eps, weight_ND, gated=gated)
        x_TD, residual_TD = self.norm(x_TD, residual_TD, gain_D, eps)
        if not gated:
            return self.slices(x_TD, weight_ND), residual_TD
        if self.gated_linear is not None and self.gated_linear.fits(x_TD, weight_ND):
            return self.gated_linear(x_TD, weight_ND), residual_TD
        return self.silu_mul(self.linear(x_TD, weight_ND)), residual_TD


def select_ops(kernels: Kernels, device: torch.device) -> Ops:
    """What the recipe asks for. Raises ConfigError if that cannot run here."""
    chosen = {}
    for field in fields(Ops):
        asked = getattr(kernels, field.name)
        kind = fastest(field.name, device) if asked == "auto" else asked
        if kind == "triton" and device.type == "cpu":
            raise ConfigError(f"kernels.{field.name} is triton, which needs a GPU; use torch")
        if kind == "cute" and (reason := obstacle(device)) is not None:
            raise ConfigError(f"kernels.{field.name} is cute, but {reason}; use torch")
        if kind == "compile":
            chosen[field.name] = compiled(field.name, device)
        else:
            chosen[field.name] = resolve(IMPLEMENTATIONS[kind], field.name)
    return Ops(**chosen)


def compiled(operation: str, device: torch.device) -> Any:  # noqa: ANN401
    """The reference through torch.compile: for one token, for the first number, then for any.

    Only sizes that have changed become variables. With `dynamic=True` widths would be, too.
    """
    if device.type == "cpu" and shutil.which("g++") is None:
        raise ConfigError(f"kernels.{operation} is compile, which needs g++ on a CPU; use torch")
    return torch.compile(resolve(IMPLEMENTATIONS["torch"], operation))


def fastest(operation: str, device: torch.device) -> str:
    """What "auto" means on this device."""
    if operation in IMPLEMENTATIONS["cute"]:
        return "torch" if obstacle(device) else "cute"
    if device.type == "cpu":
        return "torch"
    return "library" if operation in IMPLEMENTATIONS["library"] else "triton"
