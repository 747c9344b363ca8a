"""What a drafter is to the runner, and which one a recipe asks for.

Shape letters beside those of attention.base: N slots + 1, the last one for padding; D drafts of a
row; X = 1 + D columns.
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
    """Guesses the next tokens of rows. Made once per engine, by keywords.

    The keywords are the recipe's `tokens`, `min_match`, `max_match` and `accept`, then `kernel`
    ("torch" or "triton"), `seeds_N`, `vocab_size` and `device`; a drafter names those it uses.
    """

    num_drafts: int  # D: so many tokens at every call
    # None: a draft is right if it equals what is drawn in its place. Else the share (rates_D) of
    # right drafts that come out, by a coin of the slot's seed (seeds_N) and the position.
    accept: tuple[Tensor, Tensor] | None

    def propose(self, slots_R: Tensor, lengths_N: Tensor, tokens_NL: Tensor) -> Tensor:
        """Returns int32 [R, 1 + D]: how many real drafts a row has, then D tokens, which may be
        fillers.

        They are written behind each slot's newest token too, tokens_NL[slot, lengths_N[slot]],
        where the slot must have room for them. So rows whose prompt is not fed to its end must not
        be here, or as rows of the padding slot, which stays all zeros. Device work only, of shapes
        that depend on R alone, so a CUDA graph can capture it.
        """
        ...


def drafter_of(recipe: Recipe, sampler: Sampler) -> Drafter | None:
    """Who guesses tokens for this recipe, if anybody."""
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
