"""Cases of the decode kernels in CuTe DSL: their own, and those of the Triton kernels they support.

Importing this imports CuTe DSL.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_kernels.attention import (
    decode_cases,
    latent_cases,
    latent_decode_cute as latent,
    paged_decode_cute as paged,
)
from nanovllm_kernels.attention.decode_cases import RAGGED, KVRows, by_position, drafted
from nanovllm_kernels.attention.latent_cases import R1
from nanovllm_kernels.attention.latent_decode import LATENT_DECODE
from nanovllm_kernels.attention.paged_decode import PAGED_DECODE

PAGED = [
    KVRows(RAGGED, (4, 4, 128), 16),
    KVRows((2000, *RAGGED, 5000), (16, 1, 64), 16),  # all rows of a tensor core
    KVRows((9000,), (16, 1, 128), 64),  # over all lanes
    KVRows((9000, 300), (32, 32, 128), 128),  # more pages in a lane than a warp's threads hold
    KVRows((9000, 300), (32, 32, 64), 16),
    KVRows(RAGGED * 70, (14, 2, 64), 32),
]
LATENT = (
    KVRows((5000, *RAGGED), (16, 1, R1), 16),  # more pages in a lane than a warp's threads hold
    KVRows(RAGGED * 60, (64, 1, R1), 32),
    drafted(KVRows((*RAGGED[1:5], 2000, 65, 0), (32, 1, R1), 128, kind="newest", width=4)),
)


def suits_paged(rows: KVRows) -> bool:
    return not paged.obstacle(rows.page_tokens, rows.heads[2], rows.dtype)


def suits_latent(rows: KVRows) -> bool:
    heads, _, size = rows.heads
    sizes = size - size // 9, size // 9
    return not latent.obstacle(heads, *sizes, rows.page_tokens, rows.dtype, rows.is_fp8)


OWN = (rows._replace(is_fp8=is_fp8) for rows in PAGED for is_fp8 in (False, True))
PAGED_ROWS = (*OWN, *filter(suits_paged, decode_cases.all_rows()))
LATENT_ROWS = (*LATENT, *filter(suits_latent, latent_cases.all_rows()))
PAGED_DECODE_CUTE = replace(
    PAGED_DECODE,
    name="paged_decode_cute",
    run=by_position(paged.paged_decode),
    cases=tuple(
        replace(decode_cases.case_of(paged.plan_decode, rows), small=False) for rows in PAGED_ROWS
    ),
)
LATENT_DECODE_CUTE = replace(
    LATENT_DECODE,
    name="latent_decode_cute",
    run=latent_cases.by_position(latent.latent_decode),
    cases=tuple(
        replace(latent_cases.case_of(latent.plan_decode, rows), small=False) for rows in LATENT_ROWS
    ),
)
