"""Interface of draft-token proposers, and the choice of one by a recipe.

Shape letters in addition to those of attention.base: N slots + 1, the last one for padding; D
drafts of a row; X = 1 + D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import asdict
from torch import Tensor

from nanovllm.config import Recipe
from nanovllm.registry import resolve
from nanovllm.sampling.sampler import Sampler
from nanovllm.spec import DRAFTERS


class Drafter(Protocol):
    """Proposer of the next tokens of rows. Made once per engine, with keyword arguments.

    The arguments are the recipe's `tokens`, `min_match`, `max_match` and `accept`, then `kernel`
    ("torch" or "triton"), `seeds_N`, `vocab_size` and `device`; a drafter names those it uses.
    """

    num_drafts: int  # D, the same in every call
    # None: a draft is accepted if it equals the token that is drawn in its place. Else (rates_D,
    # seeds_N): it is accepted at a given rate, by a coin that depends on seed and position.
    accept: tuple[Tensor, Tensor] | None

    def propose(self, slots_R: Tensor, lengths_N: Tensor, tokens_NL: Tensor) -> Tensor:
        """Return int32 [R, 1 + D]: the number of real drafts of a row, then D tokens. The tokens
        after the real drafts are fillers.

        The tokens are also written after each slot's latest token, tokens_NL[slot,
        lengths_N[slot]]; the slot must have room. A row with prompt tokens left to compute must be
        left out, or passed as the padding slot, which stays all zeros. All work is on the device
        and all shapes depend on R only, so that a CUDA graph can capture it.
        """
        ...


def drafter_of(recipe: Recipe, sampler: Sampler) -> Drafter | None:
    """Return the recipe's drafter, or None without `speculate`."""
    if recipe.speculate is None:
        return None
    asked = asdict(recipe.speculate)
    make: Callable[..., Drafter] = resolve(DRAFTERS, asked.pop("method"))
    return make(
        **asked,
        kernel=recipe.kernels.batch_prep,
        seeds_N=sampler.seeds_N,
        vocab_size=sampler.vocab_size,
        device=sampler.seeds_N.device,
    )
