"""Kernels of routed experts on a GPU: Triton, and CuTe DSL for products of many rows."""

from __future__ import annotations

from nanovllm_kernels.combine import combine
from nanovllm_kernels.expert_rows import sort_rows
from nanovllm_kernels.experts import FEW_EXPERTS, down_combine
from nanovllm_kernels.grouped_fp8 import GROUPED_FP8
from nanovllm_kernels.grouped_linear import GROUPED
from nanovllm_kernels.norm import norm_router
from nanovllm_kernels.route import route

from nanovllm.layers.expert_products import ExpertKernels

TRITON = ExpertKernels(
    route=route,
    sort=sort_rows,
    few=FEW_EXPERTS,
    many=(),
    combine=combine,
    unsorted=32,
    norm_router=norm_router,
    down_combine=down_combine,
)
CUTE = TRITON._replace(many=(GROUPED, GROUPED_FP8))
