"""Division of a step into two halves: their rows, and the attention of both together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanovllm.attention.base import Batch
from nanovllm.attention.halves import divided, halves_of
from nanovllm.attention.torch_ref import TorchPaged
from nanovllm.plan import Chunk
from tests.attention.paged_batches import make_batch

CPU = torch.device("cpu")
# Tokens of the rows' contexts, and new ones: two decode rows, then chunks.
LENGTHS, NEW = [9, 30, 12, 40, 7, 3], [1, 1, 12, 10, 7, 3]


def with_tokens(batch: Batch) -> Batch:
    """Return the batch with the index of each token in place of its id, position and places."""
    at_T = torch.arange(int(batch.starts_R1[-1]))
    return replace(batch, token_ids_T=at_T, positions_T=at_T, slot_mapping_T=at_T, slots_T=at_T)


def made(*, is_padding: bool = False) -> tuple[Tensor, object, Batch]:
    heads = 4, 2, 8
    q_THA, cache, batch = make_batch(LENGTHS, NEW, heads, 4, torch.float32, device=CPU)
    batch = with_tokens(batch)
    return q_THA, cache, replace(batch, planned=()) if is_padding else batch


def test_a_chunk_is_cut_where_the_halves_meet() -> None:
    """17 of 34 tokens are those of the decode rows, the first chunk and 3 tokens of the second."""
    first, second = halves_of(made()[2])
    assert [half.token_ids_T.tolist() for half in (first, second)] == [
        [*range(17)],
        [*range(17, 34)],
    ]
    assert first.starts_R1.tolist() == [0, 1, 2, 14, 17] and second.starts_R1.tolist() == [
        0,
        7,
        14,
        17,
    ]
    assert first.lengths_R.tolist() == [9, 30, 12, 33] and second.lengths_R.tolist() == [40, 7, 3]
    assert first.slots_R.tolist() == [0, 1, 2, 3] and second.slots_R.tolist() == [3, 4, 5]
    counts = [(half.num_decodes, half.num_decode_tokens, half.max_new) for half in (first, second)]
    assert counts == [(2, 2, 12), (0, 0, 7)]
    told = [[(c.slot, c.start, c.num_tokens) for c in half.planned] for half in (first, second)]
    assert told == [[(2, 0, 12), (3, 30, 3)], [(3, 33, 7), (4, 0, 7), (5, 0, 3)]]


def test_attention_of_halves_is_that_of_the_step() -> None:
    q_THA, cache, batch = made()
    backend = TorchPaged(cache)  # type: ignore[arg-type]
    whole_THA = backend.bind(batch)(cache, q_THA)  # type: ignore[arg-type]
    halves = halves_of(batch)
    parts = q_THA.split([len(half.token_ids_T) for half in halves])
    found = [
        backend.bind(half)(cache, part)  # type: ignore[arg-type]
        for half, part in zip(halves, parts, strict=True)
    ]
    assert len(found) == 2
    torch.testing.assert_close(torch.cat(found), whole_THA, atol=1e-6, rtol=1e-6)


def test_a_first_half_of_several_tiles_has_whole_ones() -> None:
    _, _, batch = make_batch([2300], [2300], (1, 1, 8), 128, torch.float32, device=CPU)
    first, second = halves_of(with_tokens(batch))
    assert (len(first.token_ids_T), len(second.token_ids_T)) == (1024, 1276)
    assert (first.max_new, second.max_new) == (1024, 1276)


def test_padding_is_divided_without_slots() -> None:
    """Rows of padding have equally many tokens, and their recurrent states are not stored."""
    heads = 1, 1, 8
    _, _, batch = make_batch([6, 6, 6], [6, 6, 6], heads, 4, torch.float32, device=CPU)
    first, second = halves_of(replace(with_tokens(batch), planned=()))
    assert first.lengths_R.tolist() == [6, 3] and second.lengths_R.tolist() == [6, 6]
    assert [(c.slot, c.num_tokens) for c in first.planned] == [(-1, 6), (-1, 3)]


def test_decode_rows_are_not_divided() -> None:
    heads = 1, 1, 8
    rows = [4] * 6 + [5]
    _, _, batch = make_batch(rows, [1] * 6 + [5], heads, 4, torch.float32, device=CPU)
    assert halves_of(with_tokens(batch)) == ()


@pytest.mark.parametrize(
    ("save_at", "first", "second"),
    [(3, (5, 3), (-1, 0)), (4, (5, 4), (-1, 0)), (6, (-1, 6), (5, 2))],
)
def test_one_side_of_a_cut_saves_the_state(
    save_at: int, first: tuple[int, int], second: tuple[int, int]
) -> None:
    """The checkpoint is 5, and the cut is after 4 of the chunk's 9 tokens."""
    chunk = Chunk(7, 9, samples=True, save_to=5, start=20, save_at=save_at)
    (one,), (two,) = divided([chunk], 4)
    assert [(one.save_to, one.save_at), (two.save_to, two.save_at)] == [first, second]
    assert [(c.num_tokens, c.start, c.samples) for c in (one, two)] == [
        (4, 20, False),
        (5, 24, True),
    ]
