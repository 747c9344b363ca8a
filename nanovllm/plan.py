"""Plan and result of one step: the only data between the scheduler and the device.

A plan holds places and counts, never the value of a token that is still on the device. Step N+1 can
thus be planned while step N runs. Plans run in order on one stream, so a later plan may reuse
anything that the scheduler has freed.

The rows of a step are the decode rows followed by the prompt chunks. Decode rows repeat from step
to step, so a plan lists them only when they change.

Decision: if each chunk of a step would be the only token of a prompt that is not cached, these
tokens are decode rows instead. A row feeds the next token of its slot, and samples, so the result
is the same. Such a step has one CUDA graph, where a step with chunks has a graph and eager
attention for each layer. The prompts then delay the streams less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from nanovllm.wire import Sampling

Int32 = npt.NDArray[np.int32]
CORRUPTED = -2  # instead of a token: the row's logits were NaN or infinite
Masks = npt.NDArray[np.int32]  # [masked rows, words]: bit i of word w allows token 32 * w + i


class Admit(Struct, frozen=True, array_like=True):
    """A request that gets a slot. The keys and values of its first `num_cached` tokens are cached.

    Its recurrent state is restored or zeroed before the forward pass. The same pass may later
    overwrite the checkpoint that was restored.
    """

    slot: int
    tokens: bytes  # int32: the prompt, then outputs generated before a preemption
    num_prompt: int  # length of the client's prompt
    num_cached: int
    pages: list[int]  # room for all of `tokens`; the first ones hold the cached part
    sampling: Sampling
    stop_ids: list[int]  # masked until sampling.min_tokens tokens are generated
    restore_from: int = -1  # checkpoint holding the recurrent state at num_cached; -1 = zero state
    adapter: int = -1  # slot of its adapter; -1 = none


class AdapterContent(Struct, frozen=True, array_like=True):
    """An adapter that has been read."""

    rank: int  # the largest of its products
    digest: bytes  # of its config and tensors: equal digests mean equal keys and values


AdapterDone: TypeAlias = "Callable[[AdapterContent | str], object]"  # with an adapter, or an error


class AdapterLoad(Struct, frozen=True, array_like=True):
    """An adapter to copy to the device, into these pages of LoRA ranks. Replaces their content."""

    number: int  # of the adapter's load
    slot: int
    pages: list[int]


class Grant(Struct, frozen=True, array_like=True):
    """Pages that are appended to a slot's page table, from index `at` on."""

    slot: int
    at: int
    pages: list[int]


class Chunk(Struct, frozen=True, array_like=True):
    """A slot's prompt tokens to compute in this step."""

    slot: int
    num_tokens: int
    samples: bool  # True for the last chunk of a prompt
    save_to: int = -1  # checkpoint for the recurrent state after `save_at` tokens of the chunk
    start: int = 0  # index of the chunk's first token in its request
    save_at: int = 0


class StepPlan(Struct, frozen=True, array_like=True):
    step: int
    admits: list[Admit]
    grants: list[Grant]
    num_decodes: int
    decodes: bytes | None  # int32 slots, one latest token each; None = unchanged
    chunks: list[Chunk]
    max_length: int  # tokens of the longest context, with this step's
    # Indices of sampling rows (decodes first) with a grammar. Each needs a mask per sampled token.
    masked: list[int]
    # (slot, checkpoint): recurrent states to save, done first. A state then includes all tokens
    # that earlier plans computed.
    saves: list[tuple[int, int]] = []
    clean: list[int] = []  # done second: pages to zero, since they may contain NaN
    copies: list[tuple[int, int]] = []  # done third: (from, to) of whole pages
    # int32, drafts per decode row, computed after its latest token. Their values are on the device.
    # Empty if no row has drafts.
    drafts: bytes = b""
    # With several lanes: the maximum over lanes of the step's tokens. 0 with one lane.
    lane_tokens: int = 0
    # Whether drafts are proposed for the next step, and reported. A draft model always computes its
    # keys and values of the step's tokens.
    proposes: bool = True
    # With several lanes and drafts by a model: whether the rows of any lane have masks. No lane
    # draws before these are known, since drafting may exchange tokens over lanes.
    draws_late: bool = False
    adapters: list[AdapterLoad] = []  # done before the admissions

    @property
    def num_decoded(self) -> int:
        """Return the number of tokens of the decode rows, with drafts."""
        return self.num_decodes + sum(memoryview(self.drafts).cast("i"))

    @property
    def num_prompt(self) -> int:
        """Return the number of tokens of the chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class Copies(Struct, frozen=True, array_like=True):
    """Whole pages to copy from the device to host memory, or back, as one transfer."""

    ticket: int  # number of the transfer, greater than 0
    pairs: list[tuple[int, int]]  # (from, to): a page and a host slot, or a host slot and a page
    # Of a load: (key, host slot) of pages to read from the tier below before the copies. Another
    # engine's pages may be copied to their pages on the device instead (Moved.blank).
    fetches: list[tuple[bytes, int]] = []
    # The parts of a recurrent state likewise, and the checkpoint that they are copied to. A store
    # copies them from the checkpoint to the slots.
    state_fetches: list[tuple[bytes, int]] = []
    state_to: int = -1


def state_part_keys(key: bytes, count: int) -> list[bytes]:
    """Return the keys of the parts of the recurrent state after the page of `key`.

    A state is kept below the device in `count` parts, each at most as long as a page.
    """
    return [b"state %d " % part + key for part in range(count)]


class Write(Struct, frozen=True, array_like=True):
    """A host slot to write to the tier below host memory, as one transfer."""

    ticket: int
    slot: int
    key: bytes


class Moves(Struct, frozen=True, array_like=True):
    """Transfers to start. They follow all plans that were launched before, and precede later ones.

    The device does not wait for them. A later plan or transfer may use the pages and host slots of
    a transfer only once its ticket has been in `ended`. On each rank, all work from then on is
    ordered after the rank's own copies. Rank 0 thus decides alone when a transfer has ended.
    """

    ended: list[int]
    stores: list[Copies]
    loads: list[Copies]
    writes: list[Write] = []
    removes: list[bytes] = []  # keys of pages that the tier below must not return any more


class Availability(NamedTuple):
    """Whether a rank's tier below host memory can be read and written at present."""

    reads: bool = True
    writes: bool = True


