"""Products of this rank's routed experts, and their choice by the number of tokens.

The choice depends on the number of tokens, which a CUDA graph fixes, and never on the routing. It
uses the (token, expert) pairs that this rank expects under uniform routing. With few rows per
expert, the time is that of reading weights; with many, that of arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from nanovllm_kernels.adapters.experts import ExpertDeltas, ExpertWeights, adapted_experts
from nanovllm_kernels.experts.reference import ExpertProducts
from nanovllm_kernels.experts.route_reference import Chosen, ExpertRows, Placed, Routing, Uniform
from nanovllm_kernels.fp8_reference import BLOCK, FP8
from torch import Tensor, nn

from nanovllm.attention.base import AdaptedRows
from nanovllm.layers.expert_products import ExpertKernels
from nanovllm.layers.fp8 import fp8_parameter, in_blocks
from nanovllm.layers.linear import Layer, Placement, parameter
from nanovllm.layers.products import Implementation, RowTable
from nanovllm.parallel.mesh import Span


class ExpertMLPs(Layer):
    """Gated MLPs of this rank's experts: weights gate_up [E, 2F, D], gate rows first, and down
    [E, D, F].

    Block fp8 weights have scales, one per 128 rows and 128 inputs; the rows of gate and of up start
    at block borders. `experts` are this rank's replicas among those of all ranks. `places` is the
    local index of each expert, or -1. `inner` is this rank's share of each expert. If the rule has
    a shared expert, it is the last one.
    """

    def __init__(
        self,
        hidden_size: int,
        experts: Span,
        inner: Span,
        num_chosen: int,
        rule: Routing,
        kernels: ExpertKernels,
        places: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.experts, self.num_routed, self.rule = experts, num_chosen, rule
        self.kernels, self.num_chosen = kernels, num_chosen + rule.has_shared
        self.gate_up = parameter(experts.count, 2 * inner.count, hidden_size)
        self.down = parameter(experts.count, hidden_size, inner.count)
        self.gate_up_scale: Tensor | None = None
        self.down_scale: Tensor | None = None
        self.placements = {
            "gate_up": Placement(0, (("gate", inner), ("up", inner)), places, rule.has_shared),
            "down": Placement(1, (("", inner),), places, rule.has_shared),
        }
        self.by_rows = RowTable(self._choose)
        self.deltas: ExpertDeltas | None = None  # None: no adapter changes the experts

    def to_fp8(self) -> None:
        """Change the type of weights whose storage is not allocated yet, and add their scales."""
        for name in ("gate_up", "down"):
            weight, placement = getattr(self, name), self.placements[name]
            parts = tuple((part, in_blocks(span, BLOCK)) for part, span in placement.parts)
            scales = [-(-size // BLOCK) for size in weight.shape[1:]]
            scales[placement.dim] = sum(span.count for _, span in parts)
            setattr(self, name, fp8_parameter(*weight.shape, dtype=FP8))
            scale = fp8_parameter(len(weight), *scales, dtype=torch.float32)
            setattr(self, f"{name}_scale", scale)
            self.placements[f"{name}_scale"] = replace(placement, parts=parts)

    def route(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        uniform: Uniform | None = None,
        placed: Placed | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return weights_TK and experts_TK of the chosen experts, as replicas of all ranks.

        `uniform` has the tokens' positions, for uniform synthetic routing. `placed` has the
        replicas of each expert.
        """
        return self.kernels.route(
            logits_TE,
            bias_E,
            num_chosen=self.num_routed,
            rule=self.rule,
            uniform=uniform,
            placed=placed,
        )

    def forward(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        stream_TD: Tensor | None = None,
        shared_TD: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum y_TD of this rank's pairs, plus shared_TD, plus stream_TD.

        May overwrite the stream.
        """
        y_TD: Tensor = self.by_rows[len(x_TD)].run(
            x_TD, weights_TK, experts_TK, stream_TD=stream_TD, shared_TD=shared_TD
        )
        return y_TD

    def adapted(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        *,
        rows: AdaptedRows,
        stream_TD: Tensor | None = None,
        shared_TD: Tensor | None = None,
    ) -> Tensor:
        """Return the same as forward(), with the deltas of adapters."""
        assert self.deltas is not None
        weights = ExpertWeights(self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        return adapted_experts(
            x_TD,
            weights_TK,
            experts_TK - self.experts.start,
            weights=weights,
            deltas=self.deltas,
            adapter_T=rows.adapter_T,
            owner_P=rows.owner_P,
            stream_TD=stream_TD,
            shared_TD=shared_TD,
        )

    def _choose(self, num_tokens: int) -> Implementation:
        num_pairs = num_tokens * self.num_chosen
        products, tile = products_for(self.kernels, num_pairs, self.experts, self.gate_up)
        return Implementation(products.name, partial(self._run, products, tile))

    def _run(
        self,
        products: ExpertProducts,
        tile: int,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        stream_TD: Tensor | None,
        shared_TD: Tensor | None,
    ) -> Tensor:
        rows: ExpertRows | Chosen = Chosen(experts_TK)
        if tile:
            rows = self.kernels.sort(experts_TK, self.experts.start, self.experts.count, tile)
        y_XF = products.gate_up(x_TD, self.gate_up, self.gate_up_scale, rows, self.num_chosen)
        if isinstance(rows, Chosen) and self.kernels.down_combine is not None:
            return self.kernels.down_combine(
                y_XF,
                self.down,
                self.down_scale,
                rows,
                weights_TK=weights_TK,
                shared_TD=shared_TD,
                residual_TD=stream_TD,
            )
        y_XD = products.down(y_XF, self.down, self.down_scale, rows, self.num_chosen)
        return self.kernels.combine(
            y_XD, weights_TK, rows.row_of_TK, shared_TD=shared_TD, residual_TD=stream_TD
        )


def products_for(
    kernels: ExpertKernels, num_pairs: int, experts: Span, gate_up_E2FD: Tensor
) -> tuple[ExpertProducts, int]:
    """Return the products for steps with `num_pairs` pairs, and the tile size for sorting rows.

    The tile is 0 if rows are not sorted. `experts` are those of this rank among all.

    The result decides the order of all sums over an expert's inputs and over a token's experts.
    With `kernels.invariant`, all products to choose from have the same order.
    """
    if experts.count == experts.full and kernels.is_unsorted(num_pairs, gate_up_E2FD):
        return kernels.few, 0
    expected = num_pairs * experts.count // experts.full
    fitting = (products for products in kernels.many if products.fits(expected, gate_up_E2FD))
    products = next(fitting, kernels.few)
    return products, products.tile(expected, experts.count)


def weight_traffic(model: nn.Module, num_tokens: int, lanes: int = 1) -> tuple[float, float]:
    """Return (bytes of weights read by a step of `num_tokens`, weights multiplied per token).

    Both are of one rank, for uniform routing. A shared expert is always read. Each of several lanes
    has its share of the tokens, but experts get the tokens of all lanes.
    """
    num_bytes = num_weights = 0.0
    for module in model.modules():
        share = read = 1.0
        if isinstance(module, ExpertMLPs):
            share = module.num_chosen / (full := module.experts.full)
            chosen = full - module.num_chosen + module.num_routed  # without the shared expert
            read = 1 - chosen / full * (1 - module.num_routed / chosen) ** num_tokens
        for weight in module.parameters(recurse=False):
            num_bytes += read * weight.nbytes
            num_weights += share * weight.numel() / (1 if isinstance(module, ExpertMLPs) else lanes)
    return num_bytes, num_weights
