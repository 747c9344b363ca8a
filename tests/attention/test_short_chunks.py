"""Division of the keys of short chunks, and the choice between kernels that do and do not divide.

The results of divided keys are checked by check-kernels (short_prefill).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nanovllm_kernels.attention.paged_prefill import Division, fastest, paged_prefill

from nanovllm.attention import paged
from nanovllm.attention.paged import WARM_TOKENS, ChunksAttend
from tests.attention.paged_batches import make_batch

CPU = torch.device("cpu")
HEADS = (8, 2, 16)  # 12 multiprocessors, and blocks of 512 tokens, are assumed on a CPU


@pytest.mark.parametrize(
    ("num_tiles", "num_blocks", "expected"),
    [
        (13, 782, Division(10, 87, 786)),  # 200 of 50,000 tokens, eight heads of two keys
        (50, 782, Division(5, 326, 786)),  # 32 heads of eight keys
        (2, 782, Division(32, 33, 786)),  # the most parts
        (125, 782, Division(1, 786, 786)),  # nearly all multiprocessors have a tile
        (1000, 64, Division(1, 544, 544)),
        (13, 4, Division(1, 8, 8)),  # a merge would take longer than it saves
    ],
)
def test_number_of_parts(num_tiles: int, num_blocks: int, expected: Division) -> None:
    """Programs of all parts fit into two waves, and no other number of parts takes less time."""
    assert fastest(num_tiles, num_blocks, 132) == expected


class Calls:
    """Kernels that record their calls and return zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def divided(self, q_THA, k, v, table, starts, lengths, max_new, out=None, *, parts):
        counts = starts.diff()
        self.calls.append(("divided", parts, int(counts.max())))
        assert len(counts) == len(lengths) == len(table) and max_new >= counts.max()
        return torch.zeros_like(q_THA)

    def whole(self, cache, q_THA, out_THA=None):
        self.calls.append(("whole", 1, len(q_THA)))
        return torch.zeros_like(q_THA)


@pytest.mark.parametrize(
    ("length", "has_whole", "expected"),
    [
        (9000, True, ("divided", 6, 20)),
        (9000, False, ("divided", 6, 20)),
        (600, True, ("whole", 1, 20)),
        (600, False, ("divided", 1, 20)),
    ],
)
def test_the_faster_kernel_takes_a_chunk(
    length: int, has_whole: bool, expected: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    monkeypatch.setattr(paged, "paged_prefill", calls.divided)
    q_THA, cache, batch = make_batch((length,), (20,), HEADS, 16, torch.bfloat16, CPU)
    ChunksAttend(batch, calls.whole if has_whole else None)(cache, q_THA)
    assert calls.calls == [expected]


def test_a_padding_step_compiles_the_divided_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first row has few queries there, since the undivided kernel computes the results."""
    calls = Calls()
    monkeypatch.setattr(paged, "paged_prefill", calls.divided)
    q_THA, cache, batch = make_batch((90, 40), (90, 40), HEADS, 16, torch.bfloat16, CPU)
    batch = replace(batch, planned=())
    ChunksAttend(batch, calls.whole)(cache, q_THA)
    assert calls.calls == [("divided", 2, WARM_TOKENS), ("whole", 1, 130)]


@pytest.mark.parametrize(("has_whole", "expected"), [(True, "whole"), (False, "divided")])
def test_rows_of_a_draft_model_compile_nothing(
    has_whole: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no planned chunks, as in a padding step, but come in each step with prompts."""
    calls = Calls()
    monkeypatch.setattr(paged, "paged_prefill", calls.divided)
    q_THA, cache, batch = make_batch((9000,), (20,), HEADS, 16, torch.bfloat16, CPU)
    batch = replace(batch, planned=(), is_draft=True)
    ChunksAttend(batch, calls.whole if has_whole else None)(cache, q_THA)
    assert calls.calls == [(expected, 1, 20)]


def test_the_invariant_order_is_never_divided() -> None:
    q_THA, cache, batch = make_batch((40,), (20,), HEADS, 16, torch.bfloat16, CPU)
    rows = batch.page_table_RM, batch.starts_R1, batch.lengths_R, 20
    with pytest.raises(AssertionError, match=r"\(2, True\)"):
        paged_prefill(q_THA, cache.k_PSGA, cache.v_PSGA, *rows, ordered=True, parts=2)
