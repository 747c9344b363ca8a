"""How routed experts are computed, and which products of theirs serve how many tokens.

The number of tokens, which a CUDA graph fixes, decides, never what was chosen for them: products
are asked by the pairs of token and expert that this rank expects if experts are chosen equally
often. With few rows an expert it is the weights that take time, and with many the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nanovllm_kernels.experts_reference import EXPERTS, ExpertProducts, combine
from nanovllm_kernels.route_reference import ExpertRows, route, sort_rows
from torch import Tensor

from nanovllm.experts import Experts, ExpertsByRank, Spread, evenly
from nanovllm.parallel.mesh import Span


class ExpertKernels(NamedTuple):
    """One implementation; the meaning of each part is that of the one for a CPU, in plain torch."""

    route: Callable[..., tuple[Tensor, Tensor]]
    sort: Callable[..., ExpertRows]
    few: ExpertProducts  # of any number of rows
    many: tuple[ExpertProducts, ...]  # asked in this order; what fits none is for `few`
    combine: Callable[..., Tensor]
    is_uniform: bool = False  # whether a hash chooses, for measurements
    unsorted: int = 0  # pairs at most, that `few` takes as they are, if all experts are here
    norm_router: Callable[..., tuple[Tensor, Tensor]] | None = None  # of few rows
    down_combine: Callable[..., Tensor] | None = None  # of unsorted pairs, in one launch
    spread: Spread | None = None  # which experts each rank holds; None: an equal share

    def as_asked(self, asked: Experts) -> ExpertKernels:
        """Raises ConfigError if the recipe's section names a file that is none."""
        spread = None if asked.placement is None else Spread(asked.placement)
        return self._replace(is_uniform=asked.routing == "uniform", spread=spread)

    def ranks(self, layer: int, own: Span) -> ExpertsByRank:
        """The experts that each rank holds. `own`: an equal share of them."""
        sizes = own.full, own.full // own.count
        return evenly(*sizes) if self.spread is None else self.spread.ranks(layer, *sizes)


TORCH = ExpertKernels(route, sort_rows, EXPERTS, (), combine)


def products_for(
    kernels: ExpertKernels, num_pairs: int, experts: Span, gate_up_E2FD: Tensor
) -> tuple[ExpertProducts, int]:
    """The products for steps with so many pairs, and the tile that rows are sorted in for them; 0:
    they are not sorted.

    `experts`: which of all the weights on this rank belong to.
    """
    if num_pairs <= kernels.unsorted and experts.count == experts.full:
        return kernels.few, 0
    expected = num_pairs * experts.count // experts.full
    fitting = (products for products in kernels.many if products.fits(expected, gate_up_E2FD))
    products = next(fitting, kernels.few)
    return products, products.tile(expected, experts.count)
