"""Rows of the cases of decode kernels: their new tokens, their outlier keys and their bytes."""

from __future__ import annotations

import math

import pytest
import torch
from nanovllm_kernels.attention.decode_cases import (
    KVRows,
    all_rows,
    by_position,
    case_of,
    drafted,
    inputs,
    timed_drafts,
)

CPU = torch.device("cpu")


def lengths_alone(lengths_R: torch.Tensor, k_PSGA: torch.Tensor) -> list[int]:
    return lengths_R.tolist()


def test_names_differ_and_rows_have_no_more_new_tokens_than_tokens() -> None:
    names = [case_of(lengths_alone, rows).name for rows in all_rows()]
    assert len(set(names)) == len(names)
    for rows in all_rows():
        assert len(rows.counts) == len(rows.lengths)
        pairs = list(zip(rows.counts, rows.lengths, strict=True))
        assert all(0 <= new <= min(length, max(1, rows.width)) for new, length in pairs)
        used = [length > 0 for length in rows.lengths]
        assert used == sorted(used, reverse=True), "rows without tokens stand at the tail"


def test_drafted_rows_take_turns() -> None:
    rows = drafted(KVRows((9, 9, 1, 9, 9, 0), (1, 1, 64), 16, width=3))
    assert rows.counts == (3, 2, 1, 0, 3, 0)


def test_timed_drafts_fill_the_rows_of_their_graph() -> None:
    """64 rows of 4 tokens read keys, values and queries once, and write their results."""
    named = {f"{rows.timed_as} H={rows.heads[0]}": rows for rows in timed_drafts()}
    rows = named["R=64 ctx=1024 W=4 H=32"]
    assert len(rows.lengths) == sum(rows.counts) == 256
    read = 64 * 1024 * 8 * 128 * 2 * 2
    assert case_of(lengths_alone, rows).num_bytes == read + 256 * 32 * 128 * 2 * 2


@pytest.mark.parametrize("width", [0, 4])
def test_inputs_are_what_the_kernels_are_called_with(width: int) -> None:
    rows = KVRows((40, 33, 0), (4, 2, 64), 16, new=(4, 1, 0) if width else (), width=width)
    called = {}

    def decode(q, k, v, table, lengths, plan, **ragged: object) -> torch.Tensor:
        called.update(ragged, q=q.shape, plan=plan)
        return q

    by_position(decode)(*inputs(lengths_alone, rows, CPU))
    starts = called.pop("starts_R1")
    assert starts is None if width == 0 else starts.tolist() == [0, 4, 5, 5]
    tokens = 5 if width else 3
    assert called.pop("scales_2G") is None
    assert called == {"q": (tokens, 4, 64), "plan": [40, 33, 0], "width": width or 1}
    by_position(decode)(*inputs(lengths_alone, rows._replace(is_fp8=True), CPU))
    assert called["scales_2G"].shape == (2, 2)


def test_the_newest_key_outweighs_all_others_for_every_query_of_its_row() -> None:
    rows = KVRows((40,), (2, 1, 64), 16, torch.float32, "newest", new=(4,), width=4)
    q_THA, k_PSGA, _, table_RM, *_ = inputs(lengths_alone, rows, CPU)
    k_LA = k_PSGA[table_RM[0].long()].flatten(0, 1)[:40, 0]
    scores_TL = q_THA[:, 0] @ k_LA.T / math.sqrt(64)
    assert (scores_TL[:, 39] > scores_TL[:, :39].amax(1) + 10).all()
