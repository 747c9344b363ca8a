"""Our kernels. A table from names to what `nanovllm check-kernels` runs: "module:attribute"."""

KERNELS = {
    "rms_norm": "nanovllm_kernels.norm:RMS_NORM",
    "add_rms_norm": "nanovllm_kernels.norm:ADD_RMS_NORM",
    "silu_mul": "nanovllm_kernels.activation:SILU_MUL",
    "rope_store": "nanovllm_kernels.rope_store:ROPE_STORE",
    "gated_linear": "nanovllm_kernels.gated_linear:KERNEL",
    "sliced_linear": "nanovllm_kernels.library_linear:SLICED",
    "added_linear": "nanovllm_kernels.library_linear:ADDED",
    "skinny_linear": "nanovllm_kernels.skinny_cases:LINEAR",
    "skinny_linear_add": "nanovllm_kernels.skinny_cases:LINEAR_ADD",
    "skinny_norm_linear": "nanovllm_kernels.skinny_cases:NORM_LINEAR",
    "skinny_norm_gate_up": "nanovllm_kernels.skinny_cases:NORM_GATE_UP",
    "paged_decode": "nanovllm_kernels.paged_decode:PAGED_DECODE",
    "paged_decode_cute": "nanovllm_kernels.paged_decode_cute:PAGED_DECODE_CUTE",
    "paged_prefill": "nanovllm_kernels.paged_prefill:PAGED_PREFILL",
    "gather_rows": "nanovllm_kernels.batch_prep:GATHER_ROWS",
    "apply_mask": "nanovllm_kernels.apply_mask:KERNEL",
    "draw": "nanovllm_kernels.sampling:DRAW",
    "thresholds": "nanovllm_kernels.thresholds:THRESHOLDS",
    "write_back": "nanovllm_kernels.batch_prep:WRITE_BACK",
    "ngram": "nanovllm_kernels.ngram:NGRAM",
}
