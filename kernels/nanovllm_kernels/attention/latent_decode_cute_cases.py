"""Cases of the latent decode kernel in CuTe DSL: its own, and those of latent_decode it supports.

Importing this imports CuTe DSL.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_kernels.attention.decode_cases import RAGGED, KVRows, drafted
from nanovllm_kernels.attention.latent_cases import R1, all_rows, by_position, case_of
from nanovllm_kernels.attention.latent_decode import LATENT_DECODE
from nanovllm_kernels.attention.latent_decode_cute import latent_decode, obstacle, plan_decode


def suits(rows: KVRows) -> bool:
    heads, _, size = rows.heads
    sizes = size - size // 9, size // 9
    return not obstacle(heads, *sizes, rows.page_tokens, rows.dtype, rows.is_fp8)


CORNERS = (
    KVRows((5000, *RAGGED), (16, 1, R1), 16),  # more pages in a lane than a warp's threads hold
    KVRows(RAGGED * 60, (64, 1, R1), 32),
    drafted(KVRows((*RAGGED[1:5], 2000, 65, 0), (32, 1, R1), 128, kind="newest", width=4)),
)
ROWS = (*CORNERS, *filter(suits, all_rows()))
CASES = tuple(replace(case_of(plan_decode, rows), small=False) for rows in ROWS)
LATENT_DECODE_CUTE = replace(
    LATENT_DECODE, name="latent_decode_cute", run=by_position(latent_decode), cases=CASES
)
