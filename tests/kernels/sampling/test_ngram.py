"""Prompt lookup equals a plain Python version on lists.

The whole file runs twice: for the reference in torch, and for the Triton kernel. That runs in a
process of its own, as TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from nanovllm_kernels.sampling import ngram as kernel, ngram_reference

from tests.interpreted import INTERPRETED, in_parent, passes

TESTED = kernel if INTERPRETED else ngram_reference
EXAMPLES = settings(deadline=None, max_examples=100 if INTERPRETED else 400)


@in_parent
def test_in_the_interpreter() -> None:
    passes(__file__, 24)


def by_hand(text: list[int], num_drafts: int, low: int, high: int) -> list[int] | None:
    """Return the drafts after a text, or None without a match."""
    for size in range(high, low - 1, -1):
        for end in range(len(text) - 2, size - 2, -1):
            if text[end - size + 1 : end + 1] == text[len(text) - size :]:
                drafts = list(text)
                period = len(text) - 1 - end
                for _ in range(num_drafts):
                    drafts.append(drafts[-period])
                return drafts[len(text) :]
    return None


def propose(
    texts: list[list[int]],
    slots: list[int],
    num_drafts: int,
    low: int,
    high: int,
    room: int = 0,
    stale: int = 99,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the drafts of slots and the resulting tokens. `stale` tokens follow the texts."""
    width = max(map(len, texts)) + num_drafts + room
    lines = [text + [stale] * (width - len(text)) for text in texts]
    lengths_N = torch.tensor([*(len(text) - 1 for text in texts), 0], dtype=torch.int32)
    tokens_NL = torch.tensor([*lines, [0] * width], dtype=torch.int32)
    drafts_RX = TESTED.ngram(torch.tensor(slots), lengths_N, tokens_NL, num_drafts, low, high)
    assert drafts_RX.dtype == torch.int32
    assert lengths_N.tolist() == [*(len(text) - 1 for text in texts), 0]
    return drafts_RX.tolist(), tokens_NL.tolist()


def expected(
    texts: list[list[int]],
    slots: list[int],
    num_drafts: int,
    low: int,
    high: int,
    width: int,
    stale: int,
) -> tuple[list[list[int]], list[list[int]]]:
    drafts, after = [], [text + [stale] * (width - len(text)) for text in texts] + [[0] * width]
    for slot in slots:
        if slot == len(texts):
            drafts.append([0] * (1 + num_drafts))
            continue
        text = texts[slot]
        found = by_hand(text, num_drafts, low, high)
        line = found or [text[-1]] * num_drafts
        drafts.append([num_drafts if found else 0, *line])
        after[slot][len(text) : len(text) + num_drafts] = line
    return drafts, after


@st.composite
def texts_with_repeats(draw: st.DrawFn) -> list[int]:
    """Draw tokens of a small vocabulary, perhaps with a passage repeated at the end."""
    text = draw(st.lists(st.integers(0, draw(st.integers(0, 3))), min_size=1, max_size=24))
    start = draw(st.integers(0, len(text) - 1))
    return text + text[start : draw(st.integers(start, len(text)))]


@EXAMPLES
@given(
    texts=st.lists(texts_with_repeats(), min_size=1, max_size=3),
    num_drafts=st.integers(1, 7),
    low=st.integers(1, 4),
    more=st.integers(0, 6),
    room=st.sampled_from([0, 1, 40]),
    stale=st.integers(0, 3),
    data=st.data(),
)
def test_ngram(texts, num_drafts, low, more, room, stale, data) -> None:
    rows = st.lists(st.integers(0, len(texts) - 1), unique=True, max_size=3)
    padding = data.draw(st.integers(0, 2))
    slots = data.draw(rows) + [len(texts)] * padding
    if not slots:
        slots = [0]
    found = propose(texts, slots, num_drafts, low, low + more, room, stale)
    width = len(found[1][0])
    assert found == expected(texts, slots, num_drafts, low, low + more, width, stale)


@pytest.mark.parametrize(
    ("text", "low", "high", "line"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 2, 8, [3, 3, 4, 5]),
        ([1, 2, 3, 4, 5, 6, 7], 1, 8, [0, 7, 7, 7]),  # no match
        ([1, 2, 3, 4, 5, 1], 2, 8, [0, 1, 1, 1]),  # too short a match
        ([1, 2, 3, 4, 5, 1], 1, 8, [3, 2, 3, 4]),
        ([4], 1, 8, [0, 4, 4, 4]),  # no earlier token
        ([4, 4], 2, 8, [0, 4, 4, 4]),  # fewer tokens than the shortest match
        ([4, 4], 1, 8, [3, 4, 4, 4]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, 8, [3, 8, 1, 2]),  # the right one of two equal matches
        ([3, 1, 2, 7, 9, 1, 2, 8, 3, 1, 2], 2, 8, [3, 7, 9, 1]),  # the longer one is older
        ([3, 1, 2, 7, 9, 1, 2, 8, 3, 1, 2], 2, 2, [3, 8, 3, 1]),  # no longer than high
        ([1, 2, 3, 4, 1, 2, 3, 4], 4, 4, [3, 1, 2, 3]),  # the match begins at the first token
        ([1, 2, 3, 9, 2, 3, 1, 2, 3], 3, 8, [3, 9, 2, 3]),  # up to the text's very first token
        ([5, 6, 5, 6], 2, 8, [3, 5, 6, 5]),  # a period of two, continued
        ([8, 6, 6, 6], 1, 8, [3, 6, 6, 6]),
        ([0, 0, 0, 3, 0], 2, 8, [0, 0, 0, 0]),  # zeros before the text are no tokens
        ([99, 5, 99], 2, 8, [0, 99, 99, 99]),  # stale tokens after the text do not match
        # In matches of 16 and more the longest one is the oldest, but a match has at most `high`.
        ([*range(20), 20, *range(1, 20), 21, *range(20)], 16, 20, [3, 20, 1, 2]),
        ([*range(20), 20, *range(1, 20), 21, *range(20)], 16, 19, [3, 21, 0, 1]),
        ([*range(20), 20, *range(4, 20), 21, *range(20)], 16, 16, [3, 21, 0, 1]),
        ([*range(20), 20, *range(4, 20), 21, *range(20)], 2, 17, [3, 20, 4, 5]),
        ([*range(40), 40, *range(40)], 33, 1024, [3, 40, 0, 1]),
        ([*range(40), 40, *range(40)], 41, 1024, [0, 39, 39, 39]),
    ],
)
def test_lookup(text, low, high, line) -> None:
    drafts, after = propose([[7, 7, 7], text], [1, 2], 3, low, high)
    assert drafts == [line, [0, 0, 0, 0]]
    padding = [0] * (max(3, len(text)) + 3)
    assert after == [
        [7, 7, 7] + [99] * (len(padding) - 3),
        [*text, *line[1:]] + [99] * (len(padding) - len(text) - 3),
        padding,
    ]


def test_texts_longer_than_what_is_compared_at_once() -> None:
    """A match across two blocks is found, and a shorter limit finds matches in later blocks."""
    block = kernel.BLOCK
    tail = [50_001, 50_002, 50_003, 50_004]
    text = [*range(3 * block)]
    text[block - 2 : block + 2] = tail
    text[block + 100 : block + 103] = tail[1:]
    text[2 * block + 5 : 2 * block + 8] = tail[1:]
    drafts, _ = propose([text + tail], [0], 2, 2, 8)
    assert drafts == [[2, block + 2, block + 3]]
    drafts, _ = propose([text + tail], [0], 2, 2, 3)
    assert drafts == [[2, 2 * block + 8, 2 * block + 9]]