@dataclass(frozen=True, slots=True)
class Lent:
    """Pages of a prompt that stay held for another engine. None are lent if empty."""

    pages: tuple[int, ...] = ()
    key: bytes = b""  # of the last page: a digest of all tokens up to its end
    state: int = -1  # checkpoint of the recurrent state after these pages


@dataclass(frozen=True, slots=True)
class Moved:
    """End of a transfer. Nothing reads or writes its pages and host slots any more."""

    ticket: int
    ok: bool = True  # False: the content of its targets is undefined
    num_bytes: int = 0
    seconds: float = 0.0  # of the copies between device and host memory
    # Of a load's pages from the tier below to host memory; 0 if it says nothing about the tier.
    fetch_s: float = 0.0
    # Host slots of a load's fetches that stay without content: their pages were filled directly.
    blank: frozenset[int] = frozenset()
    lost: tuple[bytes, ...] = ()  # keys of fetches that the tier below could not read


@dataclass(frozen=True, slots=True)
class LanesPlan:
    """One step of all lanes (see sched/lanes.py): the plan of each.

    A lane without work has step 0 and only padding. `num_decoded` and `num_prompt` are maxima over
    lanes. The other properties are a merged view without padding, made when they are read. In it,
    slots are numbered through all lanes, and rows are those of the first lane, then the second, ...
    """

    step: int
    lanes: tuple[StepPlan, ...]
    rows: tuple[bytes, ...]  # the lanes' decode rows, also where StepPlan.decodes is None
    num_slots: int  # of each lane. The slot with this index is for padding.

    @property
    def num_decoded(self) -> int:
        return max(plan.num_decoded for plan in self.lanes)

    @property
    def num_prompt(self) -> int:
        return max(plan.num_prompt for plan in self.lanes)

    @property
    def num_decodes(self) -> int:
        return sum(plan.num_decodes for plan in self.lanes if plan.step)

    @property
    def masked(self) -> list[int]:
        return [row for plan in self.lanes for row in plan.masked]

    @property
    def drafts(self) -> bytes:
        return b"".join(plan.drafts for plan in self.lanes if plan.step)

    @property
    def chunks(self) -> list[Chunk]:
        return [
            replace(chunk, slot=at * self.num_slots + chunk.slot)
            for at, plan in enumerate(self.lanes)
            for chunk in plan.chunks
            if chunk.slot < self.num_slots
        ]

    @property
    def decodes(self) -> bytes | None:
        if all(plan.decodes is None for plan in self.lanes):
            return None
        slots = [
            at * self.num_slots + np.frombuffer(rows, np.int32)
            for at, (plan, rows) in enumerate(zip(self.lanes, self.rows, strict=True))
            if plan.step and plan.num_decodes
        ]
        return np.concatenate([np.zeros(0, np.int32), *slots]).astype(np.int32).tobytes()


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of one sampled token and of its `n` best alternatives."""

    row: int  # index into StepResult.tokens
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    nth: int = 0  # index of the token among those that the row sampled in this step


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens: one row per sampling row of the plan, decodes first, -1 after a rejection.

    CORRUPTED as a row's first token means that it has no tokens. The keys and values that the
    request wrote must then not be used.
    """

    step: int
    tokens: Int32  # [sampling rows, at least 1 + the maximum drafts of a row]
    logprobs: tuple[RowLogprobs, ...] = ()
    # [sampling rows, 1 + D]: the number of drafts for a row's next step, then D tokens. The next
    # step may feed all D; those after the real drafts are fillers, accepted only by chance. None
    # without a drafter, or if the plan wants none (StepPlan.proposes).
    drafts: Int32 | None = None


@dataclass(frozen=True, slots=True)
class LanesResult(StepResult):
    """Results of one step, by lane."""

    lanes: tuple[StepResult, ...] = ()


def mode_key(mode: str, plan: StepPlan | LanesPlan) -> str:
    """Return the key that counts a step: CUDA-graph mode and kind of rows, as in "FULL/decode"."""
    if plan.masked:
        return f"{mode}/structured"
    if not plan.chunks:
        return f"{mode}/decode"
    return f"{mode}/mixed" if plan.num_decodes else f"{mode}/prefill"
