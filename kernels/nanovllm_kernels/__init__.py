"""Tables of the kernels that `nanovllm check-kernels` runs and of those that it compiles."""

CHECKED = {  # folder: module: names of its case.Kernel objects, which are upper case there
    "products": {
        "quantise_cases": "quantise silu_mul_quantise norm_quantise few_quantise",
        "block_fp8_cases": "block_fp8_linear block_fp8_experts block_fp8_gated experts_gated",
        "few_fp8_cases": "few_fp8_linear few_fp8_linear_add few_fp8_norm_linear"
        " few_fp8_norm_gate_up few_fp8_quantised",
        "per_head": "per_head",
        "skinny_cases": "skinny_linear skinny_linear_add skinny_norm_linear skinny_norm_gate_up",
    },
    "attention": {
        "paged_decode": "paged_decode",
        "paged_prefill": "paged_prefill short_prefill",
        "latent_decode": "latent_decode",
        "latent_store": "latent_store",
        "cute_cases": "paged_decode_cute latent_decode_cute",
    },
    "adapters": {"deltas": "add_deltas gated_deltas"},
    "delta": {
        "cases": "delta_decode delta_drafted delta_ordered delta_ordered_drafted delta_prefill"
    },
    "experts": {
        "grouped_linear": "grouped_gate_up grouped_down grouped_64_gate_up",
        "grouped_fp8": "grouped_fp8_gate_up grouped_fp8_down",
        "routed_cases": "route sort_rows combine few_gate_up few_down tiled_gate_up tiled_down",
    },
    "sampling": {
        "batch_prep": "gather_rows write_back",
        "apply_mask": "apply_mask",
        "draft_rows": "first_rows later_rows",
        "draw": "draw winners best",
        "thresholds": "thresholds",
        "ngram": "ngram",
    },
    "norms": {
        "norm": "rms_norm add_rms_norm",
        "activation": "silu_mul sigmoid_mul",
        "rope_cases": "mean_squares rope_store",
    },
}
KERNELS = {  # name: "module:attribute" of a case.Kernel
    **{
        name: f"nanovllm_kernels.{folder}.{module}:{name.upper()}"
        for folder, modules in CHECKED.items()
        for module, names in modules.items()
        for name in names.split()
    },
    # These are defined in the module of the function that the layers call.
    "gated_linear": "nanovllm_kernels.products.gated_linear:KERNEL",
    "sliced_linear": "nanovllm_kernels.products.library_linear:SLICED",
    "added_linear": "nanovllm_kernels.products.library_linear:ADDED",
}

# Kernels in CuTe DSL, as (compile function, arguments). They are compiled for the GPU present, and
# without a GPU for the architecture in CUTE_DSL_ARCH.
COMPILED: dict[str, tuple[str, tuple[object, ...]]] = {
    "flash_forward": (
        "nanovllm_kernels.attention.flash_prefill:compile_causal",
        (2, 128, 128, "bfloat16"),
    ),
    "gated_linear": ("nanovllm_kernels.products.gated_linear:compile_gated", ("bfloat16", True)),
    **{
        name: ("nanovllm_kernels.products.block_fp8_cute:compile_tile", (*tile, 128, 0, *kind))
        for name, tile, kind in (
            ("block_fp8_linear", (256, 128, 2), (0, 0)),
            ("block_fp8_experts", (256, 128, 2), (1, 0)),
            ("block_fp8_gated", (128, 256, 2), (0, 1)),
            ("experts_gated", (128, 256, 2), (1, 1)),
            ("grouped_fp8_gate_up", (128, 256, 1), (1, 1)),
            ("grouped_fp8_down", (64, 64, 1), (1, 0)),
        )
    },
    "grouped_down": (
        "nanovllm_kernels.experts.grouped_linear:compile_down",
        ("bfloat16", (192, 128, 2, True)),
    ),
    "paged_decode_cute": (
        "nanovllm_kernels.attention.paged_decode_cute:compile_decode",
        (2, 128, 128, 0),
    ),
    "latent_decode_cute": (
        "nanovllm_kernels.attention.latent_decode_cute:compile_decode",
        (16, 128, 0),
    ),
    **{
        f"{name}_{kind}": (f"nanovllm_kernels.products.{module}:compile_product", (*shape, *of))
        for name, module, shape in (
            ("skinny", "skinny_linear", (64, 2, 2, 1)),
            ("few_fp8", "few_fp8_cute", (8, 4, 37, 8, True)),
        )
        for kind, of in {
            "linear": (False, False, False),
            "linear_add": (False, False, True),
            "norm_linear": (True, False, False),
            "norm_gate_up": (True, True, False),
        }.items()
    },
}
