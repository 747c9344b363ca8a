"""Interface of draft-token proposers, and the choice of one by a recipe.

Shape letters in addition to those of nanovllm/shapes.md: N slots + 1, the last one for padding; D
drafts of a row; X = 1 + D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from msgspec.structs import asdict
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.config import Recipe
from nanovllm.registry import resolve
from nanovllm.sampling.sampler import Sampler
from nanovllm.spec import DRAFTERS


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Slots after a step's tokens were written to them, and the step's forward pass.

    `slots_R` has the step's rows, without the rows that pad a graph. The batch may have more rows
    and tokens.
    """

    slots_R: Tensor  # int64; the padding slot for rows that drew no token in this step
    rows_R: Tensor  # int64: the slots of all rows
    lengths_N: Tensor
    tokens_NL: Tensor
    pages_NM: Tensor
    batch: Batch
    num_tokens: int  # of the rows
    # Whether a draft model proposes drafts: some row draws tokens, and the plan wants drafts. It is
    # the same in all lanes. Other drafters run only if the plan wants drafts, or in a graph.
    proposes: bool
    # With several lanes: the number of tokens that each of them exchanges in a pass. Else 0.
    lane_tokens: int
    given_TX: Tensor | None  # of the step's tokens: see model_base.DraftModel.given


class Drafter(Protocol):
    """Proposer of the next tokens of rows. Made once per engine, with keyword arguments.

    The arguments are the recipe's `tokens`, `min_match`, `max_match` and `accept`, then `kernel`
    ("torch" or "triton"), `seeds_N`, `vocab_size` and `device`; a drafter names those it uses.
    """

    num_drafts: int  # D, the same in every call
    # None: a draft is accepted if it equals the token that is drawn in its place. Else (rates_D,
    # seeds_N): it is accepted at a given rate, by a coin that depends on seed and position.
    accept: tuple[Tensor, Tensor] | None

    def propose(self, step: DraftStep) -> Tensor:
        """Return int32 [R, 1 + D]: the number of real drafts of a row, then D tokens. The tokens
        after the real drafts are fillers.

        The tokens are also written after each slot's latest token, tokens_NL[slot,
        lengths_N[slot]]; the slot must have room. The padding slot stays all zeros. All work is on
        the device. Shapes depend only on numbers of rows and tokens, for CUDA graphs.
        """
        ...


def coins(accept: Sequence[float], seeds_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return Drafter.accept. `accept` is the fraction of steps in which each draft is accepted.

    A draft can be accepted only if the one before it is, so its coin has the ratio of the two
    rates.
    """
    before = [1.0, *accept[:-1]]
    rates = [rate / first if first else 0.0 for first, rate in zip(before, accept, strict=True)]
    return torch.tensor(rates, dtype=torch.float32, device=seeds_N.device), seeds_N


def drafter_of(recipe: Recipe, sampler: Sampler) -> Drafter | None:
    """Return the recipe's drafter, or None without `speculate`."""
    if recipe.speculate is None:
        return None
    options = asdict(recipe.speculate)
    make: Callable[..., Drafter] = resolve(DRAFTERS, options.pop("method"))
    return make(
        **options,
        kernel=recipe.kernels.batch_prep,
        seeds_N=sampler.seeds_N,
        vocab_size=sampler.vocab_size,
        device=sampler.seeds_N.device,
    )
