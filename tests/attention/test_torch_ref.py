"""Attention on a CPU: rows that are computed together, with unchanged results."""

from __future__ import annotations

import pytest
import torch

from nanovllm.attention.grouped import GroupedHeads, PagedKV
from nanovllm.attention.torch_ref import TorchPaged, alike
from tests.attention.paged_batches import error_share, make_batch

CPU = torch.device("cpu")


def test_rows_of_similar_contexts_are_computed_together() -> None:
    counts, lengths = [1] * 9, [300, 4000, 250, 310, 40, 3900, 800, 1, 1000]
    # A group's longest context is at most twice its shortest plus 256, since all rows read as
    # many tokens as the longest.
    assert list(alike(counts, lengths)) == [[7, 4, 2], [0, 3, 6], [8], [5, 1]]
    assert list(alike([1, 7, 1, 7], [90, 90, 95, 90])) == [[0, 2], [1, 3]]
    assert list(alike([1], [5])) == [[0]]


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(
    ("lengths", "new"),
    [
        ((900, 17, 64, 700, 1, 1300), (1, 1, 1, 1, 1, 1)),
        ((900, 17, 1300, 40, 700, 65), (1, 1, 1, 40, 3, 3)),
        ((5, 800), (5, 1)),
        ((900, 17, 64, 700, 1, 1300, 50), (4, 1, 3, 1, 1, 4, 40)),  # rows with drafts, and a chunk
        ((900, 17, 64, 0, 0, 60), (2, 1, 3, 0, 0, 50)),  # padding rows of a graph, before a chunk
    ],
)
def test_rows_get_their_own_results_whatever_the_order(
    lengths: tuple[int, ...], new: tuple[int, ...], into: bool
) -> None:
    q_THA, cache, batch = make_batch(lengths, new, (4, 2, 16), 16, torch.float32, CPU)
    backend = TorchPaged(cache)
    backend.bind(batch)  # an earlier step; its copies are overwritten
    out_THA = torch.empty_like(q_THA) if into else None
    o_THA = backend.bind(batch)(cache, q_THA, out_THA)
    assert not into or o_THA is out_THA
    assert error_share(o_THA, q_THA, cache, batch) < 8


def test_results_are_as_wide_as_values() -> None:
    q_THA, cache, batch = make_batch((30, 9), (5, 9), (4, 2, 16), 16, torch.float32, CPU)
    narrow = PagedKV(cache.k_PSGA, cache.v_PSGA[..., :6].contiguous())
    expected_THA = TorchPaged(cache).bind(batch)(cache, q_THA)
    o_THA = TorchPaged(narrow).bind(batch)(narrow, q_THA)
    torch.testing.assert_close(o_THA, expected_THA[..., :6], rtol=1e-5, atol=1e-5)
    heads = GroupedHeads(2)
    heads.cache = narrow
    assert heads.empty(q_THA).shape == o_THA.shape == (14, 4, 6)


def test_no_row_feeds_a_token() -> None:
    assert list(alike([0, 0], [0, 0])) == []
