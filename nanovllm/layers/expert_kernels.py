"""Kernels of routed experts on a GPU: Triton, and CuTe DSL for products of many rows."""

from __future__ import annotations

from nanovllm_kernels.experts.combine import combine
from nanovllm_kernels.experts.grouped_fp8 import GROUPED_FP8
from nanovllm_kernels.experts.grouped_linear import GROUPED
from nanovllm_kernels.experts.products import FEW_EXPERTS, down_combine, is_unsorted
from nanovllm_kernels.experts.route import route
from nanovllm_kernels.experts.rows import sort_rows
from nanovllm_kernels.norms.norm import norm_router

from nanovllm.layers.expert_products import ExpertKernels

TRITON = ExpertKernels(
    route=route,
    sort=sort_rows,
    few=FEW_EXPERTS,
    many=(),
    combine=combine,
    is_unsorted=is_unsorted,
    norm_router=norm_router,
    down_combine=down_combine,
)
CUTE = TRITON._replace(many=(GROUPED, GROUPED_FP8))
