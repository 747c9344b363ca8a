"""Cases of the decode kernel in CuTe DSL: its own, and those of paged_decode that it supports.

Importing this imports CuTe DSL.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_kernels.attention.decode_cases import RAGGED, KVRows, all_rows, by_position, case_of
from nanovllm_kernels.attention.paged_decode import PAGED_DECODE
from nanovllm_kernels.attention.paged_decode_cute import obstacle, paged_decode, plan_decode

CORNERS = [
    KVRows(RAGGED, (4, 4, 128), 16),
    KVRows((2000, *RAGGED, 5000), (16, 1, 64), 16),  # all rows of a tensor core
    KVRows((9000,), (16, 1, 128), 64),  # over all lanes
    KVRows((9000, 300), (32, 32, 128), 128),  # more pages in a lane than a warp's threads hold
    KVRows((9000, 300), (32, 32, 64), 16),
    KVRows(RAGGED * 70, (14, 2, 64), 32),
]
OWN = (rows._replace(is_fp8=is_fp8) for rows in CORNERS for is_fp8 in (False, True))
KNOWN = (x for x in all_rows() if not obstacle(x.page_tokens, x.heads[2], x.dtype))
CASES = (replace(case_of(plan_decode, rows), small=False) for rows in (*OWN, *KNOWN))
PAGED_DECODE_CUTE = replace(
    PAGED_DECODE, name="paged_decode_cute", run=by_position(paged_decode), cases=tuple(CASES)
)
