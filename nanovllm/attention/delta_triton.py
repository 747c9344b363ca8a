"""The gated delta rule in Triton."""

from __future__ import annotations

from nanovllm_kernels.delta.decode import mix_decodes, mix_drafted
from nanovllm_kernels.delta.prefill import mix_rows

from nanovllm.attention.delta_kernels import DeltaKernels

TRITON = DeltaKernels(mix_rows, mix_decodes, mix_drafted, range(2, 5))
