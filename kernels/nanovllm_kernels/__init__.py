"""Our kernels. A table from names to what `nanovllm check-kernels` runs: "module:attribute"."""

KERNELS = {
    "rms_norm": "nanovllm_kernels.norm:RMS_NORM",
    "add_rms_norm": "nanovllm_kernels.norm:ADD_RMS_NORM",
    "silu_mul": "nanovllm_kernels.activation:SILU_MUL",
    "rope_store": "nanovllm_kernels.rope_store:ROPE_STORE",
    "small_linear": "nanovllm_kernels.small_linear:LINEAR",
    "norm_linear": "nanovllm_kernels.small_linear:NORM_LINEAR",
    "norm_gate_up": "nanovllm_kernels.small_linear:NORM_GATE_UP",
    "gated_linear": "nanovllm_kernels.gated_linear:KERNEL",
    "skinny_linear": "nanovllm_kernels.skinny_cases:LINEAR",
    "skinny_linear_add": "nanovllm_kernels.skinny_cases:LINEAR_ADD",
    "skinny_norm_linear": "nanovllm_kernels.skinny_cases:NORM_LINEAR",
    "skinny_norm_gate_up": "nanovllm_kernels.skinny_cases:NORM_GATE_UP",
    "paged_decode": "nanovllm_kernels.paged_decode:PAGED_DECODE",
    "paged_decode_cute": "nanovllm_kernels.paged_decode_cute:PAGED_DECODE_CUTE",
    "paged_prefill": "nanovllm_kernels.paged_prefill:PAGED_PREFILL",
    "gather_decode": "nanovllm_kernels.batch_prep:GATHER_DECODE",
    "allow": "nanovllm_kernels.allow:KERNEL",
    "draw": "nanovllm_kernels.sampling:DRAW",
    "floors": "nanovllm_kernels.floors:FLOORS",
    "settle": "nanovllm_kernels.batch_prep:SETTLE",
}
