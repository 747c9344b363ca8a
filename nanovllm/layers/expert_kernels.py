"""Routed experts on a GPU: in Triton, and with products of many rows in CuTe DSL."""

from __future__ import annotations

from nanovllm_kernels.combine import MOST_TOKENS, combine, down_combine
from nanovllm_kernels.experts import FEW_EXPERTS
from nanovllm_kernels.grouped_fp8 import GROUPED_FP8
from nanovllm_kernels.grouped_linear import GROUPED
from nanovllm_kernels.route import route_and_sort

from nanovllm.layers.expert_products import ExpertKernels

TRITON = ExpertKernels(route_and_sort, FEW_EXPERTS, (), combine, down_combine, MOST_TOKENS)
CUTE = TRITON._replace(many=(GROUPED, GROUPED_FP8))
