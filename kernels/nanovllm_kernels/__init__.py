"""Our kernels. Tables from names to what `nanovllm check-kernels` runs, and what it compiles."""

KERNELS = {  # "module:attribute" of a case.Kernel
    "rms_norm": "nanovllm_kernels.norm:RMS_NORM",
    "add_rms_norm": "nanovllm_kernels.norm:ADD_RMS_NORM",
    "silu_mul": "nanovllm_kernels.activation:SILU_MUL",
    "mean_squares": "nanovllm_kernels.rope_cases:MEAN_SQUARES",
    "rope_store": "nanovllm_kernels.rope_cases:ROPE_STORE",
    "gated_linear": "nanovllm_kernels.gated_linear:KERNEL",
    "quantise": "nanovllm_kernels.quantise_cases:QUANTISE",
    "silu_mul_quantise": "nanovllm_kernels.quantise_cases:SILU_MUL_QUANTISE",
    "grouped_down": "nanovllm_kernels.grouped_linear:DOWN",
    "grouped_fp8_gate_up": "nanovllm_kernels.grouped_fp8:GATE_UP",
    "grouped_fp8_down": "nanovllm_kernels.grouped_fp8:DOWN",
    "grouped_64_gate_up": "nanovllm_kernels.grouped_linear:GATE_UP_64",
    "grouped_64_down": "nanovllm_kernels.grouped_linear:DOWN_64",
    "sliced_linear": "nanovllm_kernels.library_linear:SLICED",
    "added_linear": "nanovllm_kernels.library_linear:ADDED",
    "block_fp8_linear": "nanovllm_kernels.block_fp8_cases:LINEAR",
    "block_fp8_experts": "nanovllm_kernels.block_fp8_cases:EXPERTS",
    "norm_quantise": "nanovllm_kernels.quantise_cases:NORM_QUANTISE",
    "few_fp8_linear": "nanovllm_kernels.few_fp8_cases:LINEAR",
    "few_fp8_linear_add": "nanovllm_kernels.few_fp8_cases:LINEAR_ADD",
    "few_fp8_norm_linear": "nanovllm_kernels.few_fp8_cases:NORM_LINEAR",
    "few_fp8_norm_gate_up": "nanovllm_kernels.few_fp8_cases:NORM_GATE_UP",
    "few_fp8_quantised": "nanovllm_kernels.few_fp8_cases:QUANTISED",
    "skinny_linear": "nanovllm_kernels.skinny_cases:LINEAR",
    "skinny_linear_add": "nanovllm_kernels.skinny_cases:LINEAR_ADD",
    "skinny_norm_linear": "nanovllm_kernels.skinny_cases:NORM_LINEAR",
    "skinny_norm_gate_up": "nanovllm_kernels.skinny_cases:NORM_GATE_UP",
    "paged_decode": "nanovllm_kernels.paged_decode:PAGED_DECODE",
    "paged_decode_cute": "nanovllm_kernels.paged_decode_cute_cases:PAGED_DECODE_CUTE",
    "paged_prefill": "nanovllm_kernels.paged_prefill:PAGED_PREFILL",
    "latent_decode": "nanovllm_kernels.latent_decode:LATENT_DECODE",
    "latent_store": "nanovllm_kernels.latent_store_cases:LATENT_STORE",
    "latent_decode_cute": "nanovllm_kernels.latent_decode_cute_cases:LATENT_DECODE_CUTE",
    "gather_rows": "nanovllm_kernels.batch_prep:GATHER_ROWS",
    "apply_mask": "nanovllm_kernels.apply_mask:KERNEL",
    "draw": "nanovllm_kernels.sampling:DRAW",
    "winners": "nanovllm_kernels.sampling:WINNERS",
    "best": "nanovllm_kernels.sampling:BEST",
    "thresholds": "nanovllm_kernels.thresholds:THRESHOLDS",
    "write_back": "nanovllm_kernels.batch_prep:WRITE_BACK",
    "route": "nanovllm_kernels.routed_cases:ROUTE",
    "sort_rows": "nanovllm_kernels.routed_cases:SORT_ROWS",
    "combine": "nanovllm_kernels.routed_cases:COMBINE",
    "few_gate_up": "nanovllm_kernels.routed_cases:GATE_UP",
    "few_down": "nanovllm_kernels.routed_cases:DOWN",
    "tiled_gate_up": "nanovllm_kernels.routed_cases:GATE_UP_128",
    "tiled_down": "nanovllm_kernels.routed_cases:DOWN_128",
    "delta_decode": "nanovllm_kernels.delta_cases:DECODE",
    "delta_drafted": "nanovllm_kernels.delta_cases:DRAFTED",
    "delta_prefill": "nanovllm_kernels.delta_cases:PREFILL",
    "ngram": "nanovllm_kernels.ngram:NGRAM",
}

# In CuTe DSL: compiled for the GPU present, else for what CUTE_DSL_ARCH names. Of what, with what.
COMPILED: dict[str, tuple[str, tuple[object, ...]]] = {
    "flash_forward": ("nanovllm_kernels.flash_prefill:compile_causal", (2, 128, 128, "bfloat16")),
    "gated_linear": ("nanovllm_kernels.gated_linear:compile_gated", ("bfloat16", True)),
    **{
        name: ("nanovllm_kernels.block_fp8_cute:compile_tile", (*tile, 128, 0, is_grouped))
        for name, tile, is_grouped in (
            ("block_fp8_linear", (256, 128, 2), 0),
            ("block_fp8_experts", (256, 128, 2), 1),
            ("grouped_fp8_gate_up", (128, 128, 1), 1),
            ("grouped_fp8_down", (64, 64, 1), 1),
        )
    },
    **{
        f"grouped_{name}": (f"nanovllm_kernels.grouped_linear:compile_{kind}", arguments)
        for name, kind, arguments in (
            ("down", "down", ("bfloat16", (128, 192, 1, True))),
            ("64_gate_up", "gate_up", ("bfloat16", (64, 256, 1, True), 8)),
            ("64_down", "down", ("bfloat16", (64, 256, 1, True))),
        )
    },
    "block_fp8_linear": ("nanovllm_kernels.block_fp8_cute:compile_tile", (256, 128, 2, 128, 0, 0)),
    "block_fp8_experts": ("nanovllm_kernels.block_fp8_cute:compile_tile", (256, 128, 2, 128, 0, 1)),
    "paged_decode_cute": ("nanovllm_kernels.paged_decode_cute:compile_decode", (2, 128, 128, 0)),
    "latent_decode_cute": ("nanovllm_kernels.latent_decode_cute:compile_decode", (16, 128, 0)),
    **{
        f"skinny_{kind}": ("nanovllm_kernels.skinny_linear:compile_product", (64, 2, False, 1, *of))
        for kind, of in {
            "linear": (False, False, False),
            "linear_add": (False, False, True),
            "norm_linear": (True, False, False),
            "norm_gate_up": (True, True, False),
        }.items()
    },
}
