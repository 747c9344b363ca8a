"""The decode kernel of latents without a GPU: it compiles for Hopper, and what its threads hold is
where they say.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

COMPILE = """
from nanovllm_kernels.latent_decode_cute import compile_decode, num_tiles
for shape in [(16, 128, 0), (32, 16, 3), (64, 32, 2), (128, 64, 4)]:
    print("compiled", *shape, callable(compile_decode(*shape)), num_tiles(shape[0], shape[2] or 1))
"""


def test_it_compiles_for_every_form_of_heads_page_and_width() -> None:
    """In a process of its own: the architecture is read when the package is imported."""
    variables = ["CUTE_DSL_ARCH=sm_90a", "CUDA_VISIBLE_DEVICES="]
    command = ["env", *variables, sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [
        "compiled 16 128 0 True 1",
        "compiled 32 16 3 True 2",
        "compiled 64 32 2 True 2",
        "compiled 128 64 4 True 8",
    ]


@pytest.mark.parametrize(
    ("page_tokens", "num_heads", "dtype", "reason"),
    [
        (128, 16, torch.bfloat16, None),
        (16, 32, torch.bfloat16, None),
        (64, 128, torch.bfloat16, None),
        (48, 16, torch.bfloat16, "pages must have 16, 32 or a multiple of 64 tokens"),
        (64, 8, torch.bfloat16, "heads must be 16, 32 or a multiple of 64"),
        (64, 48, torch.bfloat16, "heads must be 16, 32 or a multiple of 64"),
        (64, 96, torch.bfloat16, "heads must be 16, 32 or a multiple of 64"),
        (64, 16, torch.float32, "it computes in bfloat16"),
    ],
)
def test_which_caches_it_is_for(
    page_tokens: int, num_heads: int, dtype: torch.dtype, reason: str | None
) -> None:
    from nanovllm_kernels.latent_decode_cute import obstacle

    assert obstacle(page_tokens, num_heads, dtype) == reason


def test_a_groups_columns_are_every_other_ones() -> None:
    """32 at a time; two groups have all 512."""
    from nanovllm_kernels.latent_decode_cute import column_of

    columns = [[column_of(group, part) for part in range(8)] for group in range(2)]
    assert columns[0] == [0, 32, 64, 96, 256, 288, 320, 352]
    assert columns[1] == [128, 160, 192, 224, 384, 416, 448, 480]
