"""Operations that layers are composed of, one implementation each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from nanovllm_kernels.adapters.reference import add_deltas
from nanovllm_kernels.attention.latent_reference import latent_store
from nanovllm_kernels.fp8_reference import Quantised, Scaled, Weight
from torch import Tensor
from torch.nn import functional as F

from nanovllm.attention import delta_kernels
from nanovllm.attention.delta_kernels import DeltaKernels
from nanovllm.layers.expert_products import TORCH, ExpertKernels
from nanovllm.layers.products import (
    LIBRARY,
    Fusion,
    Multiply,
    Norm,
    ProductKernel,
    RowTable,
    first_that_fits,
)
from nanovllm.layers.residual import Added, Parted, Residual, as_tensor


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
    latent_store
        The same for latent attention: nanovllm_kernels.attention.latent_reference.latent_store.
    experts
        The kernels of routed experts: layers/expert_products.py.
    delta
        The kernels of the gated delta rule: attention/delta_kernels.py.
    add_deltas
        The deltas of LoRA adapters: nanovllm_kernels.adapters.reference.add_deltas.
    products
        The products of rows with weights: layers/products.py.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor]
    rope_store: Callable[..., Tensor]
    latent_store: Callable[..., Tensor] = latent_store
    experts: ExpertKernels = TORCH
    delta: DeltaKernels = delta_kernels.TORCH
    add_deltas: Callable[..., Tensor] = add_deltas
    multiply: Multiply = F.linear  # products without a kernel: run(x_TD, weight_ND) -> y_TN
    products: tuple[ProductKernel, ...] = LIBRARY  # for every weight, in order of preference
    invariant: bool = False  # no result of a row depends on the other rows
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

    def by_rows(self, weight: Weight, fusion: Fusion) -> RowTable:
        """Return the table of the products of weights of this type and shape, by rows."""
        type_of_weight: tuple[object, ...] = (weight.dtype,)
        if isinstance(weight, Scaled):
            type_of_weight = (weight.dtype, weight.block_rows, weight.rows_dtype)
        key = (fusion, weight.shape, type_of_weight)
        if key not in self.tables:
            self.tables[key] = RowTable(partial(first_that_fits, self.products, weight, fusion))
        return self.tables[key]


def norm_quantised(
    residual: Residual, norm: Norm, norm_quantise: Callable[..., Quantised]
) -> tuple[Quantised, Added]:
    """Return the normalised stream, quantised, and the stream. May overwrite its input."""
    if isinstance(residual, Parted):
        residual = residual.added()
    if isinstance(residual, Added):
        return norm_quantise(residual.stream_TD, None, *norm), residual
    x = as_tensor(residual.update)
    return norm_quantise(x, residual.stream_TD, *norm), Added(residual.stream_TD)
