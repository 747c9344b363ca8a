"""Mixture of experts with its norm: each token passes through a few of many gated MLPs.

A pair is a token and one of its experts. Pairs are sorted by expert on the device, multiplied by
their expert's weights, and summed by token. The host never waits for the routing, and no shape
depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from nanovllm_kernels.experts.route_reference import Placed, Routing, Uniform
from torch import Tensor

from nanovllm.attention.base import AdaptedRows, ForwardContext
from nanovllm.layers.experts.exchange import LaneExchange
from nanovllm.layers.experts.placement import ExpertPlaces
from nanovllm.layers.experts.products import ExpertMLPs
from nanovllm.layers.experts.router import Router
from nanovllm.layers.experts.shared import SharedExpert
from nanovllm.layers.linear import Layer, parameter, with_pending_sum
from nanovllm.layers.ops import Ops
from nanovllm.layers.residual import Added, Pending, Residual
from nanovllm.parallel.mesh import Mesh, Span

FEW_ROWS = 16  # rows up to which the norm and the router's product are one launch
MOST_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sizes and routing of a family's experts. Those that are cut also have their config field.

    The router computes in the dtype of its weight. If it is `exact`, that is float32, and a
    selection bias is added to the scores. `gates_shared`: the shared expert's result is multiplied
    by the sigmoid of one more router output.
    """

    hidden_size: int
    experts: tuple[str, int]  # (field of config.json, number)
    inner: tuple[str, int]  # (field of config.json, inner size of an expert)
    num_chosen: int
    rule: Routing
    exact: bool
    shared: int = 0  # inner size of the shared expert; 0 for none
    gates_shared: bool = False

    def routes_shared(self, mesh: Mesh, ops: Ops) -> bool:
        """Return True if the shared expert runs as one more routed expert.

        It has the same width as the others then, and all experts are on this rank.
        """
        return self.shared == self.inner[1] and mesh.ep_size == 1 and ops.experts.spread is None


