"""Inputs of decode rows and the outcome of a step equal a plain Python version on lists.

The whole file runs twice: for the reference in torch, and for the Triton kernels. These run in a
process of its own, as TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from hypothesis import given, settings, strategies as st
from nanovllm_kernels.sampling import batch_prep, batch_reference
from nanovllm_kernels.sampling.reference import CORRUPTED, stream_keys, uniforms

from tests.interpreted import INTERPRETED, in_parent, passes

TESTED = batch_prep if INTERPRETED else batch_reference
EXAMPLES = settings(deadline=None, max_examples=40 if INTERPRETED else 150)
NUM_SLOTS, MAX_TOKENS, PAGE_TOKENS = 6, 12, 3


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 23)


@dataclass
class State:
    """Lengths, tokens and pages of 6 slots and of the padding slot, which is the last."""

    lengths: list[int]
    tokens: list[list[int]]
    pages: list[list[int]]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.tensor(x, dtype=torch.int32) for x in (self.lengths, self.tokens, self.pages)
        )


def int32(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@st.composite
def states(draw: st.DrawFn) -> State:
    def some(low: int, high: int, count: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    return State(
        [*some(0, MAX_TOKENS - 6, NUM_SLOTS), 0],
        # There are two distinct tokens, so drafts are often right.
        [*(some(5, 6, MAX_TOKENS + 1) for _ in range(NUM_SLOTS)), [0] * (MAX_TOKENS + 1)],
        [*(some(1, 99, MAX_TOKENS // PAGE_TOKENS) for _ in range(NUM_SLOTS)), [0] * 4],
    )


def rows_of(draw: st.DrawFn, width: int) -> tuple[list[int], list[int]]:
    """Draw slots and counts: rows that feed tokens, perhaps the padding slot's, then empty rows."""
    slots = draw(st.permutations(range(NUM_SLOTS)))
    num_fed = draw(st.integers(1, NUM_SLOTS))
    fed, empty = slots[:num_fed], slots[num_fed:] + [NUM_SLOTS] * 3
    counts = [draw(st.integers(1, width)) for _ in fed]
    if draw(st.booleans()):
        fed, counts = [*fed, NUM_SLOTS], [*counts, width]
    empty = empty[: draw(st.integers(0, 5))]
    return fed + empty, counts + [0] * len(empty)


