"""What the scheduler asks the device to do in one step.

A plan holds places and counts, never the value of a token the device has not reported yet: that is
what lets step N+1 be planned while step N is still running. Plans execute in order on one stream,
so anything the scheduler frees may be reused by any later plan.

The rows of a step are the decode rows followed by the prompt chunks. Decode rows repeat from step
to step, so a plan names them only when they changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from nanovllm.wire import Sampling

Int32 = npt.NDArray[np.int32]
CORRUPTED = -2  # in place of a row's token: its logits were NaN or infinite
Masks = npt.NDArray[np.int32]  # [masked rows, words]: bit i of word w allows token 32 * w + i


class Admit(Struct, frozen=True, array_like=True):
    """Put a request into a slot. Its first `num_cached` tokens are already in memory.

    Its recurrent state is restored or set to zero before the forward pass, which may end by
    overwriting the very checkpoint that was restored.
    """

    slot: int
    tokens: bytes  # int32: the prompt, then outputs generated before a preemption
    num_prompt: int  # of these tokens, the client's prompt
    num_cached: int
    pages: list[int]  # room for all of `tokens`; the first ones hold the cached part
    sampling: Sampling
    stop_ids: list[int]  # impossible before sampling.min_tokens outputs
    restore_from: int = -1  # checkpoint holding the recurrent state at num_cached; -1 = zero state


class Grant(Struct, frozen=True, array_like=True):
    """Pages appended to a slot's page table, from index `at` on."""

    slot: int
    at: int
    pages: list[int]


class Chunk(Struct, frozen=True, array_like=True):
    """Some of a slot's known tokens to feed in this step."""

    slot: int
    num_tokens: int
    samples: bool  # False for a chunk that stops short of the prompt's end
    save_to: int = -1  # checkpoint that receives the recurrent state behind `save_at` of these
    start: int = 0  # so many of the slot's tokens come before
    save_at: int = 0


class StepPlan(Struct, frozen=True, array_like=True):
    step: int
    admits: list[Admit]
    grants: list[Grant]
    num_decodes: int
    decodes: bytes | None  # int32 slots, each feeding its newest token; None = as in the last plan
    chunks: list[Chunk]
    max_length: int  # no row's context, this step included, is longer (tokens)
    # Sampling rows (decodes first) that wait for masks: one for each token that they may sample.
    masked: list[int]
    # Recurrent states to keep for reuse, of slots whose texts grew: slot, checkpoint. Before all
    # else of this plan: they stand for all tokens that earlier plans computed.
    saves: list[tuple[int, int]] = []
    clean: list[int] = []  # then pages to fill with zeros: NaN was written there
    copies: list[tuple[int, int]] = []  # then, whole pages: from, to
    # int32: how many of its drafts each decode row feeds behind its newest token. The drafts live
    # on the device. Empty: no row feeds any.
    drafts: bytes = b""
    # Where several lanes step together: the most tokens that one of them feeds in this step. 0:
    # there is one lane.
    lane_tokens: int = 0

    @property
    def num_decoded(self) -> int:
        """Tokens that the decode rows feed."""
        return self.num_decodes + sum(memoryview(self.drafts).cast("i"))

    @property
    def num_prompt(self) -> int:
        """Tokens that the chunks feed."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of one sampled row: its token's, and the best `n` alternatives'."""

    row: int  # index into StepResult.tokens
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    nth: int = 0  # which token of the row's line


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device sampled: a line per sampling row, decodes first, -1 where a draft failed.

    CORRUPTED as a line's first token: there is none, and nothing the request wrote can be used.
    """

    step: int
    tokens: Int32  # [sampling rows, 1 + the most drafts that one of them fed, or more]
    logprobs: tuple[RowLogprobs, ...] = ()
    # [sampling rows, 1 + D] where there is a drafter: how many drafts it found for a row's next
    # step, then D tokens, all of which that step may feed (those beyond the found ones are no
    # guesses and right only by luck). None: there is no drafter.
    drafts: Int32 | None = None


def mode_key(mode: str, plan: StepPlan) -> str:
    """What a step is counted as: how it ran, and for whom, e.g. "FULL/decode"."""
    if plan.masked:
        return f"{mode}/structured"
    if not plan.chunks:
        return f"{mode}/decode"
    return f"{mode}/mixed" if plan.num_decodes else f"{mode}/prefill"
