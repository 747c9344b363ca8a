"""What the decode kernel of latents in CuTe DSL is checked and timed with. Imports CuTe DSL.

Its own corners, and those cases of latent_decode that it can run.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_kernels.decode_cases import RAGGED
from nanovllm_kernels.latent_cases import R1, Rows, all_rows, by_position, case_of
from nanovllm_kernels.latent_decode import LATENT_DECODE
from nanovllm_kernels.latent_decode_cute import latent_decode, obstacle, plan_decode

CORNERS = (
    Rows((5000, *RAGGED), 16, R1, 16),  # more pages in a lane than a warp's threads hold
    Rows(RAGGED * 60, 64, R1, 32),
    Rows((*RAGGED[1:5], 2000, 0), 32, R1, 128, width=4, newest=True),  # of two tokens' pairs
)
KNOWN = (x for x in all_rows() if not obstacle(x.heads, *x.sizes, x.page_tokens, x.dtype, x.is_fp8))
CASES = (replace(case_of(plan_decode, rows), small=False) for rows in (*CORNERS, *KNOWN))
LATENT_DECODE_CUTE = replace(
    LATENT_DECODE, name="latent_decode_cute", run=by_position(latent_decode), cases=tuple(CASES)
)
