"""Delta of one product by LoRA adapters: y += s (x A^T) B^T, for the rows that have an adapter.

Decision: the product before a delta takes the normalised input from memory and applies no gate. The
launch that adds the delta applies it. An addition of the residual stream stays in the product if
no sum over ranks follows, and the delta is added to the stream. Steps without an adapter pay
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from nanovllm_kernels.adapters.reference import own_ranks
from torch import Tensor

from nanovllm.attention.base import AdaptedRows
from nanovllm.parallel.mesh import Span


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """One product of the checkpoint, as a part of a product of the model, and its place.

    Of A, this rank has the columns `inputs`. Of B, it has the rows `outputs`, in order.
    """

    inputs: Span
    outputs: tuple[Span, ...]
    a_at: int  # place of its row of A in a row of ranks
    b_at: int  # place of its column of B

    @property
    def width(self) -> int:
        return sum(span.count for span in self.outputs)


@dataclass(frozen=True, slots=True)
class Delta:
    """Matrices of all adapters on the device for one product, as views of the rows of ranks."""

    a_RID: Tensor  # A of each of the product's parts, which have their own inputs' matrices
    b_RN: Tensor  # B, times the scale
    widths: tuple[int, ...]  # columns of each part
    add_deltas: Callable[..., Tensor]  # nanovllm_kernels.adapters.reference.add_deltas

    def add(self, x_TD: Tensor, product: Callable[[], Tensor], rows: AdaptedRows) -> Tensor:
        """Return product() with the deltas, added in place. Columns that only pad it stay."""
        return self._call(x_TD, product, rows, gated=False)

    def add_gated(self, x_TD: Tensor, product: Callable[[], Tensor], rows: AdaptedRows) -> Tensor:
        """Return silu(gate) * up of product() plus the deltas."""
        return self._call(x_TD, product, rows, gated=True)

    def _call(
        self, x_TD: Tensor, product: Callable[[], Tensor], rows: AdaptedRows, *, gated: bool
    ) -> Tensor:
        result: Tensor = self.add_deltas(
            x_TD,
            product,
            self.a_RID,
            self.b_RN,
            widths=self.widths,
            adapter_T=rows.adapter_T,
            owner_P=rows.owner_P,
            tables=rows.tables,
            gated=gated,
        )
        return result

    def absorbed_query(self, q_THA: Tensor, rows: AdaptedRows) -> Tensor:
        """Return what adapters of a latent's keys add to queries in the latent space, as x_THX.

        B has each head's columns of the key, A elements, then those of its value.
        """
        keys_RHA = self._by_head(q_THA)[..., : q_THA.shape[2]]
        h_THR = torch.einsum("tha,rha->thr", q_THA, keys_RHA)
        q_THX: Tensor = h_THR.masked_fill(~self._own_T1R(rows), 0) @ self.a_RID[:, 0]
        return q_THX

    def value(self, x_THX: Tensor, o_THA: Tensor, rows: AdaptedRows) -> Tensor:
        """Return o_THA plus what adapters of a latent's values add. x_THX: sums of latents."""
        values_RHA = self._by_head(o_THA)[..., -o_THA.shape[2] :]
        h_THR = (x_THX @ self.a_RID[:, 0].t()).masked_fill(~self._own_T1R(rows), 0)
        more_THA = torch.einsum("thr,rha->tha", h_THR, values_RHA)
        return (o_THA + more_THA).where((rows.adapter_T >= 0)[:, None, None], o_THA)

    def _by_head(self, x_THA: Tensor) -> Tensor:
        b_RHX: Tensor = self.b_RN.unflatten(1, (x_THA.shape[1], -1))
        return b_RHX

    def _own_T1R(self, rows: AdaptedRows) -> Tensor:
        own_TR: Tensor = own_ranks(rows.adapter_T, rows.owner_P)
        return own_TR[:, None]
