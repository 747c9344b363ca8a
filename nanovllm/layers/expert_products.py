"""Interface of the kernels of routed experts, and its implementation in plain torch.

The products are chosen in experts/products.py. This file is not in that folder, because ops.py
imports it and the folder's layers import ops.py.
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
    # Whether `few` takes a number of pairs without sorting them, if all experts are local. The
    # second argument is the weight of gate and up.
    is_unsorted: Callable[[int, Tensor], bool] = lambda *_: False
    norm_router: Callable[..., tuple[Tensor, Tensor]] | None = None  # for few rows
    down_combine: Callable[..., Tensor] | None = None  # for unsorted pairs, in one launch
    spread: Spread | None = None  # placement of experts on ranks; None: equal shares in order

    def with_options(self, options: Experts) -> ExpertKernels:
        """Return these kernels with the settings of the recipe's section `experts`.

        Raise ConfigError if its placement file cannot be read.
        """
        spread = None if options.placement is None else Spread(options.placement)
        return self._replace(is_uniform=options.routing == "uniform", spread=spread)

    def ranks(self, layer: int, own: Span) -> ExpertsByRank:
        """Return the experts of each rank. `own` is this rank's equal share."""
        num_ranks = own.full // own.count
        if self.spread is None:
            return evenly(own.full, num_ranks)
        return self.spread.ranks(layer, own.full, num_ranks)


TORCH = ExpertKernels(route=route, sort=sort_rows, few=EXPERTS, many=(), combine=combine)