@EXAMPLES
@given(state=states(), width=st.integers(1, 5), data=st.data())
def test_gather_rows(state, width, data) -> None:
    slots, counts = data.draw(st.composite(rows_of)(width))
    num_tokens = sum(counts) + data.draw(st.integers(0, 3 * len(slots)))
    num_pages = data.draw(st.integers(1, MAX_TOKENS // PAGE_TOKENS))
    given_counts = None if counts == [1] * num_tokens and width == 1 else int32(counts)
    found = TESTED.gather_rows(
        torch.tensor(slots),
        given_counts,
        *state.tensors(),
        PAGE_TOKENS,
        num_pages,
        num_tokens,
        width,
    )
    fed = [
        (slot, state.lengths[slot] + j)
        for slot, count in zip(slots, counts, strict=True)
        for j in range(count)
    ]
    num_padding = num_tokens - len(fed)
    places = [state.pages[s][p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for s, p in fed]
    expected = (
        [state.tokens[s][p] for s, p in fed] + [0] * num_padding,
        [p for _, p in fed] + [0] * num_padding,
        places + [0] * num_padding,
        [s for s, _ in fed] + [NUM_SLOTS] * num_padding,
        [sum(counts[:r]) for r in range(len(counts) + 1)],
        [(state.lengths[s] + n) * (n > 0) for s, n in zip(slots, counts, strict=True)],
        [state.pages[s][:num_pages] for s in slots],
    )
    assert tuple(x.tolist() for x in found) == expected
    assert [x.dtype for x in found] == [torch.int64] * 4 + [torch.int32] * 3


def test_rows_of_one_token_need_no_counts() -> None:
    """Without counts each row feeds one token, and a row of the padding slot has length 1."""
    state = State([4, 0], [[7, 7, 7, 7, 9], [0] * 5], [[11, 12], [0, 0]])
    found = TESTED.gather_rows(torch.tensor([0, 1, 1]), None, *state.tensors(), 3, 2, 3, 1)
    expected = [9, 0, 0], [4, 0, 0], [37, 0, 0], [0, 1, 1], [0, 1, 2, 3], [5, 1, 1]
    assert tuple(x.tolist() for x in found[:-1]) == expected


def test_counts_of_more_rows_than_are_added_up_at_once(monkeypatch) -> None:
    monkeypatch.setattr(batch_prep, "COUNTS", 4)
    num_rows = 10
    slots_R = torch.zeros(num_rows, dtype=torch.int64)
    counts_R = torch.ones(num_rows, dtype=torch.int32)
    counts_R[0] = 2
    state = State([1, 0], [[7, 8, 9], [0] * 3], [[1], [0]])
    found = TESTED.gather_rows(slots_R, counts_R, *state.tensors(), 3, 1, num_rows + 1, 2)
    assert found[0].tolist() == [8, 9] + [8] * (num_rows - 1)
    assert found[4].tolist() == [0, *range(2, num_rows + 2)]


def by_hand(
    state: State,
    slots: list[int],
    lengths: list[int],
    draws: list[list[int]],
    width: int,
    coin: object = None,
) -> list[list[int]]:
    """Compute write_back row by row and draw by draw."""
    lines = []
    for slot, length, drawn in zip(slots, lengths, draws, strict=True):
        line: list[int] = []
        text, place = state.tokens[slot], length - len(drawn) + 1
        for j, token in enumerate(drawn):
            if token == CORRUPTED and j > 0:
                break
            line.append(token)
            if token == CORRUPTED or j == len(drawn) - 1:
                break
            draft = text[place + j]
            if not (token == draft if coin is None else coin(slot, place + j, j)):
                break
            if coin is not None and drawn[j + 1] != CORRUPTED:
                line[-1] = draft
        lines.append(line + [-1] * (width - len(line)))
        if slot == NUM_SLOTS or length == 0:
            continue
        state.lengths[slot] = length - len(drawn) + len(line)
        if line:
            text[state.lengths[slot]] = max(line[-1], 0)
    return lines


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], int]:
    """Draw slots, lengths, draws and the width. Some rows have fewer draws than tokens, or none."""
    width = draw(st.integers(1, 5))
    slots, counts = rows_of(draw, width)
    token = st.sampled_from([5, 5, 5, 6, 6, CORRUPTED])
    draws = [[draw(token) for _ in range(draw(st.integers(0, count)))] for count in counts]
    lengths = [
        draw(st.integers(count, MAX_TOKENS - width)) if count else 0
        for slot, count in zip(slots, counts, strict=True)
    ]
    return slots, lengths, draws, width


def write_back(
    state: State,
    slots: list[int],
    lengths: list[int],
    draws: list[list[int]] | None,
    drawn: list[int],
    width: int,
    accept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[list[list[int]], State]:
    samples_R1 = None
    if draws is not None:
        samples_R1 = int32([sum(map(len, draws[:r])) for r in range(len(draws) + 1)])
    lengths_N, tokens_NL, _ = state.tensors()
    tokens_RW = TESTED.write_back(
        torch.tensor(slots),
        int32(lengths),
        samples_R1,
        torch.tensor(drawn, dtype=torch.int64),
        lengths_N,
        tokens_NL,
        width,
        accept,
    )
    assert tokens_RW.dtype == torch.int32
    return tokens_RW.tolist(), State(lengths_N.tolist(), tokens_NL.tolist(), state.pages)


@EXAMPLES
@given(state=states(), outcome=outcomes())
def test_write_back(state, outcome) -> None:
    slots, lengths, draws, width = outcome
    lines, after = write_back(state, slots, lengths, draws, [*chain(*draws)], width)
    assert lines == by_hand(state, slots, lengths, draws, width)
    assert after == state


@EXAMPLES
@given(state=states(), outcome=outcomes())
def test_write_back_of_one_draw_each(state, outcome) -> None:
    slots, lengths, _, _ = outcome
    drawn = [5 + slot % 2 if slot else CORRUPTED for slot in slots]
    draws = [[token] if length else [] for token, length in zip(drawn, lengths, strict=True)]
    lines, after = write_back(state, slots, lengths, None, drawn, 1)
    assert lines == by_hand(state, slots, lengths, draws, 1)
    assert after == state


RATES = st.sampled_from([0.0, 0.3, 0.7, 1.0])


@EXAMPLES
@given(state=states(), outcome=outcomes(), rates=st.lists(RATES, min_size=4, max_size=4))
def test_write_back_by_coins(state, outcome, rates) -> None:
    slots, lengths, draws, width = outcome
    rates_D = torch.tensor(rates)
    seeds_N = (torch.arange(3 * (NUM_SLOTS + 1)) * 12345)[::3]

    def coin(slot: int, position: int, j: int) -> bool:
        key = stream_keys(seeds_N[slot : slot + 1], torch.tensor([position]))
        u = uniforms(key, torch.tensor([1 << 33]))
        return bool(u < rates_D[j])

    lines, after = write_back(
        state, slots, lengths, draws, [*chain(*draws)], width, (rates_D, seeds_N)
    )
    assert lines == by_hand(state, slots, lengths, draws, width, coin)
    assert after == state


# A row at position 4 feeds its latest token (3) and the drafts 11, 12, 13.
TEXT = [0, 1, 2, 0, 3, 11, 12, 13, 99, 99]


@pytest.mark.parametrize(
    ("drawn", "line", "length", "newest"),
    [
        ([11, 12, 13, 14], [11, 12, 13, 14], 8, 14),
        ([11, 12, 14, 13], [11, 12, 14, -1], 7, 14),
        ([12, 12, 13, 14], [12, -1, -1, -1], 5, 12),
        ([11, 11, 12, 13], [11, 11, -1, -1], 6, 11),
        ([CORRUPTED, 12, 13, 14], [CORRUPTED, -1, -1, -1], 5, 0),
        ([11, CORRUPTED, 13, 14], [11, -1, -1, -1], 5, 11),
        ([11, 12, CORRUPTED, 14], [11, 12, -1, -1], 6, 12),
        ([11, 12, 13, CORRUPTED], [11, 12, 13, -1], 7, 13),
        ([10, CORRUPTED, 13, 14], [10, -1, -1, -1], 5, 10),
        ([CORRUPTED] * 4, [CORRUPTED, -1, -1, -1], 5, 0),
        ([11], [11, -1, -1, -1], 8, 11),
    ],
)
def test_a_row_of_three_drafts(drawn, line, length, newest) -> None:
    """Output, length and latest token of a row of three drafts follow from its draws.

    In the last case the row feeds four tokens, the last three of a prompt, and draws once.
    """
    state = State([4, 0], [list(TEXT), [0] * 10], [[1], [0]])
    lines, after = write_back(state, [0, 1, 1], [8, 1, 0], [drawn, [7], []], [*drawn, 7], 4)
    assert lines == [line, [7, -1, -1, -1], [-1] * 4]
    assert after.lengths == [length, 0]
    assert after.tokens[0] == [*TEXT[:length], newest, *TEXT[length + 1 :]]
    assert after.tokens[1] == [0] * 10


@pytest.mark.parametrize(
    ("drawn", "line"),
    [
        ([21, 22, 23, 24], [11, 12, 23, -1]),
        ([CORRUPTED, 22, 23, 24], [CORRUPTED, -1, -1, -1]),
        ([21, CORRUPTED, 23, 24], [21, -1, -1, -1]),
        ([21, 22, CORRUPTED, 24], [11, 22, -1, -1]),
    ],
)
def test_drafts_that_coins_accept_come_out_themselves(drawn, line) -> None:
    """With acceptance rates 1, 1 and 0, the first two drafts are output and the third is not."""
    state = State([4, 0], [list(TEXT), [0] * 10], [[1], [0]])
    accept = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1, 2])
    lines, after = write_back(state, [0], [8], [drawn], drawn, 4, accept)
    num_out = 4 - line.count(-1)
    assert lines == [line]
    assert after.lengths == [4 + num_out, 0]
    assert after.tokens[0][4 + num_out] == max(line[num_out - 1], 0)


