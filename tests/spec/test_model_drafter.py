"""A drafter's passes of a model that computes nothing: their rows, drafts and kernel launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nanovllm_kernels.sampling.reference import CORRUPTED
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanovllm.attention.base import Batch, ForwardContext
from nanovllm.config import Speculate
from nanovllm.runner.batch import BatchPrep, Slots, decode_rows
from nanovllm.spec.base import DraftStep
from nanovllm.spec.model_drafter import ModelDrafter

NUM_DRAFTS, PAGE_TOKENS, MAX_TOKENS, NUM_SLOTS = 3, 4, 14, 4
LAGS = pytest.mark.parametrize("lag", [0, 1])


class Launches(TorchDispatchMode):
    """Recorder of the operations that launch work on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        if not function.is_view and name != "empty":
            self.names.append(name)
        return function(*args, **(kwargs or {}))

    def one(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a reference that counts as one launch, as the kernel it stands for."""

        def run(**inputs: Any) -> Any:
            self.names.append(kernel.__name__)
            with _disable_current_modes():
                return kernel(**inputs)

        return run


class Model:
    """Model without weights. It records the rows of its passes. Its state is a constant."""

    takes_hidden = False

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.passes: list[Batch] = []

    def bind(self, batch: Batch) -> Any:
        return None

    def __call__(self, token_ids_T: Tensor, given_TX: Tensor | None, ctx: ForwardContext) -> Tensor:
        self.passes.append(ctx.batch)
        return ctx.batch.positions_T

    def logits(self, state_SX: Tensor) -> Tensor:
        return state_SX


class Drawn:
    """Sampler that draws 60, 61, ... in turn. The second draw of row 1 is corrupted."""

    seeds_N = torch.zeros(NUM_SLOTS + 1, dtype=torch.int64)

    def __init__(self, num_rows: int) -> None:
        self.tokens = [torch.full((num_rows,), 60 + nth) for nth in range(NUM_DRAFTS)]
        self.tokens[1][1] = CORRUPTED
        self.noise: list[tuple[Tensor, Tensor]] = []  # slots and positions of each draw

    def draw(self, logits_SV: Tensor, slots_S: Tensor, positions_S: Tensor) -> Tensor:
        self.noise.append((slots_S, positions_S))
        return self.tokens[len(self.noise) - 1]


def step_of(slots: Slots, *, proposes: bool) -> DraftStep:
    """Return a step of slots 2, 0 and 1, which fed 2, 4 and 1 tokens, then of a padding row.

    Two padding tokens follow. A draft of slot 2 was accepted, and its text cannot be longer. Of
    slot 0, two drafts were accepted and one was not. Slot 1 drew no token.
    """
    rows_R = torch.tensor([2, 0, 1, NUM_SLOTS])
    slots.tokens_NL[:-1] = torch.arange(slots.tokens_NL.shape[1], dtype=torch.int32)
    slots.tokens_NL[:-1] += 20 * torch.arange(NUM_SLOTS, dtype=torch.int32)[:, None]
    slots.pages_NM[:-1] = torch.arange(1, 5, dtype=torch.int32)
    slots.pages_NM[1, 2:] = 0
    slots.lengths_N[:3] = torch.tensor([6, 3, 12])
    rows = decode_rows(
        rows_R,
        counts_R=torch.tensor([2, 4, 1, 0], dtype=torch.int32),
        host_slots=None,  # type: ignore[arg-type]
        num_sampled=None,  # type: ignore[arg-type]
        num_tokens=9,
        width=4,
        max_length=MAX_TOKENS,
    )
    batch = BatchPrep(slots, "torch").gather(rows)
    slots.lengths_N[:3] = torch.tensor([9, 4, 14])
    return DraftStep(
        slots_R=torch.tensor([2, 0, NUM_SLOTS, NUM_SLOTS]),
        rows_R=rows_R,
        lengths_N=slots.lengths_N,
        tokens_NL=slots.tokens_NL,
        pages_NM=slots.pages_NM,
        batch=batch,
        num_tokens=9,
        proposes=proposes,
        lane_tokens=0,
        given_TX=None,
    )


def proposed(
    lag: int, *, proposes: bool = True
) -> tuple[Tensor, Slots, list[Batch], list[tuple[Tensor, Tensor]], list[str]]:
    """Return the drafts, slots, rows of each pass, slots and positions of noise, and launches."""
    slots = Slots(NUM_SLOTS, MAX_TOKENS, PAGE_TOKENS, torch.device("cpu"), num_drafts=NUM_DRAFTS)
    step, launches = step_of(slots, proposes=proposes), Launches()
    model: Any = Model(lag)
    sampler: Any = Drawn(len(step.slots_R))
    drafter = ModelDrafter(
        model,
        model,
        sampler,
        options=Speculate(method="mtp", tokens=NUM_DRAFTS),
        kernel="torch",
        page_tokens=PAGE_TOKENS,
        max_tokens=MAX_TOKENS,
    )
    drafter._first_rows = launches.one(drafter._first_rows)
    drafter._later_rows = launches.one(drafter._later_rows)
    with launches:
        drafts_RX = drafter.propose(step)
    return drafts_RX, slots, model.passes, sampler.noise, launches.names


@LAGS
def test_one_launch_prepares_each_pass(lag: int) -> None:
    """One more stores the last draft. Without drafts, one fills the result with zeros."""
    assert proposed(lag)[-1] == ["first_rows", *["later_rows"] * NUM_DRAFTS]
    assert proposed(lag, proposes=False)[-1] == ["first_rows", "zeros"]


@LAGS
def test_drafts_follow_the_latest_token_of_rows_that_drew_one(lag: int) -> None:
    drafts_RX, slots, _, noise, _ = proposed(lag)
    expected = [[3, 60, 61, 62], [3, 60, 0, 62], [0, 60, 61, 62], [0, 60, 61, 62]]
    assert drafts_RX.tolist() == expected and drafts_RX.dtype == torch.int32
    texts = [[20 * slot + at for at in range(MAX_TOKENS + 1 + NUM_DRAFTS)] for slot in range(4)]
    texts[2][15:18] = [60, 61, 62]
    texts[0][10:13] = [60, 0, 62]
    assert slots.tokens_NL.tolist() == [*texts, [0] * len(texts[0])]
    assert [slots_S.tolist() for slots_S, _ in noise] == [[2, 0, NUM_SLOTS, NUM_SLOTS]] * 3
    assert [at_S[:2].tolist() for _, at_S in noise] == [[15, 10], [16, 11], [17, 12]]


@LAGS
def test_a_step_without_drafts_changes_no_text(lag: int) -> None:
    drafts_RX, slots, passes, noise, _ = proposed(lag, proposes=False)
    assert drafts_RX.tolist() == [[0] * 4] * 4 and drafts_RX.dtype == torch.int32
    assert slots.tokens_NL[2, 14:].tolist() == [54, 55, 56, 57]
    assert (len(passes), noise) == (1, [])


def fields(batch: Batch) -> list[list[int]]:
    """Return token ids, positions, places, slots, starts and lengths of a pass."""
    tokens = batch.token_ids_T, batch.positions_T, batch.slot_mapping_T, batch.slots_T
    return [x.tolist() for x in (*tokens, batch.starts_R1, batch.lengths_R)]


def test_the_rows_of_a_model_of_its_own() -> None:
    """A row has one token more than in the step. That of slot 2 has no place but page 0."""
    first, *later = proposed(0)[2]
    assert fields(first) == [
        [52, 53, 54, 6, 7, 8, 9, 10, 23, 24, 0, 0, 0],
        [12, 13, 13, 6, 7, 8, 9, 10, 3, 4, 0, 0, 0],
        [16, 17, 1, 10, 11, 12, 13, 14, 7, 8, 0, 0, 0],
        [2, 2, 2, 0, 0, 0, 0, 0, 1, 1, 4, 4, 4],
        [0, 3, 8, 10, 11],
        [14, 11, 5, 1],
    ]
    assert first.sampled_at is not None and first.sampled_at.tolist() == [2, 6, 9, 10]
    assert (first.decode_width, first.max_new, first.num_decodes) == (5, 5, 4)
    assert first.num_decode_tokens == 13 and first.is_draft and not first.planned
    assert [fields(batch) for batch in later] == [
        [[60] * 4, [13, 10, 1, 1], [1, 14, 1, 1], [2, 0, 4, 4], [0, 1, 2, 3, 4], [14, 11, 2, 2]],
        [
            [61, 0, 61, 61],
            [13, 11, 2, 2],
            [1, 15, 2, 2],
            [2, 0, 4, 4],
            [0, 1, 2, 3, 4],
            [14, 12, 3, 3],
        ],
    ]


def test_the_rows_of_a_head() -> None:
    """Those of its first pass are the step's, with the next token of each."""
    first, *later = proposed(1)[2]
    assert fields(first) == [
        [53, 54, 7, 8, 9, 10, 24, 0, 0],
        [12, 13, 6, 7, 8, 9, 3, 0, 0],
        [16, 17, 10, 11, 12, 13, 7, 0, 0],
        [2, 2, 0, 0, 0, 0, 1, 4, 4],
        [0, 2, 6, 7, 7],
        [14, 10, 4, 0],
    ]
    assert first.sampled_at is not None and first.sampled_at.tolist() == [1, 4, 6, 6]
    assert (first.decode_width, first.max_new, first.num_decodes) == (4, 4, 4)
    assert [fields(batch) for batch in later] == [
        [[60] * 4, [13, 9, 0, 0], [1, 13, 0, 0], [2, 0, 4, 4], [0, 1, 2, 3, 4], [14, 10, 1, 1]],
        [
            [61, 0, 61, 61],
            [13, 10, 1, 1],
            [1, 14, 1, 1],
            [2, 0, 4, 4],
            [0, 1, 2, 3, 4],
            [14, 11, 2, 2],
        ],
    ]
    for batch in (first, *later):
        assert batch.page_table_RM.tolist() == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 0, 0], [0] * 4]
        assert batch.max_length == MAX_TOKENS
    assert all(
        (b.decode_width, b.max_new, b.num_decodes, b.sampled_at) == (1, 1, 4, None) for b in later
    )
