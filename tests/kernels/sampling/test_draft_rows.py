"""Inputs of a draft model's passes equal a plain Python version on lists.

The whole file runs twice: for the reference in torch, and for the Triton kernels. These run in a
process of its own, as TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st
from nanovllm_kernels.sampling import draft_reference, draft_rows

from tests.interpreted import INTERPRETED, in_parent, passes

TESTED: Any = draft_rows if INTERPRETED else draft_reference
EXAMPLES = settings(deadline=None, max_examples=20 if INTERPRETED else 100)
NUM_SLOTS, MAX_TOKENS, PAGE_TOKENS, NUM_PAGES, NUM_DRAFTS = 4, 11, 3, 4, 3
LAGS = pytest.mark.parametrize("lag", [0, 1])
Lists = list[list[int]]


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 22)


@dataclass
class State:
    """Lengths, tokens and pages of the slots and of the padding slot, which is the last."""

    lengths: list[int]
    tokens: Lists
    pages: Lists

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            "lengths_N": int32(self.lengths),
            "tokens_NL": int32(self.tokens),
            "pages_NM": int32(self.pages),
        }

    def place(self, slot: int, position: int) -> int:
        """Return the slot mapping: page 0 after the longest request, and after a slot's pages."""
        if position >= MAX_TOKENS:
            return (MAX_TOKENS - 1) % PAGE_TOKENS
        page = self.pages[slot][position // PAGE_TOKENS]
        return page * PAGE_TOKENS + position % PAGE_TOKENS


def int32(numbers: list[Any]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def lists(results: tuple[torch.Tensor, ...]) -> list[Any]:
    return [x.tolist() for x in results]


@st.composite
def states(draw: st.DrawFn) -> State:
    """Draw slots after a step, whose latest tokens are at any index up to the longest request."""
    width = MAX_TOKENS + 1 + NUM_DRAFTS
    pages = []
    for _ in range(NUM_SLOTS):
        held = draw(st.integers(1, NUM_PAGES))
        pages.append([draw(st.integers(1, 99)) for _ in range(held)] + [0] * (NUM_PAGES - held))
    latest = st.sampled_from([1, 2, 3, 5, 6, 7, MAX_TOKENS - 2, MAX_TOKENS - 1, MAX_TOKENS])
    return State(
        [*(draw(latest) for _ in range(NUM_SLOTS)), 0],
        [*([100 * slot + at for at in range(width)] for slot in range(NUM_SLOTS)), [0] * width],
        [*pages, [0] * NUM_PAGES],
    )


@LAGS
@pytest.mark.parametrize("block", [4, 512])
@EXAMPLES
@given(state=states(), data=st.data())
def test_first_rows(lag: int, block: int, state: State, data: st.DataObject) -> None:
    """A row fed `count` tokens, of which some were rejected: the latest token is among them."""
    slots = data.draw(st.permutations(range(NUM_SLOTS)))[: data.draw(st.integers(1, NUM_SLOTS))]
    rejected = [data.draw(st.integers(0, min(3, MAX_TOKENS - state.lengths[s]))) for s in slots]
    fed = [
        r + data.draw(st.integers(1, state.lengths[s]))
        for s, r in zip(slots, rejected, strict=True)
    ]
    lengths = [state.lengths[s] + r for s, r in zip(slots, rejected, strict=True)]
    num_empty = data.draw(st.integers(0, 2))  # rows without tokens, which pad a graph
    starts = [0, *accumulate([*fed, *[0] * num_empty])]
    num_real = len(slots)
    slots, lengths = [*slots, *[NUM_SLOTS] * num_empty], [*lengths, *[0] * num_empty]
    num_spare = data.draw(st.integers(0, 5))
    num_tokens = starts[-1] + (1 - lag) * len(slots) + num_spare
    num_pages = data.draw(st.integers(1, NUM_PAGES))
    with patch.object(draft_rows, "BLOCK", block):
        results = TESTED.first_rows(
            slots_R=torch.tensor(slots),
            starts_R1=int32(starts),
            lengths_R=int32(lengths),
            **state.tensors(),
            lag=lag,
            page_tokens=PAGE_TOKENS,
            max_tokens=MAX_TOKENS,
            num_pages=num_pages,
            num_tokens=num_tokens,
        )
    assert [x.dtype for x in results] == [
        *[torch.int64] * 4,
        *[torch.int32] * 2,
        *[torch.int64] * 2,
        torch.int32,
    ]
    *inputs, new_starts, new_lengths, sampled, draft_at, table = lists(results)
    expected_starts, of_tokens, expected_sampled = [0], [], []
    for slot, (start, stop), length in zip(slots, pairwise(starts), lengths, strict=True):
        for at in range(length - (stop - start) + lag, length + 1):
            if at == state.lengths[slot]:
                expected_sampled.append(len(of_tokens))
            position = at - lag
            clamped = min(position, MAX_TOKENS - 1)
            token = state.tokens[slot][at]
            of_tokens.append((token, clamped, state.place(slot, position), slot))
        expected_starts.append(len(of_tokens))
    of_tokens += [(0, 0, 0, NUM_SLOTS)] * num_spare
    assert [*zip(*inputs, strict=True)] == of_tokens
    assert new_starts == expected_starts
    assert new_lengths == [min(length + 1 - lag, MAX_TOKENS) for length in lengths]
    assert sampled[:num_real] == expected_sampled[:num_real]
    assert all(0 <= at < max(num_tokens, 1) for at in sampled)
    assert draft_at == [state.lengths[slot] + 1 for slot in slots]
    assert table == [state.pages[slot][:num_pages] for slot in slots]


def later_by_hand(
    state: State, slots: list[int], drawn: list[int], nth: int, lag: int
) -> tuple[list[list[int]], Lists]:
    """Return the inputs of a later pass and each row's number of drafts and draft."""
    inputs, drafts = [], []
    for slot, token in zip(slots, drawn, strict=True):
        at, draft = state.lengths[slot] + nth, max(token, 0)
        clamped = min(at - lag, MAX_TOKENS - 1)
        inputs.append([draft, clamped, state.place(slot, at - lag), clamped + 1, at + 1])
        drafts.append([nth if slot < NUM_SLOTS else 0, draft])
        if slot < NUM_SLOTS:
            state.tokens[slot][at] = draft
    return inputs, drafts


@LAGS
@EXAMPLES
@given(state=states(), nth=st.integers(1, NUM_DRAFTS), data=st.data())
def test_later_rows(lag: int, state: State, nth: int, data: st.DataObject) -> None:
    slots = data.draw(st.permutations(range(NUM_SLOTS)))[: data.draw(st.integers(0, NUM_SLOTS))]
    slots = [*slots, *[NUM_SLOTS] * data.draw(st.integers(0 if slots else 1, 3))]
    drawn = [data.draw(st.integers(-1, 9)) for _ in slots]
    tensors = state.tensors()
    drafts_RX = torch.full((len(slots), 1 + NUM_DRAFTS), 77, dtype=torch.int32)
    results = TESTED.later_rows(
        slots_R=torch.tensor(slots),
        drawn_R=torch.tensor(drawn),
        nth=nth,
        **tensors,
        drafts_RX=drafts_RX,
        lag=lag,
        page_tokens=PAGE_TOKENS,
        max_tokens=MAX_TOKENS,
    )
    assert [x.dtype for x in results] == [*[torch.int64] * 3, *[torch.int32] * 2, torch.int64]
    ids, positions, places, starts, lengths, draft_at = lists(results)
    inputs, drafts = later_by_hand(state, slots, drawn, nth, lag)
    found = [list(row) for row in zip(ids, positions, places, lengths, draft_at, strict=True)]
    assert found == inputs
    assert starts == [*range(len(slots) + 1)]
    expected = [[77] * (1 + NUM_DRAFTS) for _ in slots]
    for row, (count, draft) in zip(expected, drafts, strict=True):
        row[0], row[nth] = count, draft
    assert drafts_RX.tolist() == expected
    assert tensors["tokens_NL"].tolist() == state.tokens
    assert tensors["lengths_N"].tolist() == state.lengths


@LAGS
@pytest.mark.parametrize("num_rows", [1, 127, 128, 300])
def test_any_number_of_rows_of_a_later_pass(num_rows: int, lag: int) -> None:
    """Row r's text has its latest token at index r + 1, and its draft 2 is token r."""
    rows = torch.arange(num_rows)
    lengths_N = torch.cat((rows + 1, torch.zeros(1, dtype=torch.int64))).int()
    tokens_NL = torch.zeros(num_rows + 1, num_rows + 5, dtype=torch.int32)
    drafts_RX = torch.zeros(num_rows, 3, dtype=torch.int32)
    results = TESTED.later_rows(
        slots_R=rows,
        drawn_R=rows,
        nth=2,
        lengths_N=lengths_N,
        tokens_NL=tokens_NL,
        pages_NM=torch.full((num_rows + 1, 1 + (num_rows + 2) // 16), 3, dtype=torch.int32),
        drafts_RX=drafts_RX,
        lag=lag,
        page_tokens=16,
        max_tokens=num_rows + 3,
    )
    ids, positions, places, starts, lengths, draft_at = lists(results)
    assert ids == [*range(num_rows)] and starts == [*range(num_rows + 1)]
    assert positions == [r + 3 - lag for r in range(num_rows)]
    assert places == [48 + at % 16 for at in positions]
    assert lengths == [at + 1 for at in positions] and draft_at == [r + 4 for r in range(num_rows)]
    assert drafts_RX.tolist() == [[2, 0, r] for r in range(num_rows)]
    assert [tokens_NL[r, r + 3].item() for r in range(num_rows)] == [*range(num_rows)]


@LAGS
def test_a_draft_at_a_page_border_and_after_the_longest_request(lag: int) -> None:
    """Three rows, whose draft 1 is fed at position 5 - lag, 6 - lag and 11 - lag.

    With a lag of 0, the last one is after the longest request, so its key goes to page 0.
    """
    tokens = [[7] * 15 for _ in range(3)] + [[0] * 15]
    state = State([4, 5, 10, 0], tokens, [[21, 22, 23, 24]] * 3 + [[0] * 4])
    results = TESTED.later_rows(
        slots_R=torch.tensor([0, 1, 2, 3]),
        drawn_R=torch.tensor([5, 6, -1, 8]),
        nth=1,
        **(tensors := state.tensors()),
        drafts_RX=torch.zeros(4, 2, dtype=torch.int32),
        lag=lag,
        page_tokens=PAGE_TOKENS,
        max_tokens=MAX_TOKENS,
    )
    ids, positions, places, *_ = lists(results)
    assert ids == [5, 6, 0, 8]
    assert positions == ([5, 6, 10, 1] if lag == 0 else [4, 5, 10, 0])
    # Page 22 has positions 3 to 5, page 23 has 6 to 8, and page 24 has 9 and 10.
    assert places == ([68, 69, 1, 1] if lag == 0 else [67, 68, 73, 0])
    assert tensors["tokens_NL"].tolist() == [
        [*[7] * 5, 5, *[7] * 9],
        [*[7] * 6, 6, *[7] * 8],
        [*[7] * 11, 0, *[7] * 3],
        [0] * 15,
    ]


@LAGS
def test_a_first_pass_at_the_longest_request(lag: int) -> None:
    """Slot 0 has no place for the token after its longest text, slot 1 no page for its last one.

    A padding row and a padding token follow.
    """
    tokens = [[*range(15)], [*range(20, 35)], [0] * 15]
    state = State([11, 6, 0], tokens, [[21, 22, 23, 24], [31, 32, 0, 0], [0] * 4])
    results = TESTED.first_rows(
        slots_R=torch.tensor([0, 1, 2]),
        starts_R1=int32([0, 2, 3, 3]),
        lengths_R=int32([11, 6, 0]),
        **state.tensors(),
        lag=lag,
        page_tokens=PAGE_TOKENS,
        max_tokens=MAX_TOKENS,
        num_pages=3,
        num_tokens=7 - 3 * lag,
    )
    *others, table = lists(results)
    assert table == [[21, 22, 23], [31, 32, 0], [0, 0, 0]]
    assert others == (
        [
            [9, 10, 11, 25, 26, 0, 0],
            [9, 10, 10, 5, 6, 0, 0],
            [72, 73, 1, 98, 0, 0, 0],
            [0, 0, 0, 1, 1, 2, 2],
            [0, 3, 5, 6],
            [11, 7, 1],
            [2, 4, 5],
            [12, 7, 1],
        ]
        if lag == 0
        else [
            [10, 11, 26, 0],
            [9, 10, 5, 0],
            [72, 73, 98, 0],
            [0, 0, 1, 2],
            [0, 2, 3, 3],
            [11, 6, 0],
            [1, 2, 2],
            [12, 7, 1],
        ]
    )


@LAGS
@pytest.mark.parametrize("length", [0, 9])
def test_a_first_row_without_tokens_and_more_pages_than_tokens(length: int, lag: int) -> None:
    """As in a capture, whose rows are padding. The index of its sampled token is that of a token.

    The slot of such a row may still have a text.
    """
    state = State([length, 0], [[7] * 15, [0] * 15], [[21, 22, 23, 24], [0] * 4])
    with patch.object(draft_rows, "BLOCK", 2):
        results = TESTED.first_rows(
            slots_R=torch.tensor([0]),
            starts_R1=int32([0, 0]),
            lengths_R=int32([0]),
            **state.tensors(),
            lag=lag,
            page_tokens=PAGE_TOKENS,
            max_tokens=MAX_TOKENS,
            num_pages=4,
            num_tokens=1,
        )
    *_, sampled, draft_at, table = lists(results)
    assert (sampled, draft_at, table) == ([0], [length + 1], [[21, 22, 23, 24]])