def test_coins_fall_at_the_given_rates_and_apart_from_the_draws() -> None:
    """Over 20,000 rows, acceptance rates are within five standard errors of the given ones."""
    num_rows = 20_000 if not INTERPRETED else 2_000
    rates = 0.75, 0.5
    slots_R = torch.arange(num_rows)
    lengths_R = torch.full((num_rows,), 4, dtype=torch.int32)
    samples_R1 = torch.arange(num_rows + 1, dtype=torch.int32) * 3
    tokens_S = torch.full((3 * num_rows,), 9)
    lengths_N = torch.zeros(num_rows + 1, dtype=torch.int32)
    tokens_NL = torch.full((num_rows + 1, 6), 7, dtype=torch.int32)
    seeds_N = torch.arange(2 * (num_rows + 1))[::2]
    tokens_RW, of_column_RW = (
        TESTED.write_back(
            slots_R,
            lengths_R,
            samples_R1,
            tokens_S,
            lengths_N,
            tokens_NL.clone(),
            3,
            (torch.tensor(rates), seeds),
        )
        for seeds in (seeds_N.contiguous(), seeds_N)
    )
    assert torch.equal(tokens_RW, of_column_RW)
    accepted_R = (tokens_RW == 7).sum(1)
    assert (lengths_N[:-1] == 2 + accepted_R).all()
    for at_least, share in ((1, 0.75), (2, 0.375)):
        error = (share * (1 - share) / num_rows) ** 0.5
        assert abs((accepted_R >= at_least).float().mean().item() - share) < 5 * error


def test_no_draws_at_all() -> None:
    """A row without draws, as of a chunk before the prompt's end, keeps its length and tokens."""
    state = State([4, 0], [list(TEXT), [0] * 10], [[1], [0]])
    lines, after = write_back(state, [0], [8], [[]], [], 1)
    assert (lines, after.lengths, after.tokens[0]) == ([[-1]], [8, 0], TEXT)
