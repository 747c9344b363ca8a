"""The gated delta rule in Triton, and in one order of sums for kernels.invariant."""

from __future__ import annotations

from nanovllm_kernels.delta import ordered
from nanovllm_kernels.delta.decode import mix_decodes, mix_drafted
from nanovllm_kernels.delta.prefill import mix_rows

from nanovllm.attention.delta_kernels import DeltaKernels

TRITON = DeltaKernels(mix_rows, mix_decodes, mix_drafted, range(2, 5))
ORDERED = DeltaKernels(ordered.mix_rows, ordered.mix_decodes, ordered.mix_drafted, range(2, 5))
