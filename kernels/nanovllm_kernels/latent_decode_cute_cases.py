"""What the decode kernel of latents in CuTe DSL is checked and timed with. Imports CuTe DSL."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_kernels.case import Case
from nanovllm_kernels.latent_cases import R1, RAGGED, Rows, all_rows, by_position, case_of
from nanovllm_kernels.latent_decode import LATENT_DECODE
from nanovllm_kernels.latent_decode_cute import latent_decode, obstacle, plan_decode


def cases() -> tuple[Case, ...]:
    """Its own corners, and those of latent_decode's that it can run."""
    known = (
        x for x in all_rows() if not obstacle(x.heads, *x.sizes, x.page_tokens, x.dtype, x.is_fp8)
    )
    found = (case_of(plan_decode, rows) for rows in (*corners(), *known))
    return tuple(replace(case, small=False) for case in found)


def corners() -> list[Rows]:
    several = (8, 130, 9, 64, 65, 1, 300, 17, 66, 128, 2000, 0, 0)
    return [
        Rows((1,), 16),
        Rows((5000, *RAGGED), 16, R1, 16),  # more pages in a lane than a warp's threads hold
        Rows(RAGGED * 60, 64, R1, 32),
        Rows(several, 32, R1, 128, width=4, newest=True),  # rows of pairs of two tokens
        Rows(several, 64, width=3, newest=True),
    ]


LATENT_DECODE_CUTE = replace(
    LATENT_DECODE, name="latent_decode_cute", run=by_position(latent_decode), cases=cases()
)
