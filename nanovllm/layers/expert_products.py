"""Implementations of routed experts, and the choice of products by number of tokens.

The choice depends on the number of tokens, which a CUDA graph fixes, and never on the routing. It
uses the (token, expert) pairs that this rank expects under uniform routing. With few rows per
expert, the time is that of reading weights; with many, that of arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nanovllm_kernels.experts.reference import EXPERTS, ExpertProducts, combine
from nanovllm_kernels.experts.route_reference import ExpertRows, route, sort_rows
from torch import Tensor

from nanovllm.experts import Experts, ExpertsByRank, Spread, evenly
from nanovllm.parallel.mesh import Span


class ExpertKernels(NamedTuple):
    """One implementation. The plain torch one (TORCH) defines the meaning of each part."""

    route: Callable[..., tuple[Tensor, Tensor]]
    sort: Callable[..., ExpertRows]
    few: ExpertProducts  # for any number of rows
    many: tuple[ExpertProducts, ...]  # in order of preference; `few` if none fits
    combine: Callable[..., Tensor]
    is_uniform: bool = False  # route by a hash instead of logits, for measurements
    unsorted: int = 0  # maximum pairs that `few` takes without sorting, if all experts are local
    norm_router: Callable[..., tuple[Tensor, Tensor]] | None = None  # for few rows
    down_combine: Callable[..., Tensor] | None = None  # for unsorted pairs, in one launch
    spread: Spread | None = None  # placement of experts on ranks; None: equal shares in order

    def as_asked(self, asked: Experts) -> ExpertKernels:
        """Return these kernels with the settings of the recipe's section `experts`.

        Raise ConfigError if its placement file cannot be read.
        """
        spread = None if asked.placement is None else Spread(asked.placement)
        return self._replace(is_uniform=asked.routing == "uniform", spread=spread)

    def ranks(self, layer: int, own: Span) -> ExpertsByRank:
        """Return the experts of each rank. `own` is this rank's equal share."""
        num_ranks = own.full // own.count
        if self.spread is None:
            return evenly(own.full, num_ranks)
        return self.spread.ranks(layer, own.full, num_ranks)


TORCH = ExpertKernels(route=route, sort=sort_rows, few=EXPERTS, many=(), combine=combine)


def products_for(
    kernels: ExpertKernels, num_pairs: int, experts: Span, gate_up_E2FD: Tensor
) -> tuple[ExpertProducts, int]:
    """Return the products for steps with `num_pairs` pairs, and the tile size for sorting rows.

    The tile is 0 if rows are not sorted. `experts` are those of this rank among all.
    """
    if num_pairs <= kernels.unsorted and experts.count == experts.full:
        return kernels.few, 0
    expected = num_pairs * experts.count // experts.full
    fitting = (products for products in kernels.many if products.fits(expected, gate_up_E2FD))
    products = next(fitting, kernels.few)
    return products, products.tile(expected, experts.count)