class MoE(Layer):
    """Norm, router, experts. `layer` is its index; `is_last`: only sampled tokens arrive."""

    def __init__(
        self, mixture: Mixture, *, eps: float, layer: int, is_last: bool, mesh: Mesh, ops: Ops
    ) -> None:
        super().__init__()
        self.eps, self.mesh, self.ops = eps, mesh, ops
        self.layer, self.is_last = layer, is_last
        hidden_size, rule = mixture.hidden_size, mixture.rule
        num_experts, inner = mixture.experts[1], mixture.inner[1]
        everyone = Span(num_experts, 0, num_experts)
        share = everyone if mesh.ep_size == 1 else mesh.span(*mixture.experts)
        ranks = ops.experts.ranks(layer, share)
        self.places = ExpertPlaces(ranks, share.start // share.count, num_experts)
        own = self.places.own
        inner_span = mesh.span(*mixture.inner) if mesh.ep_size == 1 else Span(inner, 0, inner)
        router_parts = [("", everyone)]
        if mixture.shared > 0 and mixture.gates_shared:
            router_parts.append(("shared", Span(1, 0, 1)))
        self.shared: SharedExpert | None = None
        if mixture.routes_shared(mesh, ops):
            rule = replace(rule, shared="gated" if mixture.gates_shared else "whole")
            own = Span(num_experts + 1, 0, num_experts + 1)
        elif mixture.shared:
            self.shared = SharedExpert(
                hidden_size=hidden_size,
                intermediate_size=mixture.shared,
                eps=eps,
                mesh=mesh,
                ops=ops,
            )
        self.num_ranked = num_experts + (rule.shared == "gated")  # logits passed to route()
        self.norm_weight = parameter(hidden_size) if self.shared is None else None
        self.router = Router(router_parts, hidden_size, ops, exact=mixture.exact)
        self.bias = parameter(num_experts, dtype=torch.float32) if mixture.exact else None
        self.experts = ExpertMLPs(
            hidden_size=hidden_size,
            experts=own,
            inner=inner_span,
            num_chosen=mixture.num_chosen,
            rule=rule,
            kernels=ops.experts,
            places=self.places.places,
        )
        self.exchange = LaneExchange(self.experts, mesh) if mesh.lanes > 1 else None

    def forward(self, residual: Residual, ctx: ForwardContext) -> Residual:
        """Return the residual stream plus the block's result. May overwrite its input."""
        rows = ctx.adapters and ctx.adapted(is_last=self.is_last)
        x_TD, logits_TE, stream = self._normed(residual, rows)
        shared_TD: Tensor | None = None
        if self.shared is not None:
            shared_TD, stream = self.shared.result(stream, self._shared_gate(logits_TE), rows)
        routed = self._route(logits_TE, ctx)
        if self.exchange is not None:
            self.exchange.add_results(x_TD, routed, stream.stream_TD, ctx.lane_tokens or len(x_TD))
            return stream if shared_TD is None else Pending(stream.stream_TD, shared_TD)
        own_stream = stream.stream_TD if self.mesh.tp_size == 1 else None
        if rows is not None and self.experts.deltas is not None:
            y_TD = self.experts.adapted(
                x_TD, *routed, rows=rows, stream_TD=own_stream, shared_TD=shared_TD
            )
        else:
            y_TD = self.experts(x_TD, *routed, own_stream, shared_TD)
        if self.mesh.tp_size > 1:
            return with_pending_sum(y_TD, stream, self.mesh)
        return Added(y_TD)

    def _normed(self, residual: Residual, rows: AdaptedRows | None) -> tuple[Tensor, Tensor, Added]:
        """Return the normalised stream, the router's logits and the stream."""
        owner = self if self.shared is None else self.shared.gate_up
        norm_weight = owner.get_parameter("norm_weight")
        norm_router = self.ops.experts.norm_router
        if rows is not None:
            x_TD, stream = self.ops.norm(residual, norm_weight, self.eps)
            return x_TD, self.router.adapted_product(x_TD, rows), stream
        if norm_router and isinstance(residual, Added) and len(residual.stream_TD) <= FEW_ROWS:
            x_TD, logits_TE = norm_router(
                residual.stream_TD, norm_weight, self.eps, self.router.weight
            )
            return x_TD, logits_TE, residual
        x_TD, stream = self.ops.norm(residual, norm_weight, self.eps)
        return x_TD, self.router.product(x_TD), stream

    def _shared_gate(self, logits_TE: Tensor) -> Tensor | None:
        """Return the column of the shared expert's gate, if any. Columns after it are padding."""
        if logits_TE.shape[1] == self.num_ranked:
            return None
        return logits_TE[:, self.num_ranked, None]

    def _route(self, logits_TE: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return weights_TK and experts_TK of the chosen experts, as replicas of all ranks."""
        uniform, placed = self._routing_inputs(ctx)
        return self.experts.route(logits_TE[:, : self.num_ranked], self.bias, uniform, placed)

    def _routing_inputs(self, ctx: ForwardContext) -> tuple[Uniform | None, Placed | None]:
        """Return the tokens' slots and positions, and their slot mappings, where they are needed.

        The first two select experts in uniform synthetic routing. The last selects a replica of the
        chosen expert.
        """
        is_uniform, is_counted = self.ops.experts.is_uniform, self.places.tokens_X is not None
        assert is_counted or self.ops.experts.spread is None, "replicas need ExpertPlaces.count()"
        if not is_uniform and not is_counted:
            return None, None
        batch = ctx.batch
        slots_T, positions_T, at_T = batch.slots_T, batch.positions_T, batch.slot_mapping_T
        if self.is_last and not ctx.all_hidden and batch.sampled_at is not None:
            slots_T, positions_T, at_T = map(batch.sampled, (slots_T, positions_T, at_T))
            at_T = at_T.where(batch.sampled_at >= 0, 0)  # those that pad a piecewise graph
        layer = self.layer + MOST_LAYERS * self.mesh.lane  # lanes have the same slots
        uniform = (slots_T, positions_T, layer) if is_uniform else None
        return uniform, self.places.placed(at_T) if is_counted else None

    def elements(self, pending: int, *, fuses_gate: bool) -> int:
        """Return the elements per token that are allocated at once after the norm.

        Any rank may have all pairs of a token, so the results of gate_up and of down count for all
        of them. The block's result comes in addition.
        """
        hidden_size, inner = self.experts.down.shape[1:]
        total = len(self.router.weight) + max(pending, hidden_size)
        if self.shared is not None:
            total += hidden_size
        if self.exchange is not None:
            total += self.exchange.elements()
        return total + self.experts.num_chosen * (hidden_size + inner + 8)  # 8: the sorted lists
