"""Plain torch references and cases of GEMMs of up to 128 rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

from nanovllm_kernels.case import Args, Case, Kernel
from nanovllm_kernels.products import linear_cases
from nanovllm_kernels.products.library_linear import add_inputs, add_reference, add_scale
from nanovllm_kernels.products.skinny_linear import SKINNY_LINEAR as PRODUCTS, Kind, shape_of

ROWS = (1, 2, 8, 16, 17, 32, 63, 64, 65, 100, 128)
TIMED = (1, 8, 32, 64, 128)


def cases(
    kind: Kind, inputs: Callable[..., Args], layers: list[tuple[int, int]]
) -> tuple[Case, ...]:
    """Return cases.

    `layers` are N, D of Qwen3-0.6B, Qwen3-8B, Qwen3-Next (also on four GPUs), 32B on four GPUs, and
    Qwen3.5-27B.
    """
    N, D = layers[0]
    spiked = [
        Case(f"{odd} T=9 N={N} D={D}", partial(inputs, 9, N, D, kind=odd))
        for odd in ("spike", "faint")
        if kind.normed
    ]
    checked = [
        Case(
            f"T={T} N={N} D={D}",
            partial(inputs, T, N, D),
            num_bytes=2 * (N * D + T * D + T * N) if T in TIMED else 0,
        )
        for (N, D), T in product(layers, ROWS)
        if shape_of(N, D, kind, T) is not None
    ]
    return *spiked, *checked


SKINNY_LINEAR = Kernel(
    "skinny_linear",
    PRODUCTS.linear,
    linear_cases.linear_reference,
    cases(
        Kind(),
        linear_cases.linear_inputs,
        [(151936, 1024), (151936, 4096), (5120, 2048), (5120, 6400)],
    ),
    ulps_16=1,
    scale=linear_cases.linear_scale,
)
SKINNY_LINEAR_ADD = Kernel(
    "skinny_linear_add",
    PRODUCTS.linear_add,
    add_reference,
    cases(Kind(added=True), add_inputs, [(1024, 2048), (1024, 3072), (4096, 4096), (4096, 12288)]),
    ulps_16=1,
    scale=add_scale,
)
SKINNY_NORM_LINEAR = Kernel(
    "skinny_norm_linear",
    PRODUCTS.norm_linear,
    linear_cases.norm_linear_reference,
    cases(
        Kind(normed=True),
        linear_cases.norm_inputs,
        [(4096, 1024), (6144, 4096), (12352, 2048), (3088, 2048), (2560, 5120), (16480, 5120)],
    ),
    ulps_16=2,
    scale=linear_cases.norm_scale,
)
SKINNY_NORM_GATE_UP = Kernel(
    "skinny_norm_gate_up",
    partial(PRODUCTS.norm_linear, gated=True),
    linear_cases.gate_up_reference,
    cases(
        Kind(normed=True, gated=True),
        linear_cases.norm_inputs,
        [(6144, 1024), (24576, 4096), (12800, 5120), (25600, 5120), (34816, 5120)],
    ),
    ulps_16=2,
    scale=linear_cases.gate_up_scale,
)
