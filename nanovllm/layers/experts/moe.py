"""Mixture of experts with its norm: each token passes through a few of many gated MLPs.

A pair is a token and one of its experts. Pairs are sorted by expert on the device, multiplied by
their expert's weights, and summed by token. The host never waits for the routing, and no shape
depends on it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice

import torch
from nanovllm_kernels.experts.reference import ExpertProducts
from nanovllm_kernels.experts.route_reference import Chosen, ExpertRows, Placed, Routing, Uniform
from nanovllm_kernels.fp8_reference import BLOCK, FP8, Quantised
from nanovllm_kernels.norms.reference import summed
from torch import Tensor, nn

from nanovllm.attention.base import ForwardContext
from nanovllm.layers.expert_products import ExpertKernels, products_for
from nanovllm.layers.experts.router import Router
from nanovllm.layers.fp8 import fp8_parameter, in_blocks
from nanovllm.layers.linear import Layer, Placement, parameter, with_pending_sum
from nanovllm.layers.mlp import MLP
from nanovllm.layers.ops import Implementation, Ops, RowTable
from nanovllm.layers.residual import Added, Pending, Residual, as_tensor
from nanovllm.parallel.mesh import Mesh, Span

FEW_ROWS = 16  # rows up to which the norm and the router's product are one launch
TURNS = 24  # length of the rotation over an expert's replicas: a multiple of 1, 2, 3, 4, 6 and 8
MOST_EXCHANGED = 16384  # tokens of one exchange over lanes
MOST_LAYERS = 1024


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


class MoE(Layer):
    """Norm, router, experts. `layer` is its index; `is_last`: only sampled tokens arrive.

    The router computes in the dtype of its weight. If it is `exact`, that is float32, and a
    selection bias is added to the scores.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        experts: tuple[str, int],
        inner: tuple[str, int],
        num_chosen: int,
        eps: float,
        rule: Routing,
        exact: bool,
        layer: int,
        is_last: bool,
        mesh: Mesh,
        ops: Ops,
        shared: int = 0,
        gates_shared: bool = False,
    ) -> None:
        """`experts` and `inner` are (field of config.json, number).

        `shared` is the inner size of the shared expert, 0 for none. `gates_shared`: its result is
        multiplied by the sigmoid of one more router output. A shared expert of the same width as
        the others runs as one more routed expert, if all experts are on this rank.
        """
        super().__init__()
        self.eps, self.mesh, self.ops = eps, mesh, ops
        self.layer, self.is_last = layer, is_last
        everyone, whole = Span(experts[1], 0, experts[1]), Span(inner[1], 0, inner[1])
        share = everyone if mesh.ep_size == 1 else mesh.span(*experts)
        self.ranks = ops.experts.ranks(layer, share)
        held = self.ranks[rank := share.start // share.count]
        own = Span(len(held) * len(self.ranks), len(held) * rank, len(held))
        local = {expert: index for index, expert in enumerate(held)}
        places = tuple(local.get(expert, -1) for expert in range(experts[1]))
        inner_span = mesh.span(*inner) if mesh.ep_size == 1 else whole
        self.counted: tuple[Tensor, Tensor | None] | None = None
        self.shared = None
        router_parts = [("", everyone)]
        if shared > 0 and gates_shared:
            router_parts.append(("shared", Span(1, 0, 1)))
        if shared == inner[1] and mesh.ep_size == 1 and ops.experts.spread is None:
            rule = replace(rule, shared="gated" if gates_shared else "whole")
            own = Span(experts[1] + 1, 0, experts[1] + 1)
        elif shared:
            self.shared = MLP(
                hidden_size=hidden_size, intermediate_size=shared, eps=eps, mesh=mesh, ops=ops
            )
        self.num_ranked = experts[1] + (rule.shared == "gated")  # logits passed to route()
        self.norm_weight = parameter(hidden_size) if self.shared is None else None
        self.router = Router(router_parts, hidden_size, ops, exact=exact)
        self.bias = parameter(experts[1], dtype=torch.float32) if exact else None
        self.experts = ExpertMLPs(
            hidden_size=hidden_size,
            experts=own,
            inner=inner_span,
            num_chosen=num_chosen,
            rule=rule,
            kernels=ops.experts,
            places=places,
        )

    def count(self, tokens_X: Tensor) -> None:
        """Start counting routed tokens per expert replica in `tokens_X`.

        Padding tokens are not counted. With a placement, the same table maps experts to replicas.
        """
        held = list(chain(*self.ranks))
        copies: list[list[int]] = [[] for _ in range(max(held) + 1)]
        for at, expert in enumerate(held):
            copies[expert].append(at)
        turns = [list(islice(cycle(each), TURNS)) for each in copies]
        copies_EX = torch.tensor(turns, dtype=torch.int32, device=tokens_X.device)
        self.counted = tokens_X, None if held == [*range(len(copies))] else copies_EX

    def forward(self, residual: Residual, ctx: ForwardContext) -> Residual:
        """Return the residual stream plus the block's result. May overwrite its input."""
        x_TD, logits_TE, stream = self._normed(residual)
        shared_TD, stream = self._shared_result(logits_TE, stream)
        uniform, placed = self._routing_inputs(ctx)
        routed = self.experts.route(logits_TE[:, : self.num_ranked], self.bias, uniform, placed)
        if self.mesh.lanes > 1:
            self._exchange(ctx, x_TD, routed, stream.stream_TD)
            return stream if shared_TD is None else Pending(stream.stream_TD, shared_TD)
        if self.mesh.tp_size > 1:
            return with_pending_sum(self.experts(x_TD, *routed, None, shared_TD), stream, self.mesh)
        return Added(self.experts(x_TD, *routed, stream.stream_TD, shared_TD))

    def _exchange(
        self, ctx: ForwardContext, x_TD: Tensor, routed: tuple[Tensor, Tensor], stream_TD: Tensor
    ) -> None:
        """Add to this lane's stream the results of the experts of all ranks.

        Each rank computes the tokens of all lanes, MOST_EXCHANGED at a time.
        """
        mesh, num_tokens = self.mesh, ctx.lane_tokens or len(x_TD)
        most = max(1, MOST_EXCHANGED // mesh.lanes)
        for start in range(0, num_tokens, most):
            size = min(most, num_tokens - start)
            x, weights, experts, own = (
                part[start : start + size] for part in (x_TD, *routed, stream_TD)
            )
            parts_TD = self.experts(*mesh.gather_tokens(x, weights, experts, size))
            mesh.add_own_sums(parts_TD.unflatten(0, (mesh.lanes, size)), own)

    def _normed(self, residual: Residual) -> tuple[Tensor, Tensor, Added]:
        """Return the normalised stream, the router's logits and the stream."""
        owner = self if self.shared is None else self.shared.gate_up
        norm_weight = owner.get_parameter("norm_weight")
        norm_router = self.ops.experts.norm_router
        if norm_router and isinstance(residual, Added) and len(residual.stream_TD) <= FEW_ROWS:
            x_TD, logits_TE = norm_router(
                residual.stream_TD, norm_weight, self.eps, self.router.weight
            )
            return x_TD, logits_TE, residual
        x_TD, stream = self.ops.norm(residual, norm_weight, self.eps)
        return x_TD, self.router.product(x_TD), stream

    def _shared_result(self, logits_TE: Tensor, stream: Added) -> tuple[Tensor | None, Added]:
        """Return this rank's result of the shared expert, or None if the stream includes it."""
        if self.shared is None:
            return None, stream
        y_TF, stream = self.shared.gate_up(stream)
        if logits_TE.shape[1] > self.num_ranked:  # columns after the gate are padding
            y_TF = scaled(y_TF, logits_TE[:, self.num_ranked, None].sigmoid())
        if self.mesh.tp_size > 1:
            return self.shared.down.product(y_TF), stream
        after = self.shared.down(y_TF, stream)
        if isinstance(after, Added):
            return None, after
        assert isinstance(after, Pending)
        return summed(as_tensor(after.update)).to(after.stream_TD.dtype), Added(after.stream_TD)

    def elements(self, pending: int, *, fuses_gate: bool) -> int:
        """Return the elements per token that are allocated at once after the norm.

        Any rank may have all pairs of a token, so the results of gate_up and of down count for all
        of them. The block's result comes in addition.
        """
        hidden_size, inner = self.experts.down.shape[1:]
        total = len(self.router.weight) + max(pending, hidden_size)
        if self.shared is not None:
            total += hidden_size
        if self.mesh.lanes > 1:
            total += 2 * hidden_size  # tokens of all lanes, and their sums
        return total + self.experts.num_chosen * (hidden_size + inner + 8)  # 8: the sorted lists

    def _routing_inputs(self, ctx: ForwardContext) -> tuple[Uniform | None, Placed | None]:
        """Return the tokens' slots and positions, and their slot mappings, where they are needed.

        The first two select experts in uniform synthetic routing. The last selects a replica of the
        chosen expert.
        """
        is_uniform, counted = self.ops.experts.is_uniform, self.counted
        assert counted is not None or self.ops.experts.spread is None, "nothing says where they are"
        if not is_uniform and counted is None:
            return None, None
        batch = ctx.batch
        slots_T, positions_T, at_T = batch.slots_T, batch.positions_T, batch.slot_mapping_T
        if self.is_last and not ctx.all_hidden and batch.sampled_at is not None:
            slots_T, positions_T, at_T = map(batch.sampled, (slots_T, positions_T, at_T))
            at_T = at_T.where(batch.sampled_at >= 0, 0)  # those that pad a piecewise graph
        layer = self.layer + MOST_LAYERS * self.mesh.lane  # lanes have the same slots
        uniform = (slots_T, positions_T, layer) if is_uniform else None
        return uniform, None if counted is None else Placed(at_T, *counted)


def scaled(y: Tensor | Quantised, by_T1: Tensor) -> Tensor | Quantised:
    """Multiply each row by a number. Operations that are linear in rows may follow."""
    if isinstance(y, Quantised):
        return y._replace(scale_BX=y.scale_BX * by_T1.float().t())
    return y * by_T1


def shared_rules(source: str) -> tuple[tuple[str, str, str], ...]:
    """Return the loading rules of a shared expert, which is an MLP or one of the experts.

    `source` is its name in the checkpoint.
    """
    mlp, norm = "layers.{}.mlp", "model.layers.{}.post_attention_layernorm.weight"
    return (
        (norm, f"{mlp}.shared.gate_up.norm_weight", ""),
        (f"{source}.gate_proj.weight", f"{mlp}.shared.gate_up.weight", "gate"),
        (f"{source}.up_proj.weight", f"{mlp}.shared.gate_up.weight", "up"),
        (f"{source}.down_proj.weight", f"{mlp}.shared.down.weight", ""),
        (f"{source}.gate_proj.weight", f"{mlp}.experts.gate_up", "shared gate"),
        (f"{source}.up_proj.weight", f"{mlp}.experts.gate_up", "shared up"),
        (f"{source}.down_proj.weight", f"{mlp}.experts.down", "shared"),
    )


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
