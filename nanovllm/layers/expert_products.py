"""Which products of routed experts serve how many tokens.

The number of tokens, which a CUDA graph fixes, decides, never what was chosen for them: products
are asked by the pairs of token and expert that this rank expects if experts are chosen equally
often. With few rows an expert it is the weights that take time, and with many the products.
"""

from __future__ import annotations

from nanovllm_kernels.experts_reference import ExpertProducts
from nanovllm_kernels.grouped_fp8 import GROUPED_FP8
from nanovllm_kernels.grouped_linear import GROUPED
from torch import Tensor

from nanovllm.layers.ops import Ops
from nanovllm.parallel.mesh import Span

# Of many rows an expert, asked in this order; what fits none is for `few_experts`.
MANY: tuple[ExpertProducts, ...] = (GROUPED, GROUPED_FP8)
NONE: tuple[ExpertProducts, ...] = ()


def products_for(
    ops: Ops, num_pairs: int, experts: Span, gate_up_E2FD: Tensor
) -> tuple[ExpertProducts, int]:
    """The products for steps with so many pairs, and the tile that rows are sorted in for them.

    `experts`: which of all the weights on this rank belong to.
    """
    expected = num_pairs * experts.count // experts.full
    fitting = (products for products in ops.many_experts if products.fits(expected, gate_up_E2FD))
    products = next(fitting, ops.few_experts)
    return products, products.tile(expected, experts.count)
